"""Tool calls in braces, as Gemma's: ``call:get_weather{city:<|"|>Paris<|"|>,days:[1,2]}``.

Keys are unquoted, strings stand verbatim between marks, and everything else is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from server.text.calls import Calls
from server.text.source import Malformed, Markers, Read, Source, Unfinished

_MAX_NAME = 256
_MAX_DEPTH = 50

_Tell = Callable[[str], None]


class BracedCalls(NamedTuple):
    """The string delimiters of a model family."""

    quote: str  # before and after a string

    def read(self, source: Source, calls: Calls) -> Read[None]:
        """Read the call after the opener."""
        yield from source.space()
        yield from source.expect("call:")
        name = yield from source.name()
        yield from source.expect("{")
        calls.begin(name)
        yield from self._read_members(source, calls.arguments, 0)
        calls.end()

    def _read_members(self, source: Source, tell: _Tell, depth: int) -> Read[None]:
        """Read what follows an opening brace, up to and including the closing one."""
        if depth > _MAX_DEPTH:
            raise Malformed
        tell("{")
        between = ""
        yield from source.space()
        while not (yield from source.literal("}")):
            if between:
                yield from source.expect(",")
                yield from source.space()
            key = yield from self._read_key(source)
            tell(f"{between}{json.dumps(key, ensure_ascii=False)}: ")
            between = ", "
            yield from self._read_value(source, tell, depth)
            yield from source.space()
        tell("}")

    def _read_key(self, source: Source) -> Read[str]:
        if (yield from source.literal(self.quote)):
            key = yield from source.until(self.quote, limit=_MAX_NAME)
            yield from source.expect(":")
            return key
        return (yield from source.until(":", limit=_MAX_NAME)).strip()

    def _read_value(self, source: Source, tell: _Tell, depth: int) -> Read[None]:
        yield from source.space()
        if (yield from source.literal(self.quote)):
            yield from self._read_text(source, tell)
        elif (yield from source.literal("{")):
            yield from self._read_members(source, tell, depth + 1)
        elif (yield from source.literal("[")):
            yield from self._read_items(source, tell, depth + 1)
        else:
            yield from _read_scalar(source, tell)

    def _read_text(self, source: Source, tell: _Tell) -> Read[None]:
        """Read a string, passing it on as it arrives."""
        ends = Markers([self.quote])
        tell('"')
        while True:
            text, marker = source.pass_over(ends)
            tell(json.dumps(text, ensure_ascii=False)[1:-1])
            if marker:
                break
            if source.ended:
                raise Unfinished
            yield
        tell('"')

    def _read_items(self, source: Source, tell: _Tell, depth: int) -> Read[None]:
        if depth > _MAX_DEPTH:
            raise Malformed
        tell("[")
        between = ""
        yield from source.space()
        while not (yield from source.literal("]")):
            if between:
                yield from source.expect(",")
                tell(between)
            between = ", "
            yield from self._read_value(source, tell, depth)
            yield from source.space()
        tell("]")


def _read_scalar(source: Source, tell: _Tell) -> Read[None]:
    """Read a number, a JSON keyword, or a string that lacks its marks."""
    start = source.at
    while (char := (yield from source.char())) and char not in ",]}":
        source.at += 1
    if not char:
        raise Unfinished
    text = source.since(start).strip()
    if not text:
        raise Malformed
    try:
        json.loads(text, parse_constant=_refuse)
    except ValueError:
        text = json.dumps(text, ensure_ascii=False)
    tell(text)


def _refuse(constant: str) -> None:
    raise ValueError(constant)
