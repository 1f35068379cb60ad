"""What messages are made of: blocks of text, thinking, tool use and tool results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from server.errors import cut


class TextBlock(msgspec.Struct, frozen=True, tag="text"):
    """Something said."""

    text: str


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking"):
    """Something thought, of an earlier answer."""

    thinking: str


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use"):
    """An earlier call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


class ToolResultBlock(msgspec.Struct, frozen=True, tag="tool_result"):
    """What a call came to."""

    tool_use_id: str
    text: str
    is_error: bool


Block = TextBlock | ThinkingBlock | ToolUseBlock | ToolResultBlock


def read_content(value: Any) -> list[Block]:
    """The blocks of a message. Raises ValueError that names the block at fault."""
    if isinstance(value, str):
        return [TextBlock(value)]
    if not isinstance(value, list):
        raise ValueError("must be a string or a list of blocks")
    return [_read_block(block, index) for index, block in enumerate(value)]


def read_text(value: Any) -> str:
    """A text, or several text blocks, as of ``system``. Raises ValueError."""
    texts: list[str] = []
    for block in read_content(value):
        if not isinstance(block, TextBlock):
            raise ValueError("must be a string or a list of text blocks")
        texts.append(block.text)
    return "\n".join(texts)


def _read_block(block: Any, index: int) -> Block:
    if not isinstance(block, dict):
        raise ValueError(f"block {index} must be an object")
    match block.get("type"):
        case "text":
            return TextBlock(_string(block, "text", index))
        case "thinking":
            return ThinkingBlock(_string(block, "thinking", index))
        case "tool_use":
            arguments = block.get("input")
            if not isinstance(arguments, dict):
                raise ValueError(f"block {index} must have an 'input' that is an object")
            return ToolUseBlock(
                _string(block, "id", index), _string(block, "name", index), arguments
            )
        case "tool_result":
            try:
                text = read_text(block.get("content") or "")
            except ValueError as error:
                raise ValueError(f"block {index}: its content {error}") from None
            is_error = block.get("is_error") or False
            return ToolResultBlock(_string(block, "tool_use_id", index), text, is_error is True)
        case kind:
            # Images and documents among them, which no model here takes.
            raise ValueError(f"block {index} of type {cut(str(kind), 40)!r} is not supported")


def _string(block: Mapping[str, Any], name: str, index: int) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ValueError(f"block {index} must have a {name!r} that is a string")
    return value
