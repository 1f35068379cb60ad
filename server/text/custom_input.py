"""The input of custom tools: a text, where models and chat templates know functions alone.

A custom tool is shown to the model as a function with that text as its only argument. The input's
grammar becomes a pattern of the argument where it has one; the model is told of it in any case.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

from pydantic_core import from_json

from server.text.lark_pattern import NoPattern, lark_pattern
from server.text.parts import Part, ToolCallArguments, ToolCallBegin

Syntax = Literal["lark", "regex"]

_INPUT = "input"  # the only argument
_HEAD = re.compile(
    r'\s*\{\s*"input"\s*:\s*"'
)  # of the arguments, before the input's first character
_WHOLE_CHARS = re.compile(r'(?:[^"\\]++|\\(?:[^u]|u[0-9a-fA-F]{4}))*+')
_HALF_A_PAIR = re.compile(r"(?<!\\)(?:\\\\)*(\\u[dD][89abAB][0-9a-fA-F]{2})$")
_FIRST_ANCHOR = re.compile(r"(\(\?[a-zA-Z]+\))?\^")
_LAST_ANCHOR = re.compile(r"(?<!\\)(?:\\\\)*(\$)$")


def input_schema(pattern: str | None = None) -> dict[str, Any]:
    """The JSON schema of the arguments; the whole input matches ``pattern``."""
    text = {"type": "string"}
    if pattern is not None:
        text["pattern"] = f"^(?:{pattern})$"
    return {
        "type": "object",
        "properties": {_INPUT: text},
        "required": [_INPUT],
        "additionalProperties": False,
    }


def input_pattern(syntax: Syntax, definition: str) -> str | None:
    """A regular expression for the inputs that a grammar allows; None if none is known."""
    return _without_anchors(definition) if syntax == "regex" else _of_lark(definition)


def to_arguments(text: str) -> str:
    """The function's arguments, for an earlier call with this input."""
    return json.dumps({_INPUT: text}, ensure_ascii=False)


class InputReader:
    """Reads the input in the arguments of one call, as they arrive.

    The pieces, joined, do not depend on how the arguments were split. Arguments that do not begin
    with the input are returned at the end: the input if they hold one, and otherwise all of them.
    """

    def __init__(self) -> None:
        self._unread = ""
        self._is_inside = False  # the input has begun and not ended
        self._is_over = False  # it has ended

    def push(self, arguments: str) -> str:
        """The next piece of the input."""
        if self._is_over:
            return ""
        self._unread += arguments
        if not self._is_inside:
            head = _HEAD.match(self._unread)
            if head is None:
                return ""
            self._is_inside, self._unread = True, self._unread[head.end() :]
        found = _WHOLE_CHARS.match(self._unread)
        assert found is not None
        text, self._unread = found[0], self._unread[found.end() :]
        self._is_over = self._unread.startswith('"')
        if not self._is_over and (half := _HALF_A_PAIR.search(text)):
            text, self._unread = text[: half.start(1)], half[1] + self._unread
        return _decoded(text)

    def finish(self) -> str:
        """The rest, once there are no more arguments."""
        left, self._unread = self._unread, ""
        if self._is_inside or not left:
            return ""
        found: Any = None
        with contextlib.suppress(ValueError):
            found = from_json(left, allow_partial="trailing-strings")
        if isinstance(found, Mapping) and isinstance(text := found.get(_INPUT, ""), str):
            return text
        return left


class CustomInputs:
    """Replaces the arguments of calls of custom tools by their inputs, in one choice's parts."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names  # of custom tools
        self._reader: InputReader | None = None  # of the call that has begun
        self._index = 0  # its number

    def read(self, parts: Sequence[Part], *, is_last: bool) -> list[Part]:
        """The parts with inputs; ``is_last``: no more will follow."""
        found: list[Part] = []
        for part in parts:
            if isinstance(part, ToolCallArguments) and self._reader is not None:
                self._add(found, self._reader.push(part.text))
                continue
            self._end(found)
            if isinstance(part, ToolCallBegin) and part.name in self._names:
                self._reader, self._index = InputReader(), part.index
                part = ToolCallBegin(part.index, part.id, part.name, is_custom=True)
            found.append(part)
        if is_last:
            self._end(found)
        return found

    def _end(self, found: list[Part]) -> None:
        if self._reader is not None:
            self._add(found, self._reader.finish())
            self._reader = None

    def _add(self, found: list[Part], text: str) -> None:
        if text:
            found.append(ToolCallArguments(self._index, text, is_custom=True))


@lru_cache(maxsize=64)  # agents send the same grammars with each request
def _of_lark(definition: str) -> str | None:
    try:
        return lark_pattern(definition)
    except NoPattern:
        return None


def _decoded(chars: str) -> str:
    """The text that characters of a JSON string stand for; half a pair is no character."""
    try:
        text = json.loads(f'"{chars}"', strict=False)
    except ValueError:
        return chars
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _without_anchors(regex: str) -> str:
    """An expression for whole texts, without the anchors that change nothing there."""
    if first := _FIRST_ANCHOR.match(regex):
        regex = (first[1] or "") + regex[first.end() :]
    last = _LAST_ANCHOR.search(regex)
    return regex if last is None else regex[: last.start(1)]
