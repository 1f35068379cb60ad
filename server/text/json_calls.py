"""Tool calls as JSON: ``{"name": "f", "arguments": {...}}``, a single object or a list."""

from __future__ import annotations

import json
from collections.abc import Callable

from server.text.calls import ToolCallEmitter
from server.text.json_scan import JsonScanner, is_json
from server.text.source import Malformed, Read, Source, Unfinished

_ARGUMENTS = ("arguments", "parameters")
_NAMES = ("name", "tool_name")
_SPACE = " \t\n\r"
_OTHERS = ("id", "type", "tool_call_id")  # keys that some models write before the name


def read_calls(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read an object, a list of objects, or several objects in a row."""
    yield from source.read_space()
    if (yield from source.accept("[")):
        yield from read_array_items(source, calls)
        return
    while True:
        yield from read_call(source, calls)
        yield from source.read_space()
        yield from source.accept(";")
        yield from source.read_space()
        if (yield from source.peek_char()) != "{":
            return


def read_array_items(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read the remaining objects of a list, and its end."""
    while True:
        yield from source.read_space()
        yield from read_call(source, calls)
        yield from source.read_space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("]")


def read_call(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read one object. The call is complete with its arguments, whatever follows them."""
    yield from source.expect("{")
    name, arguments, complete = None, None, False
    while True:
        yield from source.read_space()
        key = yield from read_string(source)
        yield from source.read_space()
        yield from source.expect(":")
        yield from source.read_space()
        if key in _NAMES and name is None:
            name = yield from read_string(source)
            if not calls.has_tool(name):
                raise Malformed
        elif key in _ARGUMENTS and not complete:
            if name is not None and (yield from source.peek_char()) == "{":
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
        yield from source.read_space()
        if not (yield from source.accept(",")):
            break
    if not complete:
        raise Malformed
    while (yield from source.accept("}")):  # one too many is a common slip
        source.checkpoint = source.position
        yield from source.read_space()


def stream_object(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read a JSON object as the current call's arguments, passing it on as it arrives."""
    yield from _scan_value(source, calls.add_arguments)


def read_value(source: Source) -> Read[str]:
    """Read a JSON value and return its text."""
    pieces: list[str] = []
    yield from _scan_value(source, pieces.append)
    return "".join(pieces)


def read_string(source: Source) -> Read[str]:
    """Read a JSON string and return its decoded value."""
    if (char := (yield from source.peek_char())) != '"':
        raise Malformed if char else Unfinished
    return json.loads((yield from read_value(source)))


def as_object(text: str) -> str:
    """The JSON object in ``text``, a JSON value that may hold it as a string. Raises Malformed."""
    text = text.strip(_SPACE)
    if text.startswith('"'):
        text = json.loads(text).strip(_SPACE)
        if not is_json(text) or not _is_unicode(text):
            raise Malformed
    if text == "null":
        return "{}"
    if not text.startswith("{"):
        raise Malformed
    return text


def _is_unicode(text: str) -> bool:
    """Whether no escape in a string has left half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _scan_value(source: Source, take: Callable[[str], object]) -> Read[None]:
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
