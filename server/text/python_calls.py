"""Tool calls as Python: ``[get_weather(city="Paris"), get_time()]``, or one call per line."""

from __future__ import annotations

import ast
import json
import warnings

from server.text import json_calls
from server.text.calls import ToolCallEmitter
from server.text.enforceable import ARGUMENT_NAME
from server.text.json_scan import is_json
from server.text.source import Malformed, Read, Source, Unfinished

_CLOSING = {"(": ")", "[": "]", "{": "}"}
_MAX_DEPTH = 50


def read_calls(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read the list. Each argument is emitted once its value is complete."""
    yield from source.read_space()
    yield from source.expect("[")
    yield from _read_array_items(source, calls)


def read_python_or_json(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read the list, or a list of JSON objects, which these models write if asked to."""
    yield from source.read_space()
    yield from source.expect("[")
    yield from source.read_space()
    is_json = (yield from source.peek_char()) == "{"
    yield from (json_calls.read_array_items if is_json else _read_array_items)(source, calls)


def read_lines(source: Source, calls: ToolCallEmitter) -> Read[None]:
    """Read consecutive calls, separated by white space."""
    yield from source.read_space()
    while True:
        yield from _read_call(source, calls)
        source.checkpoint = source.position
        yield from source.read_space()
        if not (yield from source.peek_char()).isidentifier():
            return


def _read_array_items(source: Source, calls: ToolCallEmitter) -> Read[None]:
    while True:
        yield from source.read_space()
        yield from _read_call(source, calls)
        yield from source.read_space()
        if not (yield from source.accept(",")):
            break
    yield from source.expect("]")
    source.checkpoint = source.position


def _read_call(source: Source, calls: ToolCallEmitter) -> Read[None]:
    name = yield from source.read_name()
    yield from source.expect("(")
    calls.begin(name)
    yield from _read_arguments(source, calls)
    calls.end()


def _read_arguments(source: Source, calls: ToolCallEmitter) -> Read[None]:
    calls.add_arguments("{")
    between = ""
    while True:
        yield from source.read_space()
        if (yield from source.accept(")")):
            break
        key = yield from source.read_name(ARGUMENT_NAME)
        yield from source.read_space()
        yield from source.expect("=")
        value = _to_json((yield from _read_value(source)))
        calls.add_arguments(f"{between}{json.dumps(key)}: {value}")
        between = ", "
        yield from source.read_space()
        if not (yield from source.accept(",")):
            yield from source.expect(")")
            break
    calls.add_arguments("}")


def _read_value(source: Source) -> Read[str]:
    """Read a Python value up to the comma or bracket after it, and return its text."""
    start, quote, closing = source.position, "", list[str]()
    while char := (yield from source.peek_char()):
        if quote:
            if char == "\\":
                source.position += 1
                if not (yield from source.peek_char()):
                    break
            elif char == quote:
                quote = ""
        elif char in "\"'":
            quote = char
        elif char in _CLOSING:
            closing.append(_CLOSING[char])
            if len(closing) > _MAX_DEPTH:
                raise Malformed
        elif closing and char == closing[-1]:
            closing.pop()
        elif not closing and char in ",)":
            return source.since(start)
        elif char in ")]}":
            raise Malformed
        source.position += 1
    raise Unfinished


def _to_json(text: str) -> str:
    """Convert a Python literal to JSON; JSON is left unchanged. Raises Malformed."""
    text = text.strip()
    if is_json(text):
        return text
    try:
        with warnings.catch_warnings():
            # Python would write what it thinks of a text's escapes into the server's log.
            warnings.simplefilter("ignore")
            value = ast.literal_eval(text)
        found = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # Models write the escapes of JSON, where two of them may be one character.
        return found.encode("utf-16", "surrogatepass").decode("utf-16")
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        raise Malformed from None
