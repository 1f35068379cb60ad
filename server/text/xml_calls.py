"""Calls as tags: ``<function=f><parameter=city>Paris</parameter></function>``, or as GLM writes
them, ``f<arg_key>city</arg_key><arg_value>Paris</arg_value>``.

Strings stand without quotes, so what a value means is asked of the function's schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from server.text.argument_kinds import argument_kind, argument_types
from server.text.calls import Calls
from server.text.source import Markers, Read, Source, Unfinished

_MAX_NAME = 256
_PARAMETER_ENDS = Markers(["\n</parameter>", "</parameter>"])
_VALUE_ENDS = Markers(["</arg_value>"])


def read_calls(source: Source, calls: Calls) -> Read[None]:
    """Read what follows ``<tool_call>``: one function."""
    yield from source.space()
    yield from source.expect("<function=")
    name = (yield from source.until(">", limit=_MAX_NAME)).strip()
    calls.begin(name)
    calls.arguments("{")
    between = ""
    while True:
        yield from source.space()
        if (yield from source.literal("</function>")):
            break
        yield from source.expect("<parameter=")
        key = (yield from source.until(">", limit=_MAX_NAME)).strip()
        yield from source.literal("\n")
        calls.arguments(f"{between}{json.dumps(key)}: ")
        between = ", "
        yield from _read_value(source, calls, name, key, _PARAMETER_ENDS)
    calls.arguments("}")
    calls.end()
    yield from source.space()
    yield from source.literal("</tool_call>")
    source.kept_from = source.at


def read_pairs(source: Source, calls: Calls) -> Read[None]:
    """Read what follows ``<tool_call>``: a name, and keys and values in turn."""
    yield from source.space()
    name = yield from source.name()
    calls.begin(name)
    calls.arguments("{")
    between = ""
    while True:
        yield from source.space()
        if (yield from source.literal("</tool_call>")):
            break
        yield from source.expect("<arg_key>")
        key = (yield from source.until("</arg_key>", limit=_MAX_NAME)).strip()
        yield from source.space()
        yield from source.expect("<arg_value>")
        calls.arguments(f"{between}{json.dumps(key)}: ")
        between = ", "
        yield from _read_value(source, calls, name, key, _VALUE_ENDS)
    calls.arguments("}")
    calls.end()


def _read_value(source: Source, calls: Calls, name: str, key: str, ends: Markers) -> Read[None]:
    """Read a value and tell it as JSON: a string as it comes, anything else when it is complete."""
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
    """A value as JSON; what is none is a string."""
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
