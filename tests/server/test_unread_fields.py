"""Fields inside the history that nothing reads: named once, and never those of an answer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from server.anthropic.inputs import MessagesRequest
from server.openai.api_model import ApiModel
from server.openai.inputs import ChatRequest, TokenizeRequest
from server.openai.responses.conversation_routes import ItemsToAdd, NewConversation
from server.openai.responses.inputs import ResponsesRequest
from server.openai.unread_fields import always, read_fields_of, unread_fields
from server.openai.unsupported import MAX_NAMED
from tests.servers import MODEL, Server

IGNORED = "x-quire-ignored-params"
DOT = "data:image/png;base64,AA=="
QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION: Any = {"name": "get_weather", "parameters": PARAMETERS}


class City(BaseModel):
    city: Literal["Paris", "Rome"]  # a small model might not end a free one


@pytest.fixture
def strict(guarded_server: Server) -> Iterator[openai.OpenAI]:
    """The SDK on a server that refuses every field without effect."""
    url = f"{guarded_server.url}/v1"
    with openai.OpenAI(base_url=url, api_key="sk-test-0123456789", max_retries=0) as client:
        yield client


def unread(shape: type[ApiModel], **body: Any) -> list[str]:
    """The unread fields of a body that is valid."""
    shape.read({"model": MODEL, **body})
    return shape.unread({"model": MODEL, **body})


def in_chat(*messages: Any) -> list[str]:
    return unread(ChatRequest, messages=list(messages))


def in_items(*items: Any) -> list[str]:
    return unread(ResponsesRequest, input=list(items))


def in_blocks(role: str, *blocks: Any) -> list[str]:
    last = {"role": "user", "content": "Go on"}
    return unread(
        MessagesRequest, max_tokens=1, messages=[{"role": role, "content": list(blocks)}, last]
    )


# ---------------------------------------------------------------- what is found


def test_the_unread_fields_of_a_chat_are_found() -> None:
    call = {"id": "1", "type": "function", "index": 1, "mood": 1,
            "function": {"name": "f", "arguments": {"mood": 1}, "mood": 1}}  # fmt: skip
    earlier = {"role": "assistant", "tool_calls": [call], "mood": 1}
    image = {"type": "image_url", "max_pixels": 9, "image_url": {"url": DOT, "min_pixels": 4}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "citations": [1]}, image]
    found = in_chat(QUESTION, earlier, {"role": "user", "content": parts})
    assert found == [
        "messages.1.mood",
        "messages.1.tool_calls.0.mood",
        "messages.1.tool_calls.0.function.mood",
        "messages.2.content.1.citations",
        "messages.2.content.2.max_pixels",
        "messages.2.content.2.image_url.min_pixels",
    ]
    old = {"role": "assistant", "function_call": {"name": "f", "arguments": "{}", "mood": 1}}
    assert in_chat(old) == ["messages.0.function_call.mood"]
    assert unread(TokenizeRequest, messages=[old]) == ["messages.0.function_call.mood"]
    assert unread(TokenizeRequest, prompt="Hi") == []


def test_the_unread_fields_of_items_are_found() -> None:
    text = {"type": "input_text", "text": "a", "mood": 1}
    items = [
        {"role": "user", "content": [text], "phase": "commentary"},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "async": True},
        {"type": "function_call_output", "call_id": "1", "output": [text], "mood": 1},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "b", "mood": 1}]},
        {"id": "msg_1", "content": "lost, as this is a reference"},
    ]
    assert in_items(*items) == [
        "input.0.phase",
        "input.0.content.0.mood",
        "input.1.async",
        "input.2.mood",
        "input.2.output.0.mood",
        "input.3.summary.0.mood",
        "input.4.content",
    ]
    assert unread(NewConversation, items=items[:1]) == ["items.0.phase", "items.0.content.0.mood"]
    assert unread(ItemsToAdd, items=items[4:]) == ["items.0.content"]
    assert unread(NewConversation) == []


def test_the_unread_fields_of_blocks_are_found() -> None:
    text = {"type": "text", "text": "a", "citations": [{"cited_text": "b"}]}
    source = {"type": "base64", "media_type": "image/png", "data": "AA==", "mood": 1}
    result = {"type": "tool_result", "tool_use_id": "1", "content": [text], "mood": 1}
    assert in_blocks("user", text, {"type": "image", "source": source}, result) == [
        "messages.0.content.0.citations",
        "messages.0.content.1.source.mood",
        "messages.0.content.2.mood",
        "messages.0.content.2.content.0.citations",
    ]
    held = {"type": "text", "media_type": "text/plain", "data": "a", "content": [{"type": [1]}]}
    assert in_blocks("user", {"type": "document", "source": held}) == []  # no kind that is known
    body = {"messages": [{**QUESTION, "mood": 1}], "system": [text], "max_tokens": 1}
    assert unread(MessagesRequest, **body) == ["system.0.citations", "messages.0.mood"]


def test_what_requests_nothing_is_not_found() -> None:
    """Fields that the clients' own types have, and the values they leave them at."""
    empty: Any = {"annotations": [], "audio": None, "function_call": None, "refusal": None}
    cached = {"cache_control": {"type": "ephemeral"}, "prompt_cache_breakpoint": {"mode": "x"}}
    direct = {"caller": {"type": "direct"}}
    parts = [{"type": "text", "text": "a", **cached}, {"type": "refusal", "refusal": "no"}]
    said = {
        "role": "assistant",
        "content": parts,
        **empty,
        "id": "1",
        "name": "me",
        "reasoning": "b",
    }
    assert in_chat(said, {**QUESTION, "reasoning_content": "c", **cached}) == []
    answer = {"type": "output_text", "text": "a", "annotations": [], "logprobs": [{"token": "a"}]}
    call = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": "2"}
    output = {"type": "function_call_output", "call_id": "1", "output": "3", "name": "f"}
    assert (
        in_items(
            {"type": "message", "role": "assistant", "status": "completed", "content": [answer]},
            {**call, "status": "completed", "namespace": None, "async": False, **direct},
            {**output, "status": None, **direct},
            {"type": "reasoning", "summary": [], "encrypted_content": None, "status": None},
            {"type": "item_reference", "id": "msg_1"},
        )
        == []
    )
    use = {"type": "tool_use", "id": "1", "name": "f", "input": {"mood": 1}, **direct, **cached}
    thought = {"type": "thinking", "thinking": "a", "signature": "of another server"}
    assert (
        in_blocks("assistant", {"type": "text", "text": "a", "citations": None}, thought, use) == []
    )
    result = {
        "type": "tool_result",
        "tool_use_id": "1",
        "content": "b",
        "is_error": False,
        **cached,
    }
    assert in_blocks("user", result) == []


# ---------------------------------------------------------------- how many, at what cost


def test_a_field_is_named_once_however_many_messages_have_it() -> None:
    turns = [{**QUESTION, "sent_at": index} for index in range(1, 200)]
    assert in_chat(QUESTION, *turns, {**QUESTION, "mood": 1}) == [
        "messages.1.sent_at",
        "messages.200.mood",
    ]


def test_the_names_are_bounded() -> None:
    odd = {**QUESTION, **{f"field{index}": 1 for index in range(1000)}}
    assert in_chat(odd, odd, {**QUESTION, "mood": 1}) == [
        f"messages.0.field{index}" for index in range(MAX_NAMED)
    ]


def test_what_is_read_costs_one_comparison_an_object() -> None:
    """No field of an object is visited, and so nothing is spent on long texts or many fields."""

    class Expected(dict[str, Any]):
        def items(self) -> Any:
            raise AssertionError("visited field by field")

    kind = always(read_fields_of(("role", "content")))
    history: list[Any] = [Expected(role="user", content="a") for _ in range(3)]
    assert unread_fields(history, kind, "messages") == []
    assert unread_fields("a text", kind, "input") == []
    with pytest.raises(AssertionError, match="visited"):
        unread_fields([Expected(mood=1)], kind, "messages")


# ---------------------------------------------------------------- what clients see


def test_the_header_names_them_on_every_endpoint(server: Server) -> None:
    text = {"type": "text", "text": "Hello", "mood": 1}
    turn = {"role": "user", "content": [text], "mood": 1}
    chat = {"model": MODEL, "messages": [QUESTION, turn], "max_tokens": 1}
    names = "messages.1.mood,messages.1.content.0.mood"
    for path in ("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/tokenize"):
        body = {name: chat[name] for name in chat if path != "/tokenize" or name != "max_tokens"}
        if path.endswith("count_tokens"):
            del body["max_tokens"]
        answer = server.post(path, body)
        assert (answer.status_code, answer.headers[IGNORED]) == (200, names), path
    items = [{"role": "user", "content": [{**text, "type": "input_text"}], "mood": 1}]
    body = {"model": MODEL, "input": items, "max_output_tokens": 1, "store": False, "other": 1}
    answer = server.post("/v1/responses", body)
    assert answer.headers[IGNORED] == "other,input.0.mood,input.0.content.0.mood"
    answer = server.post("/v1/conversations", {"items": items})
    assert answer.headers[IGNORED] == "items.0.mood,items.0.content.0.mood"


def test_a_strict_server_names_them_all(strict: openai.OpenAI) -> None:
    turn: Any = {"role": "user", "content": [{"type": "text", "text": "Hi", "a": 1, "b": 1}]}
    with pytest.raises(openai.BadRequestError) as refused:
        strict.chat.completions.create(model=MODEL, messages=[turn])
    assert refused.value.param == "messages.0.content.0.a"
    assert "strict; nor have messages.0.content.0.b" in refused.value.message


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # of the SDK, about what it parsed
def test_a_chat_answer_can_be_sent_back_to_a_strict_server(strict: openai.OpenAI) -> None:
    """As the SDK holds it: whole, parsed, and assembled from a stream."""
    tools: Any = [{"type": "function", "function": {**FUNCTION, "strict": True}}]
    fields: Any = {"model": MODEL, "temperature": 0, "max_tokens": 60}
    plain = strict.chat.completions.create(messages=[QUESTION], **fields).choices[0].message
    called = strict.chat.completions.create(messages=[QUESTION], tools=tools, **fields)
    parsed = strict.chat.completions.parse(messages=[QUESTION], tools=tools, **fields)
    shaped = strict.chat.completions.parse(
        messages=[QUESTION], response_format=City, **{**fields, "max_tokens": 200}
    )
    with strict.chat.completions.stream(messages=[QUESTION], tools=tools, **fields) as stream:
        streamed = stream.until_done().get_final_completion()
    answers: list[Any] = [plain, shaped.choices[0].message]
    for whole in (called, parsed, streamed):
        message: Any = whole.choices[0].message
        assert message.tool_calls
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "21"}
        answers += [message, result]
    dumped = [each if isinstance(each, dict) else each.model_dump() for each in answers]
    for history in (answers, dumped):
        messages: Any = [QUESTION, *history, QUESTION]
        strict.chat.completions.create(messages=messages, **{**fields, "max_tokens": 1})


@pytest.mark.filterwarnings("ignore:Pydantic serializer")  # of the SDK, about what it parsed
def test_a_response_can_be_sent_back_to_a_strict_server(strict: openai.OpenAI) -> None:
    tools: Any = [{"type": "function", **FUNCTION, "strict": True}]
    fields: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 200, "store": False}
    include: Any = ["message.output_text.logprobs", "reasoning.encrypted_content"]
    plain = strict.responses.create(input=[QUESTION], include=include, **fields)
    parsed = strict.responses.parse(input=[QUESTION], text_format=City, **fields)
    called = strict.responses.create(input=[QUESTION], tools=tools, **fields)
    items: list[Any] = [QUESTION, *plain.output, *parsed.output, *called.output]
    call = next(item for item in called.output if item.type == "function_call")
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "21"})
    dumped: list[Any] = [each if isinstance(each, dict) else each.model_dump() for each in items]
    for history in (items, dumped):
        strict.responses.create(input=history, **{**fields, "max_output_tokens": 16})


def test_a_message_can_be_sent_back_to_a_strict_server(guarded_server: Server) -> None:
    tool = {"name": "get_weather", "input_schema": PARAMETERS}
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 0, "tools": [tool]}
    answer = guarded_server.post("/v1/messages", {**body, "messages": [QUESTION]}).json()
    assert answer["stop_reason"] == "tool_use"
    result = {"type": "tool_result", "tool_use_id": answer["content"][-1]["id"], "content": "21"}
    turns = [{"role": "assistant", "content": answer["content"]},
             {"role": "user", "content": [result]}]  # fmt: skip
    again = guarded_server.post("/v1/messages", {**body, "messages": [QUESTION, *turns]})
    assert again.status_code == 200, again.text
