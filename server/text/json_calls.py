"""Tool calls as JSON: ``{"name": "f", "arguments": {...}}``, a single object or a list."""

from __future__ import annotations

import json
from collections.abc import Callable

from server.text.calls import Calls
from server.text.json_scan import JsonScanner
from server.text.source import Malformed, Read, Source, Unfinished

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_OTHERS = ("id", "type", "tool_call_id")  # keys that some models write before the name


def read_calls(source: Source, calls: Calls) -> Read[None]:
    """Read an object, a list of objects, or several objects in a row."""
    yield from source.space()
    if (yield from source.literal("[")):
        yield from read_listed(source, calls)
        return
    while True:
        yield from read_call(source, calls)
        yield from source.space()
        yield from source.literal(";")
        yield from source.space()
        if (yield from source.char()) != "{":
            return


def read_listed(source: Source, calls: Calls) -> Read[None]:
    """Read the remaining objects of a list, and its end."""
    while True:
        yield from source.space()
        yield from read_call(source, calls)
        yield from source.space()
        if not (yield from source.literal(",")):
            break
    yield from source.expect("]")


def read_call(source: Source, calls: Calls) -> Read[None]:
    """Read one object. The call is complete with its arguments, whatever follows them."""
    yield from source.expect("{")
    name, arguments, complete = None, None, False
    while True:
        yield from source.space()
        key = yield from read_string(source)
        yield from source.space()
        yield from source.expect(":")
        yield from source.space()
        if key in _NAMES and name is None:
            name = yield from read_string(source)
            if not calls.knows(name):
                raise Malformed
        elif key in _ARGUMENTS and not complete:
            if name is not None and (yield from source.char()) == "{":
                calls.begin(name)
                yield from stream_object(source, calls)
                calls.end()
                complete = True
            else:
                arguments = as_object((yield from read_value(source)))
        elif complete or key in _OTHERS:
            yield from read_value(source)
        else:
            raise Malformed
        if name is not None and arguments is not None and not complete:
            calls.add(name, arguments)
            complete = True
        yield from source.space()
        if not (yield from source.literal(",")):
            break
    if not complete:
        raise Malformed
    while (yield from source.literal("}")):  # one too many is a common slip
        source.kept_from = source.at
        yield from source.space()


def stream_object(source: Source, calls: Calls) -> Read[None]:
    """Read a JSON object as the current call's arguments, passing it on as it arrives."""
    yield from _follow(source, calls.arguments)


def read_value(source: Source) -> Read[str]:
    """Read a JSON value and return its text."""
    pieces: list[str] = []
    yield from _follow(source, pieces.append)
    return "".join(pieces)


def read_string(source: Source) -> Read[str]:
    """Read a JSON string and return its decoded value."""
    if (char := (yield from source.char())) != '"':
        raise Malformed if char else Unfinished
    return json.loads((yield from read_value(source)))


def as_object(text: str) -> str:
    """The JSON object in ``text``, which may be encoded as a string. Raises Malformed."""
    value = json.loads(text)
    if isinstance(value, str):
        text = value
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise Malformed from None
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Malformed
    return text


def _follow(source: Source, take: Callable[[str], object]) -> Read[None]:
    scanner = JsonScanner()
    while True:
        take(source.scan(scanner))
        if scanner.failed:
            raise Malformed
        if scanner.done:
            return
        if source.ended:
            raise Unfinished
        yield
