"""Conversion of an answer's parts to content blocks, whole or as streaming events."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from server.anthropic.outputs import (
    MessageBlock,
    MessageDelta,
    MessageEvent,
    MessageText,
    MessageThinking,
    MessageToolUse,
)
from server.text.json_scan import is_json
from server.text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin

# Nothing is signed here and no signature is checked, but clients leave thinking without one out of
# the next request, or send it back as text.
_SIGNATURE = "quire"


class BlockWriter:
    """Opens, fills and closes the blocks of one answer in sequence."""

    def __init__(self) -> None:
        self._open: MessageBlock | None = None
        self._index = -1

    def push(self, parts: Sequence[Part]) -> list[MessageEvent]:
        """The events for ``parts``."""
        events: list[MessageEvent] = []
        for part in parts:
            match part:
                case Text(text):
                    if not isinstance(self._open, MessageText):
                        events += self._begin(MessageText())
                    events.append(self._delta(type="text_delta", text=text))
                case Reasoning(text):
                    if not isinstance(self._open, MessageThinking):
                        events += self._begin(MessageThinking())
                    events.append(self._delta(type="thinking_delta", thinking=text))
                case ToolCallBegin(_, id, name):
                    events += self._begin(MessageToolUse(id=tool_use_id(id), name=name))
                case ToolCallArguments(_, text):
                    events.append(self._delta(type="input_json_delta", partial_json=text))
        return events

    def close(self) -> list[MessageEvent]:
        """The events that close the open block, if there is one."""
        if self._open is None:
            return []
        events = [MessageEvent(type="content_block_stop", index=self._index)]
        if isinstance(self._open, MessageThinking):
            events.insert(0, self._delta(type="signature_delta", signature=_SIGNATURE))
        self._open = None
        return events

    def _begin(self, block: MessageBlock) -> list[MessageEvent]:
        events = self.close()
        self._open = block
        self._index += 1
        start = MessageEvent(type="content_block_start", index=self._index, content_block=block)
        return [*events, start]

    def _delta(self, **fields: Any) -> MessageEvent:
        delta = MessageDelta(**fields)
        return MessageEvent(type="content_block_delta", index=self._index, delta=delta)


def complete_blocks(parts: Sequence[Part]) -> list[MessageBlock]:
    """The blocks of a complete answer."""
    blocks: list[MessageBlock] = []
    pieces: list[list[str]] = []  # by block
    for part in parts:
        last = blocks[-1] if blocks else None
        match part:
            case Text() if not isinstance(last, MessageText):
                blocks.append(MessageText())
            case Reasoning() if not isinstance(last, MessageThinking):
                blocks.append(MessageThinking())
            case ToolCallBegin(_, id, name):
                blocks.append(MessageToolUse(id=tool_use_id(id), name=name))
        if len(blocks) > len(pieces):
            pieces.append([])
        if not isinstance(part, ToolCallBegin):
            pieces[-1].append(part.text)
    for block, texts in zip(blocks, pieces, strict=True):
        _fill(block, "".join(texts))
    return blocks


def _fill(block: MessageBlock, text: str) -> None:
    match block:
        case MessageText():
            block.text = text
        case MessageThinking():
            block.thinking, block.signature = text, _SIGNATURE
        case MessageToolUse():
            block.input = _input(text)


def _input(text: str) -> Any:
    """The arguments of a call as the model wrote them; of a truncated call, the complete part."""
    if is_json(text):
        return msgspec.Raw(text.encode())
    with contextlib.suppress(ValueError):
        return from_json(text, allow_partial=True)
    return {}


def tool_use_id(id: str) -> str:
    """A call's id in the form that this API's clients expect."""
    return f"toolu_{id.removeprefix('call_')}"
