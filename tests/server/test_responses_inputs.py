"""What /v1/responses accepts and rejects, field by field, and how it becomes a chat."""

from __future__ import annotations

from typing import Any

import pytest

from engine.errors import ContextLengthExceeded
from server.openai.responses.context import truncate_to_fit
from server.openai.responses.input_items import decode_reasoning, encode_reasoning, read_input
from server.openai.responses.items import CallItem, CallOutputItem, MessageItem
from server.openai.responses.translate import to_chat_messages
from tests.servers import MODEL, Server

PATH = "/v1/responses"
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
IMAGE = {"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}
FILE = {"type": "file_search_call", "id": "x"}
TOOL = {"type": "function", "name": "f"}
LONG = "word " * 5000


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"input": None}, "input", None),
        ({"input": []}, "input", None),
        ({"input": 5}, "input", None),
        ({"input": ["x"]}, "input.0", None),
        ({"input": [{"content": "x"}]}, "input.0.role", None),
        ({"input": [{"type": "message", "content": "x"}]}, "input.0.role", None),
        ({"input": [{"role": "robot", "content": "x"}]}, "input.0.role", None),
        ({"input": [{"role": "user", "content": None}]}, "input.0.content", None),
        ({"input": [IMAGE]}, "input.0.content", None),
        ({"input": [FILE]}, "input.0.type", None),
        ({"input": [{**CALL, "arguments": {}}]}, "input.0.arguments", None),
        ({"input": [{"type": "function_call_output", "output": "x"}]}, "input.0.call_id", None),
        ({"input": [{"type": "item_reference", "id": "msg_x"}]}, "input.0.id", None),
        ({"input": [{"role": "user", "content": "x"}] * 10_001}, "input", None),
        ({"input": LONG}, "input", "context_length_exceeded"),
        ({"input": LONG, "truncation": "auto"}, "input", "context_length_exceeded"),
        ({"max_output_tokens": 10**6}, "max_output_tokens", "context_length_exceeded"),
        ({"max_output_tokens": 0}, "max_output_tokens", None),
        ({"model": "nothing"}, "model", "model_not_found"),
        ({"temperature": 3}, "temperature", None),
        ({"top_p": -1}, "top_p", None),
        ({"top_logprobs": 21}, "top_logprobs", None),
        ({"top_k": -2}, "top_k", None),
        ({"stop": ["a"] * 5}, "stop", None),
        ({"include": ["everything"]}, "include", None),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", None),
        ({"tools": [{**TOOL, "name": "no spaces"}]}, "tools.0.name", None),
        (
            {"tools": [{"type": "function", "name": "f", "parameters": 1}]},
            "tools.0.parameters",
            None,
        ),
        ({"tool_choice": "sometimes"}, "tool_choice", None),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice", None),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", None),
        ({"text": {"format": {"type": "xml"}}}, "text.format.type", None),
        ({"reasoning": {"effort": "some"}}, "reasoning.effort", None),
        ({"truncation": "last"}, "truncation", None),
        ({"background": True, "store": False}, "background", None),
        ({"stream_options": {}}, "stream_options", None),
        ({"metadata": {"a": "x" * 513}}, "metadata", None),
        ({"metadata": {str(i): "" for i in range(17)}}, "metadata", None),
        ({"conversation": 1}, "conversation", None),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", None),
        ({"messages": [{"role": "user", "content": "x"}]}, "messages", None),
        ({"max_tokens": 5}, "max_tokens", None),
        ({"reasoning_effort": "none"}, "reasoning_effort", None),
        ({"verbosity": "low"}, "verbosity", None),
        ({"n": 2}, "n", None),
        ({"previous_response_id": "resp_x"}, "previous_response_id", "previous_response_not_found"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_bad_field_is_named(
    server: Server, fields: dict[str, Any], param: str, code: str | None
) -> None:
    for extra in ({}, {"stream": True}):
        if "stream_options" in fields and extra:
            continue
        body = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, **fields, **extra}
        answer = server.post(PATH, body)
        error = answer.json()["error"]
        assert answer.status_code == (404 if code == "model_not_found" else 400)
        assert (error["type"], error["param"], error["code"]) == (
            "invalid_request_error",
            param,
            code,
        )
        assert len(answer.content) < 4096


def test_what_has_no_effect_is_named(server: Server) -> None:
    body = {
        "model": MODEL,
        "input": "Hello",
        "max_output_tokens": 1,
        "store": False,
        "whatever": 1,
        "text": {"verbosity": "low"},
        "service_tier": "flex",
        "include": ["web_search_call.results"],
        "seed": 1,
        "n": 1,
        "safety_identifier": "me",
    }
    answer = server.post(PATH, body)
    assert answer.status_code == 200
    told = set(answer.headers["x-quire-ignored-params"].split(","))
    assert told == {"whatever", "text.verbosity", "service_tier", "include"}
    del body["whatever"], body["text"], body["service_tier"], body["include"]
    assert "x-quire-ignored-params" not in server.post(PATH, body).headers


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up"])
def test_a_bad_page_is_named(server: Server, query: str) -> None:
    answer = server.get(f"{PATH}/resp_x/input_items?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_the_oldest_items_make_room(server: Server) -> None:
    filler = [
        {"role": role, "content": "word " * 150}
        for _ in range(20)
        for role in ("user", "assistant")
    ]
    body = {
        "model": MODEL,
        "temperature": 0,
        "instructions": "Be brief.",
        "input": [*filler, {"role": "user", "content": "What is the capital of France?"}],
        "max_output_tokens": 16,
    }
    assert server.post(PATH, body).json()["error"]["code"] == "context_length_exceeded"
    answer = server.post(PATH, {**body, "truncation": "auto"}).json()
    assert answer["status"] in ("completed", "incomplete")
    context = server.get("/v1/models").json()["data"][0]["max_model_len"]
    turn = server.post(f"{PATH}/input_tokens", {"model": MODEL, "input": filler[:2]}).json()[
        "input_tokens"
    ]
    # No more turns than necessary were dropped.
    assert context - turn - 16 <= answer["usage"]["input_tokens"] <= context - 16


# ---------------------------------------------------------------- without a server


def items(*script: Any) -> list[Any]:
    return read_input(list(script))


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_turn_is_one_message() -> None:
    conversation = items(
        {"role": "developer", "content": "B"},
        user("hi"),
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        CALL,
        {**CALL, "call_id": "d"},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
        {
            "type": "function_call_output",
            "call_id": "d",
            "output": [{"type": "input_text", "text": "2"}],
        },
        {"role": "assistant", "content": "done"},
    )
    function = {"name": "f", "arguments": "{}"}
    assert to_chat_messages("A", conversation) == [
        {"role": "system", "content": "A\n\nB"},
        {"role": "user", "content": "hi"},
        {
            "role": "assistant",
            "reasoning_content": "hm",
            "content": "I look.",
            "tool_calls": [
                {"id": "c", "type": "function", "function": function},
                {"id": "d", "type": "function", "function": function},
            ],
        },
        {"role": "tool", "tool_call_id": "c", "content": "1"},
        {"role": "tool", "tool_call_id": "d", "content": "2"},
        {"role": "assistant", "content": "done"},
    ]


@pytest.mark.parametrize("room", range(1, 9))
async def test_what_is_left_is_whole(room: int) -> None:
    """``room`` is the number of items that fit."""
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    conversation = items(
        {"role": "system", "content": "S"},
        user("1"),
        {"role": "assistant", "content": "a"},
        user("2"),
        CALL,
        output,
        {"role": "assistant", "content": "b"},
        user("3"),
    )

    async def prepare(kept: Any) -> Any:
        if len(kept) - 1 > room:
            raise ContextLengthExceeded("too long", param="messages")
        return kept

    kept = await truncate_to_fit(conversation, prepare, truncate=True)
    assert kept[0] == conversation[0]
    assert kept[1:] == conversation[len(conversation) - len(kept) + 1 :]
    assert kept[1].role == "user"
    assert len(kept) - 1 == {1: 1, 2: 1, 3: 1, 4: 1, 5: 5, 6: 5, 7: 7, 8: 7}[room]
    if room < 7:
        with pytest.raises(ContextLengthExceeded):
            await truncate_to_fit(conversation, prepare, truncate=False)


async def test_a_call_is_never_left_without_its_output() -> None:
    """One question, and more calls than fit."""
    script: list[dict[str, Any]] = [user("go")]
    for i in range(10):
        script += [
            {**CALL, "call_id": str(i)},
            {"type": "function_call_output", "call_id": str(i), "output": "x"},
        ]

    async def prepare(kept: Any) -> Any:
        if len(kept) > 5:
            raise ContextLengthExceeded("too long", param="messages")
        return kept

    kept = await truncate_to_fit(items(*script), prepare, truncate=True)
    assert [type(item) for item in kept] == [CallItem, CallOutputItem] * 2
    assert not isinstance(kept[0], MessageItem)


@pytest.mark.parametrize("text", ["", "plain", "ü\n\0\U0001f600"])
def test_what_is_sealed_comes_back(text: str) -> None:
    assert decode_reasoning(encode_reasoning(text)) == text
    with pytest.raises(ValueError, match="damaged"):
        decode_reasoning(encode_reasoning(text) + "!")
    for foreign in ("", "quire1", "gAAAA"):
        assert decode_reasoning(foreign) is None
