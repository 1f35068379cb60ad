"""Which fields are read of the items that clients send, so that the others can be reported."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.openai.responses.input_items import (
    AudioPart,
    FilePart,
    ImagePart,
    NewCall,
    NewCallOutput,
    NewCustomCall,
    NewMessage,
    NewReasoning,
    NewReference,
    ReasoningPart,
    RefusalPart,
    TextPart,
)
from server.openai.unread_fields import ReadFields, always, by_type, read_fields_of

# The log-probabilities of an answer come back with it, and are about the past.
_TEXT = read_fields_of((*TextPart.model_fields, "logprobs"))
_PARTS = by_type(
    {
        "input_text": _TEXT,
        "output_text": _TEXT,
        "text": _TEXT,
        "input_image": read_fields_of(ImagePart.model_fields),
        "input_audio": read_fields_of(
            AudioPart.model_fields, input_audio=always(read_fields_of(("data", "format")))
        ),
        "input_file": read_fields_of(FilePart.model_fields),
        "refusal": read_fields_of(RefusalPart.model_fields),
    }
)
_REASONING = always(read_fields_of(ReasoningPart.model_fields))
_MESSAGE = read_fields_of(NewMessage.model_fields, content=_PARTS)
_REFERENCE = read_fields_of(NewReference.model_fields)
# The call has the tool's name, too.
_OUTPUT = read_fields_of((*NewCallOutput.model_fields, "name"), output=_PARTS)
_kind_by_type = by_type(
    {
        "message": _MESSAGE,
        "function_call": read_fields_of(NewCall.model_fields),
        "function_call_output": _OUTPUT,
        "custom_tool_call": read_fields_of(NewCustomCall.model_fields),
        "custom_tool_call_output": _OUTPUT,
        "reasoning": read_fields_of(
            NewReasoning.model_fields, summary=_REASONING, content=_REASONING
        ),
        "item_reference": _REFERENCE,
    }
)


def kind_of_item(item: Mapping[str, Any]) -> ReadFields | None:
    """The kind of an item; without a type it is a message if it has a role, or a reference."""
    if item.get("type") is None:
        return _MESSAGE if "role" in item else _REFERENCE
    return _kind_by_type(item)
