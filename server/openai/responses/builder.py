"""Assembly of a choice's parts into a stream's events and the response they add up to.

Pure: it has no clock but the one passed in, no engine and no store. A client that adds up the
events gets the final ``response``; a property test checks this.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate

from msgspec.structs import replace

from server.errors import ApiError
from server.openai.outputs import FinishReason, TokenLogprob, Usage
from server.openai.responses.events import (
    Completed,
    Created,
    Event,
    Failed,
    Incomplete,
    InProgress,
    Numbering,
    Queued,
)
from server.openai.responses.items import ItemStatus
from server.openai.responses.outputs import (
    IncompleteDetails,
    Response,
    ResponseError,
    ResponseUsage,
)
from server.openai.responses.tools import OfferedTool
from server.openai.responses.writers import (
    CallWriter,
    CustomCallWriter,
    MessageWriter,
    ReasoningWriter,
    Writer,
)
from server.text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin

_CALLS = (CallWriter, CustomCallWriter)


class ResponseBuilder:
    """One response while it is generated.

    Args:
        response: the initial state, before any output; updated here.
        numbering: of the stream's events.
        now: Unix time in seconds.
        tools: that may be called.
        reasoning_as_summary: send reasoning as a summary instead of as content.
        include_encrypted: also send reasoning as ``encrypted_content``.
    """

    def __init__(
        self,
        response: Response,
        numbering: Numbering,
        now: Callable[[], float],
        tools: Sequence[OfferedTool] = (),
        *,
        reasoning_as_summary: bool = False,
        include_encrypted: bool = False,
    ) -> None:
        self.response = response
        self._numbering = numbering
        self._now = now
        self._tools = {tool.name: tool for tool in tools}
        self._reasoning_as_summary = reasoning_as_summary
        self._include_encrypted = include_encrypted
        self._open_writer: Writer | None = None
        self._logprobs: list[TokenLogprob] = []  # of tokens whose text has not been sent
        self.has_started = False  # whether any event was made

    def queued(self) -> list[Event]:
        """The first events of a response that waits for its turn."""
        self.response.status = "queued"
        return [self._response_event(Created), self._response_event(Queued)]

    def begin(self) -> list[Event]:
        """The events at the start of generation."""
        is_new = self.response.status != "queued"
        self.response.status = "in_progress"
        return [
            *([self._response_event(Created)] if is_new else []),
            self._response_event(InProgress),
        ]

    def requeue(self) -> bool:
        """Return to the queue if no output has been sent; whether that was possible."""
        if self._open_writer is not None or self.response.output:
            return False
        self._logprobs.clear()
        self.response.status = "queued"
        return True

    def push(self, parts: Sequence[Part], logprobs: Sequence[TokenLogprob]) -> list[Event]:
        """The events for new parts; ``logprobs`` are those of the new tokens.

        They are sent with the text that follows; those of reasoning and calls are dropped.
        """
        self._logprobs += logprobs
        events: list[Event] = []
        last_text = max((i for i, part in enumerate(parts) if isinstance(part, Text)), default=-1)
        for i, part in enumerate(parts):
            if isinstance(part, Text):
                events += self._text(part.text, is_last=i == len(parts) - 1)
                continue
            is_behind = i > last_text  # all text that has come
            match part:
                case Reasoning():
                    self._drop_logprobs(part.text, is_behind=is_behind)
                    events += self._reasoning(part.text)
                case ToolCallBegin():
                    if i == len(parts) - 1:
                        self._logprobs.clear()
                    tool, index = self._tools[part.name], self._next_index()
                    kind = CustomCallWriter if tool.is_custom else CallWriter
                    events += self._open_item(kind(index, self._numbering, part.id, tool))
                case ToolCallArguments():
                    self._drop_logprobs(part.text, is_behind=is_behind)
                    assert isinstance(self._open_writer, _CALLS)
                    events += self._open_writer.add(part.text)
        return events

    def end(self, reason: FinishReason | None, usage: Usage) -> list[Event]:
        """The events that close the output. The response is still open until ``finish``."""
        cut_off = reason == "length"
        events: list[Event] = []
        is_empty = self._open_writer is None and not self.response.output
        if is_empty or (self._logprobs and isinstance(self._open_writer, MessageWriter)):
            events += self._text("", is_last=True)  # an empty answer has a message too
        # A complete call ends with the reason of calls; "stop" means that a stop string cut it.
        half_a_call = reason == "stop" and isinstance(self._open_writer, _CALLS)
        events += self._close_item("incomplete" if cut_off or half_a_call else "completed")
        response = self.response
        response.usage = ResponseUsage.of(usage)
        if cut_off:
            response.status = "incomplete"
            response.incomplete_details = IncompleteDetails("max_output_tokens")
        else:
            response.status = "completed"
            response.completed_at = int(self._now())
        return events

    def finish(self) -> list[Event]:
        """The final event."""
        return [
            self._response_event(Incomplete if self.response.status == "incomplete" else Completed)
        ]

    def fail(self, error: ApiError) -> list[Event]:
        """The final event of a failed response, which keeps its output so far."""
        if self._open_writer is not None:
            self.response.output.append(self._open_writer.item("incomplete"))
            self._open_writer = None
        self.response.status = "failed"
        self.response.error = to_response_error(error)
        return [self._response_event(Failed)]

    def cancel(self) -> list[Event]:
        """The final event of a cancelled response, which drops its output."""
        self._open_writer = None
        self.response.output.clear()
        self.response.status = "cancelled"
        return [self._response_event(Incomplete)]

    # ------------------------------------------------------------ items

    def _text(self, text: str, *, is_last: bool) -> list[Event]:
        """Add text to the message; ``is_last``: nothing of another kind follows it in this step."""
        writer = self._open_writer
        if isinstance(writer, MessageWriter):
            return [writer.add(text, self._take_logprobs(text, is_first=False, is_last=is_last))]
        logprobs = self._take_logprobs(text, is_first=True, is_last=is_last)
        writer = MessageWriter(self._next_index(), self._numbering)
        return [*self._open_item(writer), writer.add(text, logprobs)]

    def _take_logprobs(self, text: str, *, is_first: bool, is_last: bool) -> list[TokenLogprob]:
        """Remove the logprobs of ``text`` from the pending ones, and return them.

        Hidden marks may precede the text if it is the first of a message, and tokens of text that
        is sent later, or never, may follow it.
        """
        waiting = self._logprobs
        from_the_end = is_first and is_last
        place = _find_tokens(text, waiting, from_the_end=from_the_end)
        if place is None:
            # Invalid UTF-8 is shown as replacement characters, which match no token's bytes.
            before = text.partition("\ufffd")[0]
            found = _find_tokens(before, waiting, from_the_end=from_the_end)
            place = found and (found[0], len(waiting))
        begin, end = place or (0 if text or not is_first else len(waiting), len(waiting))
        self._logprobs = waiting[end:]
        return waiting[begin if is_first else 0 : end]

    def _drop_logprobs(self, text: str, *, is_behind: bool) -> None:
        """Drop the logprobs of tokens whose text is not sent as message text.

        Where it ``is_behind`` all message text, only tokens that follow ``text`` may belong to a
        later one, such as a "<" that is held back because it may begin a call.
        """
        if place := _find_tokens(text, self._logprobs, from_the_end=is_behind):
            del self._logprobs[: place[1]]
        elif is_behind:
            self._logprobs.clear()

    def _reasoning(self, text: str) -> list[Event]:
        writer = self._open_writer
        if isinstance(writer, ReasoningWriter):
            return [writer.add(text)]
        writer = ReasoningWriter(
            self._next_index(),
            self._numbering,
            summary=self._reasoning_as_summary,
            include_encrypted=self._include_encrypted,
        )
        return [*self._open_item(writer), writer.add(text)]

    def _next_index(self) -> int:
        return len(self.response.output) + (self._open_writer is not None)

    def _open_item(self, writer: Writer) -> list[Event]:
        events = [*self._close_item("completed"), *writer.begin()]
        self._open_writer = writer
        return events

    def _close_item(self, status: ItemStatus) -> list[Event]:
        if self._open_writer is None:
            return []
        writer, self._open_writer = self._open_writer, None
        self.response.output.append(writer.item(status))
        return writer.end(status)

    def _response_event(
        self, kind: type[Created | Queued | InProgress | Completed | Incomplete | Failed]
    ):
        self.has_started = True
        # A copy: the events of a step are encoded after the step.
        response = replace(self.response, output=list(self.response.output))
        return kind(sequence_number=self._numbering.next(), response=response)


def _find_tokens(
    text: str, logprobs: list[TokenLogprob], *, from_the_end: bool = False
) -> tuple[int, int] | None:
    """The range of the tokens that spell ``text``: the first one, and the one after the last.

    Some token must begin with the text, or else with white space that was stripped before it.
    """
    sought = text.encode("utf-8", "surrogatepass")
    joined = b"".join(bytes(each.bytes) for each in logprobs)
    ends = list(accumulate(len(each.bytes) for each in logprobs))
    starts = [0, *ends][: len(ends)]
    order = range(len(starts))[::-1] if from_the_end else range(len(starts))
    for has_space in (False, True) if sought else ():
        for token in order:
            behind = joined[starts[token] :]
            at = len(behind) - len(behind.lstrip()) if has_space else 0
            if behind.startswith(sought, at):
                return token, bisect_left(ends, starts[token] + at + len(sought)) + 1
    return None


def to_response_error(error: ApiError) -> ResponseError:
    """The ``error`` field of a response that failed with ``error``."""
    if error.status == 429:
        return ResponseError("rate_limit_exceeded", error.message)
    return ResponseError("invalid_prompt" if error.status < 500 else "server_error", error.message)
