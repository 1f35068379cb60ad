"""The typed events of a stream. ``type`` is the tag of each struct, and its ``event:`` line.

response.created ► (queued) ► in_progress
  ► output_item.added
      ► content_part.added ► output_text.delta ... output_text.done ► content_part.done
      ► function_call_arguments.delta ... done
      ► custom_tool_call_input.delta ... done
      ► content_part.added ► reasoning_text.delta ... done ► content_part.done
      ► reasoning_summary_part.added ► reasoning_summary_text.delta ... done ► ..._part.done
  ► output_item.done
► response.completed | incomplete | failed
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from server.openai.outputs import TokenLogprob
from server.openai.responses.items import Item, OutputText, ReasoningText, SummaryText
from server.openai.responses.outputs import Response


class Event(Struct, tag_field="type", kw_only=True):
    """Base of all events; numbers count up from 0 within a stream."""

    sequence_number: int


class ResponseEvent(Event, kw_only=True):
    """Base of events that carry the response in its current state."""

    response: Response


class Created(ResponseEvent, tag="response.created"):
    """The first event."""


class Queued(ResponseEvent, tag="response.queued"):
    """A background response waits for its turn."""


class InProgress(ResponseEvent, tag="response.in_progress"):
    """Generation has started."""


class Completed(ResponseEvent, tag="response.completed"):
    """The end: the response is complete."""


class Incomplete(ResponseEvent, tag="response.incomplete"):
    """The end: the output reached its limit, or a background response was cancelled."""


class Failed(ResponseEvent, tag="response.failed"):
    """The end: ``response.error`` says why."""


class ItemEvent(Event, kw_only=True):
    """Base of events about one output item."""

    output_index: int


class ItemAdded(ItemEvent, tag="response.output_item.added"):
    """An item begins, still empty."""

    item: Item


class ItemDone(ItemEvent, tag="response.output_item.done"):
    """An item is complete."""

    item: Item


class ContentEvent(ItemEvent, kw_only=True):
    """Base of events about a part of an item's content."""

    item_id: str
    content_index: int


class PartAdded(ContentEvent, tag="response.content_part.added"):
    """A part begins, still empty."""

    part: OutputText | ReasoningText


class PartDone(ContentEvent, tag="response.content_part.done"):
    """A part is complete."""

    part: OutputText | ReasoningText


class TextDelta(ContentEvent, tag="response.output_text.delta"):
    """A piece of text."""

    delta: str
    logprobs: list[TokenLogprob]


class TextDone(ContentEvent, tag="response.output_text.done"):
    """The whole text of a part."""

    text: str
    logprobs: list[TokenLogprob]


class ReasoningDelta(ContentEvent, tag="response.reasoning_text.delta"):
    """A piece of reasoning."""

    delta: str


class ReasoningDone(ContentEvent, tag="response.reasoning_text.done"):
    """The whole reasoning."""

    text: str


class SummaryEvent(ItemEvent, kw_only=True):
    """Base of events about a part of a reasoning item's summary."""

    item_id: str
    summary_index: int


class SummaryPartAdded(SummaryEvent, tag="response.reasoning_summary_part.added"):
    """A part begins, still empty."""

    part: SummaryText


class SummaryPartDone(SummaryEvent, tag="response.reasoning_summary_part.done"):
    """A part is complete."""

    part: SummaryText


class SummaryDelta(SummaryEvent, tag="response.reasoning_summary_text.delta"):
    """A piece of the summary."""

    delta: str


class SummaryDone(SummaryEvent, tag="response.reasoning_summary_text.done"):
    """The whole summary."""

    text: str


class ArgumentsDelta(ItemEvent, tag="response.function_call_arguments.delta"):
    """A piece of a call's arguments."""

    item_id: str
    delta: str


class ArgumentsDone(ItemEvent, tag="response.function_call_arguments.done"):
    """The whole arguments, as JSON."""

    item_id: str
    name: str
    arguments: str


class InputDelta(ItemEvent, tag="response.custom_tool_call_input.delta"):
    """A piece of a custom tool's input."""

    item_id: str
    delta: str


class InputDone(ItemEvent, tag="response.custom_tool_call_input.done"):
    """The whole input."""

    item_id: str
    input: str


class ErrorEvent(Event, tag="error"):
    """The stream ends for a reason outside the response: the server is shutting down."""

    code: str | None
    message: str
    param: str | None


StreamEvent = (
    Created
    | Queued
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | SummaryPartAdded
    | SummaryPartDone
    | SummaryDelta
    | SummaryDone
    | ArgumentsDelta
    | ArgumentsDone
    | InputDelta
    | InputDone
    | ErrorEvent
)

_encode = msgspec.json.Encoder().encode


class Numbering:
    """Numbers the events of one stream."""

    def __init__(self) -> None:
        self.next_number = 0

    def next(self) -> int:
        """The number of the next event."""
        number = self.next_number
        self.next_number += 1
        return number


def to_sse(event: Event) -> bytes:
    """``event`` with its name, as one server-sent event."""
    name = event.__struct_config__.tag
    assert isinstance(name, str)
    return b"event: %b\ndata: %b\n\n" % (name.encode(), _encode(event))
