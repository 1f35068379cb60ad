"""Where the readers of all dialects put the calls they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.text.parts import Part, ToolCallArguments, ToolCallBegin
from server.text.source import Malformed, Source


class Calls:
    """The calls of one answer.

    As they come, or ``whole``: then a call is told when it is complete, so that one which turns out
    to be malformed can still become text.
    """

    def __init__(
        self,
        source: Source,
        tell: Callable[[Part], None],
        schemas: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        whole: bool,
    ) -> None:
        self._source = source
        self._tell = tell
        self._schemas = schemas
        self._new_id = new_id
        self._whole = whole
        self._pending: list[Part] = []
        self.count = 0  # complete calls
        self.is_open = False  # a call has begun and has not ended
        self.is_told = False  # ... and was told

    def knows(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._schemas

    def schema(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a tool's arguments."""
        return self._schemas[name]

    def begin(self, name: str, id: str = "") -> None:
        """A call of ``name``, with an id where the model has written one.

        Raises Malformed when there is no such tool.
        """
        if name not in self._schemas:
            raise Malformed
        self.is_open = True
        if not self._whole:
            self.is_told = True
        self._put(ToolCallBegin(self.count, id or self._new_id(), name))

    def arguments(self, text: str) -> None:
        """A piece of the arguments."""
        if text:
            self._put(ToolCallArguments(self.count, text))

    def end(self) -> None:
        """The call is complete; what has been read up to here will not be text."""
        self._flush()
        self.count += 1
        self.is_open = self.is_told = False
        self._source.kept_from = self._source.at

    def add(self, name: str, arguments: str) -> None:
        """A complete call."""
        self.begin(name)
        self.arguments(arguments)
        self.end()

    def tell_as_far(self) -> None:
        """Tell a call that will not be complete, as far as it came."""
        self._flush()
        self.is_told = True

    def drop(self) -> None:
        """Forget a call that has not been told."""
        self._pending.clear()
        self.is_open = False

    def _flush(self) -> None:
        for part in self._pending:
            self._tell(part)
        self._pending.clear()

    def _put(self, part: Part) -> None:
        if self._whole:
            self._pending.append(part)
        else:
            self._tell(part)
            self._source.kept_from = self._source.at  # what was told cannot become text any more
