"""Calls as a name and then its arguments: ``[TOOL_CALLS]f[ARGS]{...}`` and the like.

Some families write an id in the place of the name, which has the name in it (``functions.f:0``):
that is the call's id, for the model is shown it again.
"""

from __future__ import annotations

from dataclasses import dataclass

from server.text import json_calls
from server.text.calls import Calls
from server.text.source import Malformed, Read, Source

_MAX_HEAD = 256  # characters between a call's beginning and its arguments


@dataclass(frozen=True)
class NamedCalls:
    """How one family writes such calls. Empty strings stand for what it does not write."""

    begin: str  # before each call
    before_name: str  # such as the kind of tool
    after_name: str
    fence: str  # around the arguments, before them with a language
    end: str  # after each call
    has_ids: bool = False  # ``functions.NAME:NUMBER`` in the place of the name

    def read(self, source: Source, calls: Calls) -> Read[None]:
        """Read calls as long as they follow each other."""
        yield from source.space()
        yield from source.expect(self.begin)
        while True:
            yield from source.expect(self.before_name)
            yield from _read_named(source, calls, self.after_name, self.fence, has_ids=self.has_ids)
            for mark in (self.fence, self.end):
                yield from source.space()
                yield from source.literal(mark)
            source.kept_from = source.at
            yield from source.space()
            if not (yield from source.literal(self.begin)):
                return


def read_mistral(source: Source, calls: Calls) -> Read[None]:
    """Read what follows ``[TOOL_CALLS]``: a JSON list, or one call as a name and its arguments."""
    yield from source.space()
    if (yield from source.char()) in ("[", "{"):
        yield from json_calls.read_calls(source, calls)
    else:
        yield from _read_named(source, calls, "[ARGS]", "")


def _read_named(
    source: Source, calls: Calls, after_name: str, fence: str, *, has_ids: bool = False
) -> Read[None]:
    head = yield from source.until(after_name, limit=_MAX_HEAD)
    name = head.partition("[CALL_ID]")[0].strip()  # Mistral's models number some of theirs
    id = ""
    if has_ids:
        id, name = name, name.removeprefix("functions.").rpartition(":")[0]
    yield from source.space()
    if fence and (yield from source.literal(fence)):
        yield from source.literal("json")
        yield from source.space()
    if not calls.knows(name) or (yield from source.char()) != "{":
        raise Malformed
    calls.begin(name, id)
    yield from json_calls.stream_object(source, calls)
    calls.end()
