"""Drafting by looking up the last tokens of a text in the text itself.

Prompt lookup (Saxena 2023): texts repeat themselves, and answers repeat their prompts.

A text is kept as a string with one character per token and searched backwards with ``str.rfind``.
An index of the token runs would make the time of a lookup independent of the text's length. But
maintaining it takes a dozen times as long per token, all at once for a whole prompt, and some
hundred bytes per token instead of two or four.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.proposer import Drafter
from engine.types import Request

_LOOKUP_S = 1e-5  # host time to look up a text's last tokens
_APPEND_S = 7e-8  # to append a token to a text
_SCAN_S = 2e-9  # to search past a token


class SearchedText:
    """A growing text that is searched for earlier occurrences of its last tokens."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = ""

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Append what is new in the whole text."""
        self._text += "".join(map(chr, token_ids[len(self._text) :]))

    def find(self, length: int) -> int | None:
        """Where the last ``length`` tokens last ended before; None: they are unique."""
        text = self._text
        start = text.rfind(text[-length:], 0, len(text) - 1)
        return None if start < 0 else start + length

    def lookup_cost_s(self, num_unseen: int) -> float:
        """Estimated seconds of a lookup, including appending ``num_unseen`` tokens."""
        return _LOOKUP_S + num_unseen * _APPEND_S + (len(self) + num_unseen) * _SCAN_S


class NgramDrafter:
    """Drafts for one text from the text itself."""

    __slots__ = ("_lengths", "_text")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._text = SearchedText()

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What followed the last occurrence; see ``Drafter``."""
        text = self._text
        text.extend(token_ids)
        # If the shortest run is not found, no longer one is. Most lookups fail, and end here.
        if text.find(self._lengths[-1]) is None:
            return ()
        for length in self._lengths:
            end = text.find(length)
            if end is not None:
                return continuation(token_ids, end, most)
        return ()

    def lookup_cost_s(self, num_unseen: int) -> float:
        """See ``Drafter``."""
        return self._text.lookup_cost_s(num_unseen)


class NgramProposer:
    """Makes an independent drafter for each text.

    Args:
        lengths: of the runs that are looked up, longest first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def begin(self, request: Request) -> Drafter:
        """A drafter that reads the text when first asked for drafts."""
        return NgramDrafter(self._lengths)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Do nothing: no text is kept."""


def continuation(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on, repeating from there at the end of the text."""
    period = len(token_ids) - start
    return tuple(token_ids[start + index % period] for index in range(count))
