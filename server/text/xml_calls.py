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
from server.text.calls import ToolCallEmitter
from server.text.json_scan import is_json
from server.text.source import Markers, Read, Source, Unfinished

_MAX_NAME = 256
_PARAMETER_ENDS = Markers(["\n</parameter>", "</parameter>"])


class TaggedCalls(NamedTuple):
    """The tags of a family for functions and arguments."""

    call_begin: str  # before a function's name
    argument_begin: str  # before an argument's name
    name_end: str  # after either name
    call_end: str
    end: str  # after the call, or after all calls
    has_several: bool = False  # several calls after one opener

    def read(self, source: Source, calls: ToolCallEmitter) -> Read[None]:
        """Read what follows the opener."""
        yield from source.read_space()
        yield from source.expect(self.call_begin)
        yield from self._read_call(source, calls)
        yield from source.read_space()
        while self.has_several and (yield from source.accept(self.call_begin)):
            yield from self._read_call(source, calls)
            yield from source.read_space()
        yield from source.accept(self.end)
        source.checkpoint = source.position

    def _read_call(self, source: Source, calls: ToolCallEmitter) -> Read[None]:
        name = (yield from source.read_until(self.name_end, limit=_MAX_NAME)).strip()
        calls.begin(name)
        calls.add_arguments("{")
        between = ""
        while True:
            yield from source.read_space()
            if (
                yield from source.expect_one_of(self.call_end, self.argument_begin)
            ) == self.call_end:
                break
            key = (yield from source.read_until(self.name_end, limit=_MAX_NAME)).strip()
            yield from source.accept("\n")
            calls.add_arguments(f"{between}{json.dumps(key)}: ")
            between = ", "
            yield from _read_value(source, calls, name, key, _PARAMETER_ENDS)
        calls.add_arguments("}")
        calls.end()


QWEN = TaggedCalls("<function=", "<parameter=", ">", "</function>", "</tool_call>")
SEED = QWEN._replace(end="</seed:tool_call>")
MINIMAX = TaggedCalls(
    *('<invoke name="', '<parameter name="', '">', "</invoke>", "</minimax:tool_call>"),
    has_several=True,
)


class PairedCalls(NamedTuple):
    """A function's name, then alternating keys and values."""

    prefix: str  # of the names of all tags

    @property
    def marks(self) -> tuple[str, str, str, str]:
        """The tags around a key, and those around a value."""
        key, value = f"{self.prefix}arg_key", f"{self.prefix}arg_value"
        return f"<{key}>", f"</{key}>", f"<{value}>", f"</{value}>"

    def read(self, source: Source, calls: ToolCallEmitter) -> Read[None]:
        """Read what follows the opener."""
        key_begin, key_end, value_begin, value_end = self.marks
        end, ends = f"</{self.prefix}tool_call>", Markers([value_end])
        yield from source.read_space()
        name = yield from source.read_name()
        calls.begin(name)
        calls.add_arguments("{")
        between = ""
        while True:
            yield from source.read_space()
            if (yield from source.expect_one_of(end, key_begin)) == end:
                break
            key = (yield from source.read_until(key_end, limit=_MAX_NAME)).strip()
            yield from source.read_space()
            yield from source.expect(value_begin)
            calls.add_arguments(f"{between}{json.dumps(key)}: ")
            between = ", "
            yield from _read_value(source, calls, name, key, ends)
        calls.add_arguments("}")
        calls.end()


GLM = PairedCalls("")
LONGCAT = PairedCalls("longcat_")


def _read_value(
    source: Source, calls: ToolCallEmitter, name: str, key: str, ends: Markers
) -> Read[None]:
    """Read a value and emit it as JSON: a string as it arrives, anything else once complete."""
    root = calls.schema(name)
    properties = root.get("properties", {})
    found = properties.get(key) if isinstance(properties, Mapping) else None
    schema: Mapping[str, Any] = found if isinstance(found, Mapping) else {}
    kind = argument_kind(schema, root)
    if kind == "text" and "null" not in argument_types(schema, root):
        yield from read_text(source, calls, ends)
    else:
        yield from read_json(source, calls, ends, is_text=kind == "text")


def read_text(source: Source, calls: ToolCallEmitter, ends: Markers) -> Read[None]:
    """Read a string and emit it as JSON, as it arrives."""
    calls.add_arguments('"')
    marker = ""
    while not marker:
        text, marker = source.read_to_marker(ends, ends_with_one=True)
        calls.add_arguments(json.dumps(text, ensure_ascii=False)[1:-1])
        if not marker:
            yield from _wait(source)
    calls.add_arguments('"')


def read_json(
    source: Source, calls: ToolCallEmitter, ends: Markers, *, is_text: bool = False
) -> Read[None]:
    """Read a value and emit it once complete. What is not JSON is a string, and where
    ``is_text`` everything but ``null``."""
    pieces, marker = [], ""
    while not marker:
        text, marker = source.read_to_marker(ends)
        pieces.append(text)
        if not marker:
            yield from _wait(source)
    calls.add_arguments(_as_json("".join(pieces), is_text))


def _wait(source: Source) -> Read[None]:
    if source.ended:
        raise Unfinished
    yield


def _as_json(text: str, is_text: bool) -> str:
    """A value as JSON; anything that is not JSON is a string."""
    if (not is_text or text == "null") and is_json(text):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)
