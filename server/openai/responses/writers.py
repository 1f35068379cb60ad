"""One writer for each kind of output item, which turns its pieces into events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Protocol

from msgspec import UNSET

from server.openai.outputs import TokenLogprob
from server.openai.responses.events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    InputDelta,
    InputDone,
    ItemAdded,
    ItemDone,
    Numbering,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    SummaryDelta,
    SummaryDone,
    SummaryPartAdded,
    SummaryPartDone,
    TextDelta,
    TextDone,
)
from server.openai.responses.input_items import encode_reasoning, new_item_id
from server.openai.responses.items import (
    CallItem,
    CustomCallItem,
    Item,
    ItemStatus,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    SummaryText,
)
from server.openai.responses.tools import OfferedTool


class Writer(Protocol):
    """An output item while it is generated. Events are numbered in the order of the calls."""

    def begin(self) -> list[Event]:
        """The events that open the item, still empty."""
        ...

    def end(self, status: ItemStatus) -> list[Event]:
        """The events that close the item, complete or cut off."""
        ...

    def item(self, status: ItemStatus) -> Item:
        """The item in its current state."""
        ...


class MessageWriter:
    """An assistant message with one text part."""

    def __init__(self, index: int, numbering: Numbering) -> None:
        self._item_fields = {"output_index": index}
        self._next_number = numbering.next
        self._id = new_item_id("msg")
        self._part_fields = {**self._item_fields, "item_id": self._id, "content_index": 0}
        self._texts: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[Event]:
        """See ``Writer``."""
        empty = MessageItem(id=self._id, role="assistant", status="in_progress", content=[])
        return [
            ItemAdded(sequence_number=self._next_number(), item=empty, **self._item_fields),
            PartAdded(
                sequence_number=self._next_number(), part=OutputText(""), **self._part_fields
            ),
        ]

    def add(self, text: str, logprobs: list[TokenLogprob]) -> Event:
        """Add a piece of text, with logprobs if requested."""
        self._texts.append(text)
        self._logprobs += logprobs
        return TextDelta(
            sequence_number=self._next_number(), delta=text, logprobs=logprobs, **self._part_fields
        )

    def end(self, status: ItemStatus) -> list[Event]:
        """See ``Writer``."""
        part = self._part()
        return [
            TextDone(
                sequence_number=self._next_number(),
                text=part.text,
                logprobs=part.logprobs,
                **self._part_fields,
            ),
            PartDone(sequence_number=self._next_number(), part=part, **self._part_fields),
            ItemDone(
                sequence_number=self._next_number(), item=self.item(status), **self._item_fields
            ),
        ]

    def item(self, status: ItemStatus) -> Item:
        """See ``Writer``."""
        return MessageItem(id=self._id, role="assistant", status=status, content=[self._part()])

    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=self._logprobs)


class _AnyCallWriter(ABC):
    """A call of a tool of any kind."""

    _ID_PREFIX: ClassVar[str]

    def __init__(self, index: int, numbering: Numbering, call_id: str, tool: OfferedTool) -> None:
        self._item_fields = {"output_index": index}
        self._next_number = numbering.next
        self._id = new_item_id(self._ID_PREFIX)
        self._part_fields = {**self._item_fields, "item_id": self._id}
        self._call_id = call_id
        self._name = tool.definition.name
        self._namespace = tool.namespace or UNSET
        self._pieces: list[str] = []  # of its arguments, or of its input

    def begin(self) -> list[Event]:
        """See ``Writer``."""
        item = self.item("in_progress")
        return [ItemAdded(sequence_number=self._next_number(), item=item, **self._item_fields)]

    @abstractmethod
    def item(self, status: ItemStatus) -> Item:
        """See ``Writer``."""


class CallWriter(_AnyCallWriter):
    """A function call."""

    _ID_PREFIX = "fc"

    def add(self, text: str) -> list[Event]:
        """Add a piece of the arguments."""
        self._pieces.append(text)
        number = self._next_number()
        return [ArgumentsDelta(sequence_number=number, delta=text, **self._part_fields)]

    def end(self, status: ItemStatus) -> list[Event]:
        """See ``Writer``."""
        return [
            ArgumentsDone(
                sequence_number=self._next_number(),
                name=self._name,
                arguments="".join(self._pieces),
                **self._part_fields,
            ),
            ItemDone(
                sequence_number=self._next_number(), item=self.item(status), **self._item_fields
            ),
        ]

    def item(self, status: ItemStatus) -> Item:
        """See ``Writer``."""
        return CallItem(
            id=self._id,
            call_id=self._call_id,
            name=self._name,
            arguments="".join(self._pieces),
            status=status,
            namespace=self._namespace,
        )


class CustomCallWriter(_AnyCallWriter):
    """A call of a custom tool."""

    _ID_PREFIX = "ctc"

    def add(self, text: str) -> list[Event]:
        """Add a piece of the input."""
        self._pieces.append(text)
        number = self._next_number()
        return [InputDelta(sequence_number=number, delta=text, **self._part_fields)]

    def end(self, status: ItemStatus) -> list[Event]:
        """See ``Writer``."""
        return [
            InputDone(
                sequence_number=self._next_number(),
                input="".join(self._pieces),
                **self._part_fields,
            ),
            ItemDone(
                sequence_number=self._next_number(), item=self.item(status), **self._item_fields
            ),
        ]

    def item(self, status: ItemStatus) -> CustomCallItem:
        """See ``Writer``."""
        return CustomCallItem(
            id=self._id,
            call_id=self._call_id,
            name=self._name,
            input="".join(self._pieces),
            status=status,
            namespace=self._namespace,
        )


class ReasoningWriter:
    """Reasoning: as content, or as a summary if one was requested.

    The summary is the reasoning itself: clients that request one look for it there.
    """

    def __init__(
        self, index: int, numbering: Numbering, *, summary: bool, include_encrypted: bool
    ) -> None:
        self._item_fields = {"output_index": index}
        self._next_number = numbering.next
        self._summary = summary
        self._include_encrypted = include_encrypted
        self._id = new_item_id("rs")
        part = {"summary_index": 0} if summary else {"content_index": 0}
        self._part_fields = {**self._item_fields, "item_id": self._id, **part}
        self._texts: list[str] = []

    def begin(self) -> list[Event]:
        """See ``Writer``."""
        empty = ReasoningItem(id=self._id, summary=[], status="in_progress")
        events: list[Event] = [
            ItemAdded(sequence_number=self._next_number(), item=empty, **self._item_fields)
        ]
        if self._summary:
            part = SummaryText("")
            events.append(
                SummaryPartAdded(
                    sequence_number=self._next_number(), part=part, **self._part_fields
                )
            )
        else:
            part = ReasoningText("")
            events.append(
                PartAdded(sequence_number=self._next_number(), part=part, **self._part_fields)
            )
        return events

    def add(self, text: str) -> Event:
        """Add a piece of reasoning."""
        self._texts.append(text)
        kind = SummaryDelta if self._summary else ReasoningDelta
        return kind(sequence_number=self._next_number(), delta=text, **self._part_fields)

    def end(self, status: ItemStatus) -> list[Event]:
        """See ``Writer``."""
        text = "".join(self._texts)
        done = SummaryDone if self._summary else ReasoningDone
        events: list[Event] = [
            done(sequence_number=self._next_number(), text=text, **self._part_fields)
        ]
        number = self._next_number()
        if self._summary:
            part = SummaryText(text)
            events.append(SummaryPartDone(sequence_number=number, part=part, **self._part_fields))
        else:
            part = ReasoningText(text)
            events.append(PartDone(sequence_number=number, part=part, **self._part_fields))
        item = self.item(status)
        events.append(ItemDone(sequence_number=self._next_number(), item=item, **self._item_fields))
        return events

    def item(self, status: ItemStatus) -> Item:
        """See ``Writer``."""
        text = "".join(self._texts)
        return ReasoningItem(
            id=self._id,
            summary=[SummaryText(text)] if self._summary else [],
            content=None if self._summary else [ReasoningText(text)],
            encrypted_content=encode_reasoning(text) if self._include_encrypted else None,
            status=status,
        )
