"""The parts of an answer, emitted as its text is parsed.

    Text("I look it up.")  Reasoning("The user wants ...")
    ToolCallBegin(0, "call_...", "get_weather")  ToolCallArguments(0, '{"city":')  ...

Parts come in the order in which the model wrote them. Adjacent parts of the same kind belong
together: their texts, joined, are the whole. A call's arguments are one JSON object; those of a
custom tool are its input, a text (``custom_input.py``).
"""

from __future__ import annotations

import msgspec


class Text(msgspec.Struct, frozen=True, gc=False):
    """A piece of the content."""

    text: str


class Reasoning(msgspec.Struct, frozen=True, gc=False):
    """A piece of the model's reasoning."""

    text: str


class ToolCallBegin(msgspec.Struct, frozen=True, gc=False):
    """The start of a tool call; its arguments follow."""

    index: int  # counts the calls of a choice from 0
    id: str
    name: str
    is_custom: bool = False  # of a custom tool


class ToolCallArguments(msgspec.Struct, frozen=True, gc=False):
    """A piece of a call's arguments, as JSON text; or of its input, as it is."""

    index: int
    text: str
    is_custom: bool = False


Part = Text | Reasoning | ToolCallBegin | ToolCallArguments
