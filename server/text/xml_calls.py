"""Calls as tags: ``<function=f><parameter=city>Paris</parameter></function>``.

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
_ENDS = Markers(["\n</parameter>", "</parameter>"])


def read_calls(source: Source, calls: Calls) -> Read[None]:
    """Read what follows ``<tool_call>``: one function."""
    yield from source.space()
    yield from source.expect("<function=")
    name = (yield from source.until(">", limit=_MAX_NAME)).strip()
    calls.begin(name)
    root = calls.schema(name)
    properties = root.get("properties", {})
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
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        yield from _read_value(source, calls, schema if isinstance(schema, Mapping) else {}, root)
    calls.arguments("}")
    calls.end()
    yield from source.space()
    yield from source.literal("</tool_call>")
    source.kept_from = source.at


def _read_value(
    source: Source, calls: Calls, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> Read[None]:
    """Read a value and tell it as JSON: a string as it comes, anything else when it is complete."""
    kind = argument_kind(schema, root)
    if kind == "text" and "null" not in argument_types(schema, root):
        calls.arguments('"')
        marker = ""
        while not marker:
            text, marker = source.pass_over(_ENDS)
            calls.arguments(json.dumps(text, ensure_ascii=False)[1:-1])
            if not marker:
                yield from _wait(source)
        calls.arguments('"')
        return
    pieces, marker = [], ""
    while not marker:
        text, marker = source.pass_over(_ENDS)
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
