"""Translation of a Messages request to a chat request, and of chat's errors back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from engine.errors import RequestError
from server.anthropic.content import (
    DocumentBlock,
    FileDocumentBlock,
    FileImageBlock,
    ImageBlock,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolResultBlock,
    ToolUseBlock,
)
from server.anthropic.inputs import (
    InputMessage,
    MessagesRequest,
    ThinkingConfig,
    TokenCountRequest,
    ToolChoice,
)
from server.errors import ApiError, to_api_error
from server.openai.documents import END, begin_document, show_document
from server.openai.thinking import THINKING_KWARGS

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Chat's field names and this API's.
_FIELD_NAMES = {
    "chat_template_kwargs": "thinking",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "prompt": "messages",
    "max_completion_tokens": "max_tokens",
}


def chat_body(request: TokenCountRequest) -> dict[str, Any]:
    """The body of the equivalent chat request, without the answer's limits and stop sequences.

    No block of ``request`` refers to a file.
    """
    body: dict[str, Any] = {"model": request.model, "messages": _messages(request)}
    if request.messages[-1].role == "assistant":  # the answer continues this message
        body["continue_final_message"] = True
    if request.tools:
        body["tools"] = [_tool(tool.model_dump()) for tool in request.tools]
    if request.tool_choice is not None:
        body |= _choice(request.tool_choice)
    wants = _wants_thinking(request.thinking)
    if wants is not None:
        body["chat_template_kwargs"] = dict.fromkeys(THINKING_KWARGS, wants)
    config = request.output_config
    if config is not None and config.effort is not None:
        body["reasoning_effort"] = config.effort
    if request.format is not None:
        schema = {"name": "output", "schema": request.format.schema_, "strict": True}
        body["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.thinking is not None and request.thinking.display == "omitted":
        body["include_reasoning"] = False
    if isinstance(request, MessagesRequest):
        shared = ("stream", "temperature", "top_p", "top_k")
        body |= {name: getattr(request, name) for name in shared}
    return {name: value for name, value in body.items() if value is not None}


@contextlib.contextmanager
def translate_errors(request: TokenCountRequest | None = None) -> Iterator[None]:
    """Rename chat's fields in errors raised in the block to this API's, as in ``request``."""
    try:
        yield
    except (ApiError, RequestError) as error:
        api_error = to_api_error(error, "")
        if api_error.param is None:
            raise
        field = api_error.param.split(".")[0]
        name = _FIELD_NAMES.get(field, field)
        if field == "response_format" and request is not None and request.output_format is not None:
            name = "output_format"
        message = api_error.message.replace(f"'{api_error.param}'", f"'{name}'")
        raise ApiError(
            api_error.status, message, param=name, code=api_error.code, headers=api_error.headers
        ) from None


def _messages(request: TokenCountRequest) -> list[dict[str, Any]]:
    """The messages in chat's form; adjacent ones of one role are merged, as this API does."""
    messages: list[dict[str, Any]] = []
    if request.system:
        messages.append({"role": "system", "content": [_text(request.system)]})
    names: dict[str, str] = {}  # of tools, by their calls' ids
    for message in request.messages:
        if message.role == "assistant":
            _add_assistant(messages, message, names)
        else:
            _add_non_assistant(messages, message, names)
    return messages


def _add_non_assistant(
    messages: list[dict[str, Any]], message: InputMessage, names: dict[str, str]
) -> None:
    for block in message.content:
        if isinstance(block, ToolResultBlock):
            content = [part for each in block.content for part in _parts(each)]
            if block.is_error:  # chat can express a failed call only in its text
                text = content.pop(0)["text"] if content and "text" in content[0] else ""
                content.insert(0, {"type": "text", "text": f"Error: {text}"})
            result = {"role": "tool", "tool_call_id": block.tool_use_id, "content": content or ""}
            if block.tool_use_id in names:
                result["name"] = names[block.tool_use_id]
            messages.append(result)
        elif isinstance(block, (TextBlock, ImageBlock, DocumentBlock)):
            if not messages or messages[-1]["role"] != message.role:
                messages.append({"role": message.role, "content": []})
            messages[-1]["content"] += _parts(block)


def _parts(block: ResultBlock) -> list[dict[str, Any]]:
    assert not isinstance(block, (FileImageBlock, FileDocumentBlock)), "files are read before"
    if isinstance(block, TextBlock):
        return [_text(block.text)]
    if isinstance(block, ImageBlock):
        url = f"data:{block.media_type};base64,{block.data}"
        return [{"type": "image_url", "image_url": {"url": url}}]
    inner = [part for each in block.content for part in _parts(each)]
    if all(isinstance(each, TextBlock) for each in block.content):
        text = "\n".join(part["text"] for part in inner)
        return [_text(show_document(text, block.title, block.context, block.source))]
    begin = begin_document(block.title, block.context, block.source)
    return [_text(f"{begin}\n"), *inner, _text(f"\n{END}")]


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _add_assistant(
    messages: list[dict[str, Any]], message: InputMessage, names: dict[str, str]
) -> None:
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    turn = messages[-1]
    for block in message.content:
        match block:
            case TextBlock(text):
                turn["content"] += text
            case ThinkingBlock(thinking):
                turn["reasoning_content"] = turn.get("reasoning_content", "") + thinking
            case ToolUseBlock(id, name, arguments):
                names[id] = name
                function = {"name": name, "arguments": arguments}
                call = {"id": id, "type": "function", "function": function}
                turn.setdefault("tool_calls", []).append(call)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "parameters": tool["input_schema"]}
    for field in ("description", "strict"):
        if tool[field] is not None:
            function[field] = tool[field]
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> dict[str, Any]:
    if choice.type == "tool":
        fields: dict[str, Any] = {
            "tool_choice": {"type": "function", "function": {"name": choice.name}}
        }
    else:
        fields = {"tool_choice": _CHOICES[choice.type]}
    if choice.disable_parallel_tool_use:
        fields["parallel_tool_calls"] = False
    return fields


def _wants_thinking(thinking: ThinkingConfig | None) -> bool | None:
    """Whether to enable thinking in the template; None leaves it to the model."""
    if thinking is None:
        return False  # as in Anthropic's API, thinking is opt-in
    return {"enabled": True, "disabled": False}.get(thinking.type)
