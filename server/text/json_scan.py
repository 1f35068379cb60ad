"""A scanner that follows one JSON value (RFC 8259) through text that arrives in pieces."""

from __future__ import annotations

import re

_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_SPACE = " \t\n\r"
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_CHARS = frozenset("+-.0123456789eE")
_WORDS = {"t": "true", "f": "false", "n": "null"}
_MAX_DEPTH = 200  # within the limits of json.loads and similar parsers


class JsonScanner:
    """Accepts characters as long as they form one JSON value; ``done`` after it.

    Leading white space is accepted, trailing is not. A bare number ends only at another character,
    or with ``end``.
    """

    def __init__(self) -> None:
        self.done = False
        self.failed = False
        self._open: list[str] = []  # missing closing brackets, outermost first
        self._in_string = False
        self._is_key = False  # the current string is an object's key
        self._escape = ""  # the escape sequence so far
        self._word = ""  # the number or word so far
        self._expects = "value"  # or "key", "colon", "next": the next token after white space
        self._may_close = False  # the innermost bracket may close here

    def feed(self, text: str, at: int = 0) -> int:
        """Accept ``text`` from ``at`` as far as it belongs to the value; return the end position.

        The end is before the first character that does not fit, in which case ``failed`` is set.
        """
        size = len(text)
        try:
            while at < size and not self.done:
                if self._in_string and not self._escape:
                    match = _PLAIN.match(text, at)
                    assert match is not None
                    at = match.end()
                    if at == size:
                        break
                char = text[at]
                if self._word and char not in _NUMBER_CHARS and not char.isalpha():
                    self._end_word()  # it ends before this character, which is examined again
                    continue
                self._accept(char)
                at += 1
        except _InvalidJson:
            self.failed = True
        return at

    def end(self) -> None:
        """Mark the end of the text: ``done`` is final."""
        if self._word and not self._open:
            try:
                self._end_word()
            except _InvalidJson:
                self.failed = True

    def _accept(self, char: str) -> None:
        if self._in_string:
            self._accept_in_string(char)
        elif self._word:
            self._word += char
            if len(self._word) > 5 and self._word[-1] not in _NUMBER_CHARS:
                raise _InvalidJson
        elif char in _SPACE:
            pass
        elif self._may_close and char == self._open[-1]:
            self._open.pop()
            self._end_value()
        elif self._expects == "next":
            if char != ",":
                raise _InvalidJson
            self._expects = "key" if self._open[-1] == "}" else "value"
            self._may_close = False
        elif self._expects == "colon":
            if char != ":":
                raise _InvalidJson
            self._expects = "value"
        elif self._expects == "key" and char != '"':
            raise _InvalidJson
        else:
            self._begin_value(char)

    def _accept_in_string(self, char: str) -> None:
        if self._escape:
            self._escape += char
            if self._escape[1] == "u":
                if len(self._escape) > 2 and char not in "0123456789abcdefABCDEF":
                    raise _InvalidJson
                if len(self._escape) < 6:
                    return
            elif char not in '"\\/bfnrt':
                raise _InvalidJson
            self._escape = ""
        elif char == "\\":
            self._escape = char
        elif char == '"':
            self._in_string = False
            if self._is_key:
                self._expects, self._is_key = "colon", False
            else:
                self._end_value()
        else:
            raise _InvalidJson  # a control character

    def _begin_value(self, char: str) -> None:
        self._may_close = False
        if char == '"':
            self._in_string, self._is_key = True, self._expects == "key"
        elif char in "{[":
            if len(self._open) == _MAX_DEPTH:
                raise _InvalidJson
            self._open.append("}" if char == "{" else "]")
            self._expects = "key" if char == "{" else "value"
            self._may_close = True
        elif char in _WORDS or char == "-" or "0" <= char <= "9":
            self._word = char
        else:
            raise _InvalidJson

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if word != _WORDS.get(word[0]) and not _NUMBER.fullmatch(word):
            raise _InvalidJson
        self._end_value()

    def _end_value(self) -> None:
        self.done = not self._open
        self._expects = "next"
        self._may_close = True


def is_json(text: str) -> bool:
    """Whether ``text`` is one JSON value, perhaps with white space around it.

    Unlike ``json.loads`` it takes numbers of any length, and neither NaN nor what is nested so
    deeply that others could not read it.
    """
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.end()
    return scanner.done and not text[end:].strip(_SPACE)


class _InvalidJson(Exception):
    """A character that cannot continue any JSON value here."""
