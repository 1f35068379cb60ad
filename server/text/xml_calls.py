"""Tool calls as tags.

``<function=f><parameter=city>Paris</parameter></function>``, or MiniMax's ``<invoke
name="f"><parameter name="city">Paris</parameter></invoke>``, or GLM's
``f<arg_key>city</arg_key><arg_value>Paris</arg_value>``.

Strings are not quoted, so the function's schema determines the meaning of a value.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from server.text.argument_kinds import argument_kind, argument_types
from server.text.calls import Calls
from server.text.source import Markers, Read, Source, Unfinished

_MAX_NAME = 256
_PARAMETER_ENDS = Markers(["\n</parameter>", "</parameter>"])
_VALUE_ENDS = Markers(["</arg_value>"])


class TaggedCalls(NamedTuple):
    """The tags of a family for functions and arguments."""

    call: str  # before a function's name
    argument: str  # before an argument's name
    named: str  # after either name
    call_end: str
    end: str  # after the call, or after all calls
    has_several: bool = False  # several calls after one opener

    def read(self, source: Source, calls: Calls) -> Read[None]:
        """Read what follows the opener."""
        yield from source.space()
        yield from source.expect(self.call)
        yield from self._read_call(source, calls)
        yield from source.space()
        while self.has_several and (yield from source.literal(self.call)):
            yield from self._read_call(source, calls)
            yield from source.space()
        yield from source.literal(self.end)
        source.kept_from = source.at

    def _read_call(self, source: Source, calls: Calls) -> Read[None]:
        name = (yield from source.until(self.named, limit=_MAX_NAME)).strip()
        calls.begin(name)
        calls.arguments("{")
        between = ""
        while True:
            yield from source.space()
            if (yield from source.either(self.call_end, self.argument)) == self.call_end:
                break
            key = (yield from source.until(self.named, limit=_MAX_NAME)).strip()
            yield from source.literal("\n")
            calls.arguments(f"{between}{json.dumps(key)}: ")
            between = ", "
            yield from _read_value(source, calls, name, key, _PARAMETER_ENDS)
        calls.arguments("}")
        calls.end()


QWEN = TaggedCalls("<function=", "<parameter=", ">", "</function>", "</tool_call>")
SEED = QWEN._replace(end="</seed:tool_call>")
MINIMAX = TaggedCalls(
    *('<invoke name="', '<parameter name="', '">', "</invoke>", "</minimax:tool_call>"),
    has_several=True,
)


def read_pairs(source: Source, calls: Calls) -> Read[None]:
    """Read what follows ``<tool_call>``: a name, then alternating keys and values."""
    yield from source.space()
    name = yield from source.name()
    calls.begin(name)
    calls.arguments("{")
    between = ""
    while True:
        yield from source.space()
        if (yield from source.either("</tool_call>", "<arg_key>")) == "</tool_call>":
            break
        key = (yield from source.until("</arg_key>", limit=_MAX_NAME)).strip()
        yield from source.space()
        yield from source.expect("<arg_value>")
        calls.arguments(f"{between}{json.dumps(key)}: ")
        between = ", "
        yield from _read_value(source, calls, name, key, _VALUE_ENDS)
    calls.arguments("}")
    calls.end()


def _read_value(source: Source, calls: Calls, name: str, key: str, ends: Markers) -> Read[None]:
    """Read a value and emit it as JSON: a string as it arrives, anything else once complete."""
    root = calls.schema(name)
    properties = root.get("properties", {})
    found = properties.get(key) if isinstance(properties, Mapping) else None
    schema: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    kind = argument_kind(schema, root)
    if kind == "text" and "null" not in argument_types(schema, root):
        calls.arguments('"')
        marker = ""
        while not marker:
            text, marker = source.pass_over(ends)
            calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if not marker:
                yield from _wait(source)
        calls.arguments('"')
        return
    pieces, marker = [], ""
    while not marker:
        text, marker = source.pass_over(ends)
        pieces.append(text)
        if not marker:
            yield from _wait(source)
    calls.arguments(_as_json("".join(pieces), kind == "text"))


def _wait(source: Source) -> Read[None]:
    if source.ended:
        raise Unfinished
    yield


def _as_json(text: str, is_text: bool) -> str:
    """A value as JSON; anything that is not JSON is a string."""
    if not is_text or text == "null":
        try:
            json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            pass
        else:
            return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
