"""Tool calls in braces, as Gemma's: ``call:get_weather{city:<|"|>Paris<|"|>,days:[1,2]}``.

Keys are unquoted, strings stand verbatim between marks, and everything else is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from server.text.calls import ToolCallEmitter
from server.text.json_scan import is_json
from server.text.source import Malformed, Markers, Read, Source, Unfinished

_MAX_NAME = 256
_MAX_DEPTH = 50

_Emit = Callable[[str], None]


class BracedCalls(NamedTuple):
    """The string delimiters of a model family."""

    quote: str  # before and after a string

    def read(self, source: Source, calls: ToolCallEmitter) -> Read[None]:
        """Read the call after the opener."""
        yield from source.read_space()
        yield from source.expect("call:")
        name = yield from source.read_name()
        yield from source.expect("{")
        calls.begin(name)
        yield from self._read_members(source, calls.add_arguments, 0)
        calls.end()

    def _read_members(self, source: Source, emit: _Emit, depth: int) -> Read[None]:
        """Read what follows an opening brace, up to and including the closing one."""
        if depth > _MAX_DEPTH:
            raise Malformed
        emit("{")
        between = ""
        yield from source.read_space()
        while not (yield from source.accept("}")):
            if between:
                yield from source.expect(",")
                yield from source.read_space()
            key = yield from self._read_key(source)
            emit(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            yield from self._read_value(source, emit, depth)
            yield from source.read_space()
        emit("}")

    def _read_key(self, source: Source) -> Read[str]:
        if (yield from source.accept(self.quote)):
            key = yield from source.read_until(self.quote, limit=_MAX_NAME)
            yield from source.expect(":")
            return key
        return (yield from source.read_until(":", limit=_MAX_NAME)).strip()

    def _read_value(self, source: Source, emit: _Emit, depth: int) -> Read[None]:
        yield from source.read_space()
        if (yield from source.accept(self.quote)):
            yield from self._read_text(source, emit)
        elif (yield from source.accept("{")):
            yield from self._read_members(source, emit, depth + 1)
        elif (yield from source.accept("[")):
            yield from self._read_items(source, emit, depth + 1)
        else:
            yield from _read_scalar(source, emit)

    def _read_text(self, source: Source, emit: _Emit) -> Read[None]:
        """Read a string, passing it on as it arrives."""
        ends = Markers([self.quote])
        emit('"')
        while True:
            text, marker = source.read_to_marker(ends)
            emit(json.dumps(text, ensure_ascii=False)[1:-1])
            if marker:
                break
            if source.ended:
                raise Unfinished
            yield
        emit('"')

    def _read_items(self, source: Source, emit: _Emit, depth: int) -> Read[None]:
        if depth > _MAX_DEPTH:
            raise Malformed
        emit("[")
        between = ""
        yield from source.read_space()
        while not (yield from source.accept("]")):
            if between:
                yield from source.expect(",")
                emit(between)
            between = ", "
            yield from self._read_value(source, emit, depth)
            yield from source.read_space()
        emit("]")


def _read_scalar(source: Source, emit: _Emit) -> Read[None]:
    """Read a number, a JSON keyword, or a string that lacks its marks."""
    start = source.position
    while (char := (yield from source.peek_char())) and char not in ",]}":
        source.position += 1
    if not char:
        raise Unfinished
    text = source.since(start).strip()
    if not text:
        raise Malformed
    emit(text if is_json(text) else json.dumps(text, ensure_ascii=False))
