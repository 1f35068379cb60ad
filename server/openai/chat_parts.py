"""Formatting of parsed parts as chat messages and deltas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.openai.outputs import (
    ChatMessage,
    CustomCall,
    CustomCallDelta,
    CustomToolCall,
    Delta,
    FunctionCall,
    FunctionCallDelta,
    ToolCall,
    ToolCallDelta,
)
from server.settings import ReasoningFields
from server.text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin


class ChatFormatter:
    """Formats the parts of one request's choices.

    Args:
        reasoning_fields: the field names that carry reasoning.
        as_function_call: use the deprecated ``function_call`` instead of tool calls.
    """

    def __init__(self, reasoning_fields: ReasoningFields, *, as_function_call: bool) -> None:
        both = ("reasoning", "reasoning_content")
        self._reasoning_fields = both if reasoning_fields == "both" else (reasoning_fields,)
        self._as_function_call = as_function_call

    def message(
        self, parts: Sequence[Part], *, echoed: str = "", has_reasoned: bool = False
    ) -> ChatMessage:
        """The whole message, following ``echoed``, the part of the request that it repeats.

        ``has_reasoned``: there was reasoning, which ``parts`` may lack.
        """
        content = echoed + "".join([part.text for part in parts if isinstance(part, Text)])
        reasoning = "".join([part.text for part in parts if isinstance(part, Reasoning)])
        calls = _tool_calls(parts)
        fields: dict[str, Any] = {}
        if reasoning:
            fields |= dict.fromkeys(self._reasoning_fields, reasoning)
        if calls and self._as_function_call and isinstance(calls[0], ToolCall):
            fields["function_call"] = calls[0].function
        elif calls:
            fields["tool_calls"] = calls
        # The content is null if there are only calls, or generation ended within the reasoning.
        is_null = bool(fields) or has_reasoned
        return ChatMessage(content=content or (None if is_null else ""), **fields)

    def deltas(self, parts: Sequence[Part]) -> list[Delta]:
        """The deltas of ``parts``, in order; adjacent pieces of the same kind are merged."""
        found: list[tuple[type, int, list[Part]]] = []
        for part in parts:
            index = 0 if isinstance(part, Text | Reasoning) else part.index
            if found and found[-1][:2] == (type(part), index):
                found[-1][2].append(part)
            else:
                found.append((type(part), index, [part]))
        return [delta for _, _, group in found if (delta := self._delta(group)) is not None]

    def _delta(self, group: Sequence[Part]) -> Delta | None:
        first = group[0]
        if isinstance(first, ToolCallBegin):
            head = FunctionCallDelta(name=first.name, arguments="")
            if self._as_function_call:
                return Delta(function_call=head) if first.index == 0 else None
            begun = ToolCallDelta(index=first.index, id=first.id)
            if first.is_custom:
                begun.type, begun.custom = "custom", CustomCallDelta(first.name, "")
            else:
                begun.type, begun.function = "function", head
            return Delta(tool_calls=[begun])
        text = "".join([part.text for part in group if not isinstance(part, ToolCallBegin)])
        if isinstance(first, Text):
            return Delta(content=text)
        if isinstance(first, Reasoning):
            return Delta(**dict.fromkeys(self._reasoning_fields, text))
        if first.is_custom:
            added = CustomCallDelta(input=text)
            return Delta(tool_calls=[ToolCallDelta(index=first.index, custom=added)])
        piece = FunctionCallDelta(arguments=text)
        if self._as_function_call:
            return Delta(function_call=piece) if first.index == 0 else None
        return Delta(tool_calls=[ToolCallDelta(index=first.index, function=piece)])


def _tool_calls(parts: Sequence[Part]) -> list[ToolCall | CustomToolCall]:
    begun: list[ToolCallBegin] = []
    pieces: list[list[str]] = []
    for part in parts:
        if isinstance(part, ToolCallBegin):
            begun.append(part)
            pieces.append([])
        elif isinstance(part, ToolCallArguments):
            pieces[part.index].append(part.text)
    return [_call(each, "".join(texts)) for each, texts in zip(begun, pieces, strict=True)]


def _call(begun: ToolCallBegin, text: str) -> ToolCall | CustomToolCall:
    if begun.is_custom:
        return CustomToolCall(id=begun.id, custom=CustomCall(begun.name, text))
    return ToolCall(id=begun.id, function=FunctionCall(begun.name, text))
