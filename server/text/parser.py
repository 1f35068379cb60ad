"""The incremental parser of all models' answers: reasoning, then content and tool calls.

Text is emitted as soon as its meaning is certain. Only a possible start of a marker, of a call's
head or of the white space before a call is held back. The parts, joined, do not depend on how the
text was split.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Collection, Generator, Mapping
from functools import partial
from typing import Any

from server.text import harmony
from server.text.calls import ToolCallEmitter
from server.text.dialects import Dialect
from server.text.parts import Part, Reasoning, Text
from server.text.reasoning import ReasoningMarks
from server.text.source import Malformed, Markers, Read, Source, Unfinished

_ALPHANUMERIC = string.ascii_letters + string.digits
# Limit of the characters of malformed calls that are read again, as text in which there may be
# calls. Beyond it all calls are text: a thousand calls that each run on to the end would take
# minutes.
_MAX_REREAD_CHARS = 2**19


class AnswerParser:
    """Parses one answer."""

    def __init__(
        self,
        *,
        reasoning: ReasoningMarks | None = None,
        is_thinking: bool = False,
        dialect: Dialect | None = None,
        schemas: Mapping[str, Mapping[str, Any]] | None = None,
        buffer_calls: bool = False,
        hidden: Collection[str] = (),
        is_forced: bool = False,
    ) -> None:
        """Begin an answer.

        Args:
            reasoning: the reasoning marks; None: no text is reasoning.
            is_thinking: the answer begins inside reasoning, which the prompt has opened.
            dialect: the format of tool calls; None: no text is a call.
            schemas: JSON schemas of the callable tools' arguments, by name. A call of any other
                name is text.
            buffer_calls: emit each call once it is complete, and a malformed one as text. Otherwise
                arguments are emitted as they arrive, and those of a call that turns out malformed
                remain.
            hidden: markers that are never content, because they are special tokens.
            is_forced: a grammar makes the content consist of calls, so that the beginning of one
                that is cut off before its arguments is not content either.
        """
        self._reasoning = reasoning
        self._is_thinking = is_thinking
        self._dialect = dialect
        self._hidden = frozenset(hidden)
        self._is_forced = is_forced
        self._source = Source()
        self._out: list[Part] = []
        new_id = partial(_new_id, dialect)  # not of this parser: a cycle would keep it alive
        self._calls = ToolCallEmitter(
            self._source, self._out.append, schemas or {}, new_id, buffer_calls=buffer_calls
        )
        self._pending_space = ""  # white space, dropped if a call follows
        self._strip_space = False  # no text since reasoning or a call: white space is dropped
        self._emitted_kinds: set[type[Text | Reasoning]] = set()  # kinds of text emitted
        self._is_truncated = False  # the text was cut off, not ended by the model
        self._num_reread = 0  # characters of calls that turned out to be text
        self._reader: Generator[None, None, None] | None = self._read()
        self.has_reasoned = is_thinking
        self.reasoning_ended = reasoning is None  # reasoning has ended, or did not occur
        self.is_plain = False  # all further text is plain content

    @property
    def ends_in_calls(self) -> bool:
        """Whether there are calls, none of them cut off."""
        return self._calls.count > 0 and not self._calls.is_emitted

    def push(self, text: str) -> list[Part]:
        """The parts that are certain with ``text``."""
        if self.is_plain:
            return [Text(text)] if text else []
        self._source.feed(text)
        return self._resume()

    def finish(self, *, truncated: bool = False) -> list[Part]:
        """The text held back, at the end; ``truncated`` if it was cut off, not ended by the model.

        An unfinished call is emitted as far as it was read, from its arguments on.
        """
        self._source.ended = True
        self._is_truncated = truncated
        return self._resume()

    def _resume(self) -> list[Part]:
        if self._reader is not None:
            try:
                next(self._reader)
            except StopIteration:
                self._reader = None
        parts = self._out[:]
        self._out.clear()
        return parts

    # ------------------------------------------------------------ reading

    def _read(self) -> Read[None]:
        if self._reasoning is not None and self._reasoning.channels is not None:
            yield from self._read_channels(Markers(self._reasoning.channels.markers))
            return
        if self._reasoning is not None:
            yield from self._read_reasoning(self._reasoning)
            self.reasoning_ended = True
        if self._dialect is not None and self._dialect.bare_start:
            yield from self._read_bare_calls(self._dialect)
        if self._dialect is not None or self._hidden:
            yield from self._read_content()
        else:
            self.is_plain = True
            self._emit_text(self._source.unread)

    def _read_reasoning(self, marks: ReasoningMarks) -> Read[None]:
        space = yield from self._source.read_space()
        begun = yield from self._source.accept(marks.begin)
        if not begun and not self._is_thinking:
            self._emit_text(space)
            return
        self.has_reasoned = self._strip_space = True
        if marks.title:
            yield from self._source.accept(marks.title)
        ends = Markers([marks.end])
        marker = ""
        while not marker:
            text, marker = self._source.read_to_marker(ends)
            self._emit_text(text, Reasoning)
            if not marker:
                if self._source.ended:
                    return
                yield
        self._pending_space = ""  # white space before the end mark
        self.reasoning_ended = self._strip_space = True
        yield from self._source.read_space()

    def _read_channels(self, marks: Markers) -> Read[None]:
        source = self._source
        while not (source.ended and not source.unread):
            begin = source.position
            header = yield from harmony.read_header(source)
            if header is None:
                return
            kind = Reasoning if header.is_reasoning else Text
            self.has_reasoned |= kind is Reasoning
            self.reasoning_ended |= kind is Text
            name, dialect = header.function, self._dialect
            if name is not None and dialect is not None and self._calls.has_tool(name):
                source.position = begin
                yield from self._read_calls(dialect, "")
                if source.position == begin:  # it is text after all
                    yield from harmony.read_header(source)
            yield from self._read_message(kind, marks, is_framed=header is not harmony.NO_HEADER)

    def _read_message(
        self, kind: type[Text | Reasoning], marks: Markers, *, is_framed: bool
    ) -> Read[None]:
        """Read the rest of a message and its end mark."""
        source = self._source
        begin = source.position
        self._pending_space, self._strip_space = "\n\n" if kind in self._emitted_kinds else "", True
        while True:
            text, marker = source.read_to_marker(marks)
            self._emit_text(text, kind)
            if marker in harmony.HEADER_STARTS and (
                is_framed or source.position > begin + len(marker)
            ):
                source.position -= len(marker)  # it belongs to the next header
            if marker or source.ended:
                return
            yield

    def _read_bare_calls(self, dialect: Dialect) -> Read[None]:
        self._emit_text((yield from self._source.read_space()))
        char = yield from self._source.peek_char()
        if char and char in dialect.bare_start:
            yield from self._read_calls(dialect, "")

    def _read_content(self) -> Read[None]:
        dialect = self._dialect
        opener = "" if dialect is None else dialect.opener
        markers = Markers([*self._hidden, *(() if dialect is None else dialect.markers)])
        while True:
            text, marker = self._source.read_to_marker(markers)
            if not self._is_truncated_closer(text):
                self._emit_text(text)
            if marker and marker == opener and self._dialect is not None:
                yield from self._read_calls(self._dialect, marker)
            elif marker:
                self._emit_marker(marker)
            elif self._source.ended:
                break
            else:
                yield
        if not self._calls.count:
            self._out += [Text(self._pending_space)] if self._pending_space else []

    def _read_calls(self, dialect: Dialect, opener: str) -> Read[None]:
        source, calls = self._source, self._calls
        num_before, malformed = calls.count, None
        source.checkpoint = source.position
        try:
            yield from dialect.read(source, calls)
        except Malformed as error:
            malformed = error
        is_cut = self._is_truncated and (
            (self._is_forced and malformed is not None)
            or (isinstance(malformed, Unfinished) and calls.is_open)
        )
        if calls.count > num_before or calls.is_emitted or is_cut:
            self._pending_space, self._strip_space = "", True  # white space before a call
        if is_cut:
            if calls.is_open:
                calls.emit_partial()
            source.skip_rest()
        elif malformed is not None and calls.is_emitted:
            yield from self._read_rest_of_call(dialect)
        elif malformed is not None:  # the text may contain further calls
            calls.drop()
            self._num_reread += source.position - source.checkpoint
            if self._num_reread > _MAX_REREAD_CHARS:
                self._dialect = None
            source.position = source.checkpoint
            if calls.count == num_before and opener not in self._hidden:
                self._emit_text(opener)
        source.checkpoint = None

    def _read_rest_of_call(self, dialect: Dialect) -> Read[None]:
        """Read the rest of a call that failed after it was emitted, into the same part."""
        source, ends = self._source, Markers(dialect.closers)
        if source.checkpoint is not None:
            source.position = source.checkpoint
        while True:
            text, marker = source.read_to_marker(ends)
            self._calls.add_arguments(text)
            if marker or source.ended:
                break
            yield
        self._calls.end()

    # ------------------------------------------------------------ saying

    def _emit_marker(self, marker: str) -> None:
        """Handle a marker without meaning at its place.

        It is content, unless it is a special token or left over after a call.
        """
        is_left_over = self._strip_space and self._calls.count > 0
        if marker not in self._hidden and not is_left_over:
            self._emit_text(marker)

    def _is_truncated_closer(self, text: str) -> bool:
        """Whether all that is left behind a call is the beginning of what marks its end."""
        dialect, is_behind = self._dialect, self._strip_space and self._calls.count > 0
        if dialect is None or not (self._is_truncated and self._source.ended and is_behind):
            return False
        ends = (*dialect.closers, dialect.call_suffix.strip())
        return any(end.startswith(text.strip()) for end in ends)

    def _emit_text(self, text: str, kind: type[Text | Reasoning] = Text) -> None:
        if self._is_forced and self._is_truncated and kind is Text:
            return  # the beginning of a call
        if self._strip_space:
            text = text.lstrip()
            if not text:
                return
            self._strip_space = False
        text = self._pending_space + text
        shown = text if self.is_plain else text.rstrip()
        self._pending_space = text[len(shown) :]
        if shown:
            self._emitted_kinds.add(kind)
            self._out.append(kind(shown))


def _new_id(dialect: Dialect | None) -> str:
    assert dialect is not None
    chars = (secrets.choice(_ALPHANUMERIC) for _ in range(dialect.id_length))
    return dialect.id_prefix + "".join(chars)
