"""Text that arrives in pieces, read by coroutines that wait where it runs out.

A reader is a generator that yields nothing but its patience: ``yield from source.char()`` gives the
next character as soon as there is one, however many pieces that takes. Readers look at the text
through these methods alone and so cannot know how it was split.
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
    """The text ended in the middle of what a reader expects."""


class Source:
    """A text that grows at its end and is read once, from a position that can go back."""

    def __init__(self) -> None:
        self._text = ""
        self._start = 0  # position of the text's first character that is still kept
        self.at = 0  # position of the next character
        self.ended = False
        self.kept_from: int | None = None  # what ``at`` may be set back to; None: nothing

    def feed(self, text: str) -> None:
        """Append ``text``, and forget what cannot be read any more."""
        keep = self.at if self.kept_from is None else self.kept_from
        self._text = self._text[keep - self._start :] + text
        self._start = keep

    # ------------------------------------------------------------ what is there by now

    @property
    def rest(self) -> str:
        """What has arrived and was not read."""
        return self._text[self.at - self._start :]

    def since(self, position: int) -> str:
        """What was read since ``position``."""
        return self._text[position - self._start : self.at - self._start]

    def skip_rest(self) -> None:
        """Read all that is there, for nothing."""
        self.at = self._start + len(self._text)

    def pass_over(self, markers: Markers) -> tuple[str, str]:
        """The text up to the first of ``markers``, and that marker, both read.

        Without a marker: the text that is certain not to be a part of one, and "".
        """
        offset = self.at - self._start
        end, marker = markers.find(self._text, offset, ended=self.ended)
        self.at = self._start + end + len(marker)
        return self._text[offset:end], marker

    def scan(self, scanner: JsonScanner) -> str:
        """What ``scanner`` takes of the text that is there."""
        offset = self.at - self._start
        end = scanner.feed(self._text, offset)
        if self.ended and not scanner.done:
            scanner.end()
        self.at = self._start + end
        return self._text[offset:end]

    # ------------------------------------------------------------ what readers wait for

    def char(self) -> Read[str]:
        """The next character, not read yet; "" at the end."""
        while self.at - self._start >= len(self._text):
            if self.ended:
                return ""
            yield
        return self._text[self.at - self._start]

    def space(self) -> Read[str]:
        """White space."""
        read = ""
        while (yield from self.char()).isspace():
            read += self._match(_SPACE)
        return read

    def name(self) -> Read[str]:
        """The longest run of characters that names are made of."""
        read = ""
        while _NAME.fullmatch((yield from self.char())):
            read += self._match(_NAME)
        return read

    def literal(self, text: str) -> Read[bool]:
        """Whether ``text`` comes next; only then is it read."""
        while True:
            offset = self.at - self._start
            there = self._text[offset : offset + len(text)]
            if there == text:
                self.at += len(text)
                return True
            if self.ended or not text.startswith(there):
                return False
            yield

    def expect(self, text: str) -> Read[None]:
        """Read ``text``. Raises Malformed when something else comes."""
        yield from self.either(text)

    def either(self, *texts: str) -> Read[str]:
        """Read the one of ``texts`` that comes. Raises Malformed when something else does."""
        for text in texts:
            if (yield from self.literal(text)):
                return text
        is_cut = self.ended and any(text.startswith(self.rest) for text in texts)
        raise Unfinished if is_cut else Malformed

    def until(self, marker: str, *, limit: int) -> Read[str]:
        """The text up to ``marker``, which is read too.

        Raises:
            Malformed: it does not come within ``limit`` characters.
        """
        while True:
            offset = self.at - self._start
            end = self._text.find(marker, offset, offset + limit + len(marker))
            if end >= 0:
                self.at = self._start + end + len(marker)
                return self._text[offset:end]
            if len(self._text) - offset >= limit + len(marker):
                raise Malformed
            if self.ended:
                raise Unfinished
            yield

    def _match(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self._text, self.at - self._start)
        assert match is not None
        self.at += match.end() - match.start()
        return match[0]


class Markers:
    """Finds the first of several markers in text that grows."""

    def __init__(self, markers: Collection[str]) -> None:
        """Look for ``markers``, none of which begins another one."""
        ordered = sorted({marker for marker in markers if marker})
        self._pattern = re.compile("|".join(map(re.escape, ordered)) or r"(?!)")
        self._beginnings = {marker[:end] for marker in ordered for end in range(1, len(marker))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, at: int, *, ended: bool) -> tuple[int, str]:
        """Where in ``text``, from ``at``, the first marker begins, and the marker.

        Without one: the end of what cannot be a part of one, and "".
        """
        match = self._pattern.search(text, at)
        if match is not None:
            return match.start(), match[0]
        if not ended:
            for size in range(min(self._longest, len(text) - at), 0, -1):
                if text[-size:] in self._beginnings:
                    return len(text) - size, ""
        return len(text), ""
