"""The output of all dialects' readers: the tool calls that they find."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from server.text.parts import Part, ToolCallArguments, ToolCallBegin
from server.text.source import Malformed, Source


class ToolCallEmitter:
    """The tool calls of one answer.

    Calls are emitted as they arrive or, if ``buffer_calls``, once they are complete, so that a
    malformed one can still become text.
    """

    def __init__(
        self,
        source: Source,
        emit: Callable[[Part], None],
        schemas: Mapping[str, Mapping[str, Any]],
        new_id: Callable[[], str],
        *,
        buffer_calls: bool,
    ) -> None:
        self._source = source
        self._emit = emit
        self._schemas = schemas
        self._new_id = new_id
        self._buffer_calls = buffer_calls
        self._pending: list[Part] = []
        self.count = 0  # complete calls
        self.is_open = False  # a call has begun and not ended
        self.is_emitted = False  # ... and was emitted

    def has_tool(self, name: str) -> bool:
        """Whether there is a tool of this name."""
        return name in self._schemas

    def schema(self, name: str) -> Mapping[str, Any]:
        """The JSON schema of a tool's arguments."""
        return self._schemas[name]

    def begin(self, name: str, id: str = "") -> None:
        """Begin a call of ``name``, with an id if the model wrote one.

        Raises Malformed if there is no such tool.
        """
        if name not in self._schemas:
            raise Malformed
        self.is_open = True
        if not self._buffer_calls:
            self.is_emitted = True
        self._add_part(ToolCallBegin(self.count, id or self._new_id(), name))

    def add_arguments(self, text: str) -> None:
        """Add a piece of the arguments."""
        if text:
            self._add_part(ToolCallArguments(self.count, text))

    def end(self) -> None:
        """Complete the call; the input read so far can no longer become text."""
        self._flush()
        self.count += 1
        self.is_open = self.is_emitted = False
        self._source.checkpoint = self._source.position

    def add(self, name: str, arguments: str) -> None:
        """Add a complete call."""
        self.begin(name)
        self.add_arguments(arguments)
        self.end()

    def emit_partial(self) -> None:
        """Emit an incomplete call as far as it was read."""
        self._flush()
        self.is_emitted = True

    def drop(self) -> None:
        """Discard a call that has not been emitted."""
        self._pending.clear()
        self.is_open = False

    def _flush(self) -> None:
        for part in self._pending:
            self._emit(part)
        self._pending.clear()

    def _add_part(self, part: Part) -> None:
        if self._buffer_calls:
            self._pending.append(part)
        else:
            self._emit(part)
            # Emitted input cannot become text any more.
            self._source.checkpoint = self._source.position
