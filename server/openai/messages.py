"""A message of a conversation, as requests give it and as the chat template takes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import model_validator

from server.openai import content as contents
from server.openai.api_model import ApiModel
from server.openai.content import Content, ImagePart, kind_of_part, media_kind
from server.openai.tool_fields import EarlierCall, EarlierCustom, EarlierFunction
from server.openai.unread_fields import always, read_fields_of
from server.text.answer_format import AnswerFormat

_MEDIA_ROLES = ("user", "tool")  # whose messages may hold images, videos and audio


class Message(ApiModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: Content = None
    name: str | None = None
    tool_calls: list[EarlierCall] | None = None
    tool_call_id: str | None = None
    function_call: EarlierFunction | None = None
    refusal: str | None = None  # an assistant's refusal, in place of a content
    reasoning: str | None = None
    reasoning_content: str | None = None
    prefix: bool | None = None  # whether the answer continues it, if it is the last

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        # Only an assistant's content may be empty: it called tools, refused, or only reasoned.
        if self.content is None and self.role != "assistant":
            raise ValueError("content: must be a string or a list of parts")
        if self.role not in _MEDIA_ROLES and (kind := media_kind(self.content)):
            raise ValueError(f"content: a message of the {self.role} cannot hold {kind}")
        if self.prefix and self.role != "assistant":
            raise ValueError("prefix: is for a message of the assistant, to be continued")
        return self

    @property
    def text(self) -> str | None:
        """The text; None if there is none."""
        return contents.text_of(self.content)

    @property
    def images(self) -> Mapping[int, ImagePart]:
        """The images, by their index among the parts."""
        return contents.images_of(self.content)

    @property
    def num_chars(self) -> int:
        """A lower bound of the characters that this message adds to a prompt."""
        calls = (call.called.arguments for call in self.tool_calls or [])
        return len(self.text or "") + sum(map(len, calls))

    def for_template(self, answer_format: AnswerFormat) -> dict[str, Any]:
        """The message as the chat template of a model with this answer format expects it."""
        role = {"developer": "system", "function": "tool"}.get(self.role, self.role)
        content = self.refusal if self.content is None else self.content
        message: dict[str, Any] = {"role": role, "content": contents.for_template(content)}
        calls = list(self.tool_calls or [])
        if self.function_call is not None:
            calls.append(EarlierCall(function=self.function_call))
        if content is None and not calls:
            message["content"] = ""
        if calls:
            message["tool_calls"] = [call.for_template(answer_format) for call in calls]
        if self.name is not None:
            message["name"] = self.name
        if self.tool_call_id is not None:
            message["tool_call_id"] = answer_format.template_call_id(self.tool_call_id)
        reasoning = self.reasoning_content or self.reasoning
        if reasoning is not None:  # templates use either name
            message |= {"reasoning_content": reasoning, "reasoning": reasoning}
        return message


_EARLIER_FUNCTION = always(read_fields_of((*EarlierFunction.model_fields,)))
_EARLIER_CUSTOM = always(read_fields_of((*EarlierCustom.model_fields,)))
_EARLIER_CALL = read_fields_of(
    (*EarlierCall.model_fields, "index"),  # which the deltas of a stream have
    function=_EARLIER_FUNCTION,
    custom=_EARLIER_CUSTOM,
)
kind_of_message = always(
    read_fields_of(
        (*Message.model_fields, "id"),  # which stored messages have
        content=kind_of_part,
        tool_calls=always(_EARLIER_CALL),
        function_call=_EARLIER_FUNCTION,
    )
)
