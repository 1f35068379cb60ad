"""What an answer is made of, as its text is understood piece by piece.

    Text("I look it up.")  Reasoning("The user wants ...")
    ToolCallBegin(0, "call_...", "get_weather")  ToolCallArguments(0, '{"city":')  ...

Parts come in the order in which the model wrote them. Neighbours of the same kind belong together:
their texts, joined, are the whole. A call's arguments are one JSON object.
"""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the content that is meant for the reader."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of what the model thought before it answered."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    """A call of a tool; its arguments follow."""

    index: int  # 0 for the first call of a choice
    id: str
    name: str


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments, as JSON text."""

    index: int
    text: str


Part = Text | Reasoning | ToolCallBegin | ToolCallArguments
