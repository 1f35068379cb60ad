"""Chat completions stored with ``store``: the request's messages and settings, the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict

from engine.types import SamplingParams
from server.openai.content import to_chat_parts
from server.openai.functions import Function
from server.openai.inputs import ChatRequest
from server.openai.messages import Message
from server.openai.outputs import ChatCompletion, to_json
from server.openai.tool_fields import ToolChoice
from server.store.chats import ChatStore, StoredChat
from server.store.database import Database, StoreError


class StoredChatCompletion(ChatCompletion, kw_only=True):
    """A chat completion as it was returned, with the request's settings."""

    temperature: float
    top_p: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    response_format: dict[str, Any] | None
    tools: list[dict[str, Any]] | None
    tool_choice: str | dict[str, Any] | None
    input_user: str | None
    metadata: dict[str, str] = field(default_factory=dict)


class StoredMessage(Struct, kw_only=True):
    """A message of a stored chat completion's request."""

    id: str = ""  # derived from the completion's id and the message's position
    role: str
    content: str | None
    name: str | None = None
    # If there are images or audio; parts that are only text are joined by newlines on arrival.
    content_parts: list[dict[str, Any]] | None = None
    refusal: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    reasoning_content: str | None = None


_decode = msgspec.json.Decoder(StoredChatCompletion).decode
_decode_message = msgspec.json.Decoder(StoredMessage).decode


class ChatRecorder:
    """Stores the response to one request for its tenant."""

    def __init__(
        self, database: Database, tenant: str, body: ChatRequest, sampling: SamplingParams
    ) -> None:
        self._store = ChatStore(database)
        self._tenant = tenant
        self._body = body
        self._sampling = sampling

    async def save(self, answer: ChatCompletion) -> bool:
        """Store the response and return whether that succeeded; the client gets it in any case."""
        chat = StoredChat(
            id=answer.id,
            tenant=self._tenant,
            created_at=answer.created,
            model=answer.model,
            body=to_json(self._with_request(answer)),
            metadata=self._body.metadata or {},
        )
        try:
            await self._store.add(
                chat, [to_json(_to_stored_message(each)) for each in self._body.messages]
            )
        except StoreError:  # already logged
            return False
        return True

    def _with_request(self, answer: ChatCompletion) -> StoredChatCompletion:
        body, sampling = self._body, self._sampling
        form, functions = body.response_format, body.available_functions
        same = ("temperature", "top_p", "presence_penalty", "frequency_penalty")
        return StoredChatCompletion(
            **(asdict(answer) | {"service_tier": "default"}),
            **{name: getattr(sampling, name) for name in same},
            seed=body.seed,
            response_format=form and form.model_dump(by_alias=True, exclude_none=True),
            tools=[function.as_sent() for function in functions] or None,
            tool_choice=_choice(body.choice, functions) if functions else None,
            input_user=body.user,
        )


def read_chat(stored: StoredChat) -> StoredChatCompletion:
    """A stored completion, with its current labels."""
    chat = _decode(stored.body)
    chat.metadata = dict(stored.metadata)
    return chat


def read_message(chat_id: str, position: int, body: bytes) -> StoredMessage:
    """A stored message."""
    message = _decode_message(body)
    message.id = f"{chat_id}-{position}"
    return message


def _to_stored_message(message: Message) -> StoredMessage:
    calls, call, content = message.tool_calls, message.function_call, message.content
    return StoredMessage(
        role=message.role,
        content=message.text,
        content_parts=None
        if content is None or isinstance(content, str)
        else to_chat_parts(content),
        name=message.name,
        refusal=message.refusal,
        tool_calls=[each.model_dump(exclude_none=True) for each in calls] if calls else None,
        tool_call_id=message.tool_call_id,
        function_call=None if call is None else call.model_dump(),
        reasoning_content=message.reasoning_content or message.reasoning,
    )


def _choice(choice: ToolChoice, functions: Sequence[Function]) -> str | dict[str, Any]:
    if choice.names is None:
        return choice.mode
    kinds = {tool.name: "function" if tool.custom is None else "custom" for tool in functions}
    tools = [{"type": kinds[name], kinds[name]: {"name": name}} for name in choice.names]
    if choice.is_named:
        return tools[0]
    return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
