"""A text that arrives in pieces, read by coroutines that wait when it runs out.

A reader is a generator whose yields carry no values and only mean "wait": ``yield from
source.char()`` returns the next character once it exists, however many pieces that takes. Readers
access the text only through these methods, so they cannot depend on how it was split.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Generator
from typing import TypeVar

from server.text.json_scan import JsonScanner

_Result = TypeVar("_Result")
Read = Generator[None, None, _Result]

_SPACE = re.compile(r"\s+")
_NAME = re.compile(r"[\w.-]+")


class Malformed(Exception):
    """The text is not what a reader expects."""


class Unfinished(Malformed):
    """The text ended before what a reader expects was complete."""


class Source:
    """A text that grows at its end and is read once, from a position that can be set back."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0  # position of the first retained character
        self.position = 0  # position of the next character
        self.ended = False
        self.checkpoint: int | None = None  # the lowest value ``at`` may be set to; None: none

    def feed(self, text: str) -> None:
        """Append ``text``, and drop what cannot be read again."""
        keep = self.position if self.checkpoint is None else self.checkpoint
        self._text = self._text[keep - self._start :] + text
        self._start = keep

    # ------------------------------------------------------------ what is there by now

    @property
    def unread(self) -> str:
        """Text that has arrived and was not read."""
        return self._text[self.position - self._start :]

    def since(self, position: int) -> str:
        """Text read since ``position``."""
        return self._text[position - self._start : self.position - self._start]

    def skip_rest(self) -> None:
        """Skip all text that has arrived."""
        self.position = self._start + len(self._text)

    def read_to_marker(self, markers: Markers, *, ends_with_one: bool = False) -> tuple[str, str]:
        """Read the text up to and including the first of ``markers``; return both.

        Without a marker, read the text that is certainly not part of one, and return it and "". At
        the end no text is, unless it always ``ends_with_one``: then it was cut off.
        """
        offset = self.position - self._start
        ended = self.ended and not ends_with_one
        end, marker = markers.find(self._text, offset, ended=ended)
        self.position = self._start + end + len(marker)
        return self._text[offset:end], marker

    def scan(self, scanner: JsonScanner) -> str:
        """Read what ``scanner`` accepts of the text that has arrived."""
        offset = self.position - self._start
        end = scanner.feed(self._text, offset)
        if self.ended and not scanner.done:
            scanner.end()
        self.position = self._start + end
        return self._text[offset:end]

    # ------------------------------------------------------------ what readers wait for

    def peek_char(self) -> Read[str]:
        """Return the next character without reading it; "" at the end."""
        while self.position - self._start >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.position - self._start]

    def read_space(self) -> Read[str]:
        """Read white space."""
        read = ""
        while (yield from self.peek_char()).isspace():
            read += self._match(_SPACE)
        return read

    def read_name(self, name: re.Pattern[str] = _NAME) -> Read[str]:
        """Read the longest run of characters each of which is a ``name`` by itself."""
        read = ""
        while name.fullmatch((yield from self.peek_char())):
            read += self._match(name)
        return read

    def accept(self, text: str) -> Read[bool]:
        """Read ``text`` if it comes next; whether it did."""
        while True:
            offset = self.position - self._start
            there = self._text[offset : offset + len(text)]
            if there == text:
                self.position += len(text)
                return True
            if self.ended or not text.startswith(there):
                return False
            yield

    def expect(self, text: str) -> Read[None]:
        """Read ``text``. Raises Malformed when something else comes."""
        yield from self.expect_one_of(text)

    def expect_one_of(self, *texts: str) -> Read[str]:
        """Read the one of ``texts`` that comes. Raises Malformed when something else does."""
        for text in texts:
            if (yield from self.accept(text)):
                return text
        is_cut = self.ended and any(text.startswith(self.unread) for text in texts)
        raise Unfinished if is_cut else Malformed

    def read_until(self, marker: str, *, limit: int) -> Read[str]:
        """Read the text up to and including ``marker``; return the text before it.

        Raises:
            Malformed: there is no marker within ``limit`` characters.
        """
        while True:
            offset = self.position - self._start
            end = self._text.find(marker, offset, offset + limit + len(marker))
            if end >= 0:
                self.position = self._start + end + len(marker)
                return self._text[offset:end]
            if len(self._text) - offset >= limit + len(marker):
                raise Malformed
            if self.ended:
                raise Unfinished
            yield

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.position - self._start)
        assert match is not None
        self.position += match.end() - match.start()
        return match[0]


class Markers:
    """Finds the first of several markers in growing text."""

    def __init__(self, markers: Collection[str]) -> None:
        """Search for ``markers``, none of which is a prefix of another."""
        ordered = sorted({marker for marker in markers if marker})
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._prefixes = {marker[:end] for marker in ordered for end in range(1, len(marker))}
        self._longest = max(map(len, self._prefixes), default=0)

    def find(self, text: str, at: int, *, ended: bool) -> tuple[int, str]:
        """The position of the first marker in ``text`` from ``at``, and the marker.

        Without a marker: the end of the text that cannot be part of one, and "".
        """
        match = self._pattern.search(text, at)
        if match is not None:
            return match.start(), match[0]
        if not ended:
            for size in range(min(self._longest, len(text) - at), 0, -1):
                if text[-size:] in self._prefixes:
                    return len(text) - size, ""
        return len(text), ""
