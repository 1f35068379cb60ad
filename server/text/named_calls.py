"""Tool calls as a name followed by arguments: ``[TOOL_CALLS]f[ARGS]{...}`` and similar.

Some families write an id that contains the name instead (``functions.f:0``). It becomes the call's
id, because the model sees it again in later turns.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.text import json_calls
from server.text.calls import ToolCallEmitter
from server.text.source import Malformed, Read, Source

_MAX_HEAD = 256  # characters between a call's start and its arguments


@dataclass(frozen=True)
class NamedCalls:
    """The format of one family; empty strings are absent delimiters."""

    begin: str  # before each call
    before_name: str  # such as the kind of tool
    after_name: str
    fence: str  # around the arguments; the opening one is followed by a language
    end: str  # after each call
    has_ids: bool = False  # ``functions.NAME:NUMBER`` in place of the name

    def read(self, source: Source, calls: ToolCallEmitter) -> Read[None]:
        """Read consecutive calls."""
        yield from source.read_space()
        yield from source.expect(self.begin)
        while True:
            yield from source.expect(self.before_name)
            yield from _read_named(source, calls, self.after_name, self.fence, has_ids=self.has_ids)
            for mark in (self.fence, self.end):
                yield from source.read_space()
                yield from source.accept(mark)
            source.checkpoint = source.position
            yield from source.read_space()
            if not (yield from source.accept(self.begin)):
                return


def read_mistral(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read what follows ``[TOOL_CALLS]``: a JSON list, or one call as a name and its arguments."""
    yield from source.read_space()
    if (yield from source.peek_char()) in ("[", "{"):
        yield from json_calls.read_calls(source, calls)
    else:
        yield from _read_named(source, calls, "[ARGS]", "")


def _read_named(
    source: Source, calls: ToolCallEmitter, after_name: str, fence: str, *, has_ids: bool = False
) -> Read[None]:
    head = yield from source.read_until(after_name, limit=_MAX_HEAD)
    name = head.partition("[CALL_ID]")[0].strip()  # some of Mistral's models number their calls
    id = ""
    if has_ids:
        id, name = name, name.removeprefix("functions.").rpartition(":")[0]
    yield from source.read_space()
    if fence and (yield from source.accept(fence)):
        yield from source.accept("json")
        yield from source.read_space()
    if not calls.has_tool(name) or (yield from source.peek_char()) != "{":
        raise Malformed
    calls.begin(name, id)
    yield from json_calls.stream_object(source, calls)
    calls.end()
