"""Finds stop strings in text that arrives in pieces.

Uses the automaton of Aho and Corasick (1975), which makes one transition per character whatever the
number of stop strings. A state's depth is the length of the longest suffix of the text that could
still become a stop string, which is exactly what has to be held back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class StopMatcher:
    """Finds the first stop string in a text, however the text is split.

    The first is the one that completes first; of several that end together, the longest. Only text
    that could still be part of a stop string is held back.
    """

    def __init__(self, stops: Sequence[str], *, include_stop: bool = False) -> None:
        """Watch for ``stops``, none of them empty.

        Args:
            stops: the strings.
            include_stop: also return the stop string itself; then nothing has to be held back.
        """
        self._root = _build(stops)
        self._state = self._root
        self._held = ""
        self._include_stop = include_stop
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Add text; returns what is certain by now. ``matched`` is set if a stop string was found.

        After a match nothing more is returned.
        """
        if self.matched is not None:
            return ""
        root, state = self._root, self._state
        for index, char in enumerate(text):
            following = state.children.get(char)
            while following is None and state is not root:
                state = state.fallback
                following = state.children.get(char)
            state = root if following is None else following
            if state.match is not None:
                return self._stop_at(self._held + text[: index + 1], state.match)
        self._state = state
        if self._include_stop:
            return text
        known = self._held + text
        certain = len(known) - state.depth
        self._held = known[certain:]
        return known[:certain]

    def flush(self) -> str:
        """The text held back, at the end of the text."""
        held, self._held, self._state = self._held, "", self._root
        return held

    def _stop_at(self, known: str, match: str) -> str:
        self.matched = match
        self._held = ""
        return known if self._include_stop else known[: -len(match)]


class _Node:
    """A state: the longest suffix of the text that begins some stop string."""

    __slots__ = ("children", "depth", "fallback", "match")

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.children: dict[str, _Node] = {}
        self.fallback: _Node = self
        self.match: str | None = None  # the longest stop string that ends here


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.children.setdefault(char, _Node(node.depth + 1))
        node.match = stop
    queue = deque(root.children.values())
    for node in queue:
        node.fallback = root
    while queue:
        node = queue.popleft()
        for char, child in node.children.items():
            fallback = node.fallback
            while char not in fallback.children and fallback is not root:
                fallback = fallback.fallback
            child.fallback = fallback.children.get(char, root)
            if child.match is None:
                child.match = child.fallback.match
            queue.append(child)
    return root
