"""Translation of a response's items and options to a chat request, and of chat's errors back."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from engine.errors import RequestError
from server.errors import ApiError, to_api_error
from server.openai.responses.inputs import ResponseInput, ResponsesRequest
from server.openai.responses.items import (
    CallItem,
    CallOutputItem,
    CustomCallItem,
    Item,
    MessageItem,
    ReasoningItem,
)
from server.openai.responses.tools import ToolSet, shown_name

# Chat's field names and this API's; the first that matches counts.
_FIELD_NAMES = {
    "messages": "input",
    "prompt": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
_TOOL_FIELD = re.compile(r"tools\.(\d+)\b(?:\.custom(\.format))?.*")


def chat_body(
    request: ResponseInput, items: Sequence[Item], loose: Collection[str] = ()
) -> dict[str, Any]:
    """The body of the equivalent chat request.

    Args:
        request: its own ``input`` is ignored.
        items: the whole conversation, resolved.
        loose: names of tools whose calls need not satisfy their schemas.
    """
    body: dict[str, Any] = {
        **request.forwarded,
        "model": request.model,
        "messages": to_chat_messages(request.instructions, items),
        "response_format": _response_format(request),
    }
    if offered := request.tools.offered:
        body["tools"] = [tool.for_chat(loose) for tool in offered]
        body["parallel_tool_calls"] = request.parallel_tool_calls
    if request.tool_choice is not None:
        body["tool_choice"] = _tool_choice(request.tool_choice, request.tools)
    if request.reasoning is not None:
        body["reasoning_effort"] = request.reasoning.effort
    if isinstance(request, ResponsesRequest):
        body["stream"] = request.stream
        body["temperature"] = request.temperature
        body["top_p"] = request.top_p
        body["max_completion_tokens"] = request.max_output_tokens
        if request.wants_logprobs:
            body["logprobs"] = True
            body["top_logprobs"] = request.top_logprobs or 0
    return {name: value for name, value in body.items() if value is not None}


def to_chat_messages(instructions: str | None, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The items as chat messages.

    The model's output of one turn (reasoning, text, calls) is one message. So are instructions and
    the system messages that follow them, because many templates accept only one.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        match item:
            case MessageItem(role="assistant"):
                last = _assistant_message(messages, "content", "tool_calls")
                last["content"] = item.text()
            case ReasoningItem():
                last = _assistant_message(messages, "content", "tool_calls")
                last["reasoning_content"] = last.get("reasoning_content", "") + item.text()
            case CallItem() | CustomCallItem():
                name = shown_name(item.name, item.namespace or None)
                if isinstance(item, CustomCallItem):
                    call = {"type": "custom", "custom": {"name": name, "input": item.input}}
                else:
                    function = {"name": name, "arguments": item.arguments}
                    call = {"type": "function", "function": function}
                called = _assistant_message(messages).setdefault("tool_calls", [])
                called.append({"id": item.call_id, **call})
            case CallOutputItem():
                messages.append(
                    {"role": "tool", "tool_call_id": item.call_id, "content": item.for_chat()}
                )
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                if role == "system" and messages and messages[-1]["role"] == "system":
                    messages[-1]["content"] += "\n\n" + item.text()
                else:
                    messages.append({"role": role, "content": item.for_chat()})
    for message in messages:
        if message["role"] == "assistant" and not message.get("tool_calls"):
            message.setdefault("content", "")
    return messages


@contextlib.contextmanager
def translate_errors(tools: ToolSet | None = None) -> Iterator[None]:
    """Rename chat's fields in errors raised in the block to this API's.

    ``tools``: of the request; errors about one of them name its place there.
    """
    try:
        yield
    except (ApiError, RequestError) as error:
        api_error = to_api_error(error, "")
        param = api_error.param or ""
        theirs = param.split(".")[0]
        ours = _FIELD_NAMES.get(theirs)
        if tools is not None and (place := _TOOL_FIELD.fullmatch(param)):
            theirs, ours = param, tools.offered[int(place[1])].where + (place[2] or "")
        if ours is None:
            raise
        message = api_error.message.replace(f"'{param}'", f"'{ours}'")
        raise ApiError(
            api_error.status,
            message.replace(f"'{theirs}'", f"'{ours}'"),
            param=ours,
            code=api_error.code,
            headers=api_error.headers,
        ) from None


def _assistant_message(messages: list[dict[str, Any]], *taken: str) -> dict[str, Any]:
    """The last assistant message, or a new one if that is complete or has any of ``taken``."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in taken):
        last = {"role": "assistant"}
        messages.append(last)
    return last


def _response_format(request: ResponseInput) -> dict[str, Any] | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    given = {
        "name": form.name,
        "description": form.description,
        "schema": form.schema_,
        "strict": form.strict,
    }
    schema = {name: value for name, value in given.items() if value is not None}
    return {"type": "json_schema", "json_schema": schema}


def _tool_choice(choice: str | dict[str, Any], tools: ToolSet) -> str | dict[str, Any]:
    if isinstance(choice, str):
        return choice

    def named(one: dict[str, Any]) -> dict[str, Any]:
        return {"type": "function", "function": {"name": tools.find(one["name"])}}

    if choice["type"] != "allowed_tools":
        return named(choice)
    allowed = {"mode": choice["mode"], "tools": [named(one) for one in choice["tools"]]}
    return {"type": "allowed_tools", "allowed_tools": allowed}
