"""Calls constrained by the grammar: required, named, strict, single, after reasoning."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest

from tests.servers import MODEL, Server

ORDER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "dish": {"enum": ["soup", "salad"]},
        "count": {"type": "integer", "minimum": 1, "maximum": 9},
        "notes": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 2},
    },
    "required": ["dish", "count"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"order": ORDER, "get_weather": CITY}


def tools(*, strict: bool = False) -> list[Any]:
    return [
        {"type": "function", "function": {"name": name, "parameters": schema, "strict": strict}}
        for name, schema in SCHEMAS.items()
    ]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, text: str = "Tell me of Sweden.", **fields: Any) -> Any:
    fields = {"temperature": 0, "tools": tools(), "max_tokens": 200, **fields}
    messages: list[Any] = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=MODEL, messages=messages, **fields)


def check_calls(choice: Any) -> list[str]:
    """The names of the functions called; checks that all arguments satisfy their schemas."""
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    for call in choice.message.tool_calls:
        jsonschema.validate(json.loads(call.function.arguments), SCHEMAS[call.function.name])
    return [call.function.name for call in choice.message.tool_calls]


@pytest.mark.parametrize("temperature", [0, 2])
def test_required(client: openai.OpenAI, temperature: float) -> None:
    answer = ask(client, tool_choice="required", temperature=temperature, n=4, seed=5)
    for choice in answer.choices:
        if choice.finish_reason != "length":
            assert check_calls(choice)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("temperature", [0, 2])
def test_named(client: openai.OpenAI, name: str, temperature: float) -> None:
    choice = {"type": "function", "function": {"name": name}}
    answer = ask(client, tool_choice=choice, temperature=temperature, n=3, seed=3)
    for answered in answer.choices:
        assert check_calls(answered) == [name]


@pytest.mark.parametrize("temperature", [0, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_a_function_without_parameters_gets_no_arguments(
    client: openai.OpenAI, strict: bool, temperature: float
) -> None:
    bare = [{"type": "function", "function": {"name": "get_weather", "strict": strict}}]
    choice: Any = "auto" if strict else "required"
    answer = ask(
        client,
        "What is the weather in Rome?",
        tools=bare,
        tool_choice=choice,
        parallel_tool_calls=False,
        temperature=temperature,
        n=4,
        seed=1,
    )
    calls = [call for each in answer.choices for call in each.message.tool_calls or []]
    assert calls
    assert {call.function.arguments for call in calls} == {"{}"}


def test_named_on_a_stream(client: openai.OpenAI) -> None:
    choice = {"type": "function", "function": {"name": "order"}}
    whole = ask(client, tool_choice=choice).choices[0]
    (call,) = whole.message.tool_calls
    arguments, names, reason, num_pieces = "", [], None, 0
    for chunk in ask(client, tool_choice=choice, stream=True):
        reason = chunk.choices[0].finish_reason or reason
        for delta in chunk.choices[0].delta.tool_calls or []:
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments
            num_pieces += 1
    assert (names, arguments) == (["order"], call.function.arguments)
    assert reason == "tool_calls"
    assert num_pieces > 3


@pytest.mark.parametrize("limit", [1, 5, 12, 20])
def test_a_forced_call_that_is_cut_off_is_never_content(
    client: openai.OpenAI, server: Server, limit: int
) -> None:
    answer = ask(client, tool_choice="required", max_tokens=limit).choices[0]
    assert answer.finish_reason == "length"
    assert not answer.message.content
    calls = [call.function for call in answer.message.tool_calls or []]
    names: list[str] = []
    arguments = ""
    for chunk in ask(client, tool_choice="required", max_tokens=limit, stream=True):
        assert not chunk.choices[0].delta.content
        for delta in chunk.choices[0].delta.tool_calls or []:
            names += [delta.function.name] if delta.function.name else []
            arguments += delta.function.arguments
    assert names == [call.name for call in calls]
    assert arguments == "".join(call.arguments for call in calls)

    functions = [{"type": "function", "name": n, "parameters": s} for n, s in SCHEMAS.items()]
    body = {"model": MODEL, "temperature": 0, "input": "Tell me of Sweden.", "tools": functions}
    limits = {"max_output_tokens": limit, "tool_choice": "required"}
    response = server.post("/v1/responses", {**body, **limits}).json()
    assert response["status"] == "incomplete"
    told = [each for each in response["output"] if each["type"] == "function_call"]
    assert len(told) == len(calls)
    messages = [each for each in response["output"] if each["type"] == "message"]
    assert not any(part["text"] for each in messages for part in each["content"])

    given = [{"name": name, "input_schema": schema} for name, schema in SCHEMAS.items()]
    body = {"model": MODEL, "temperature": 0, "max_tokens": limit, "tools": given}
    said = {"messages": [{"role": "user", "content": "Tell me of Sweden."}]}
    message = server.post("/v1/messages", {**body, **said, "tool_choice": {"type": "any"}}).json()
    assert message["stop_reason"] == "max_tokens"
    assert "text" not in {block["type"] for block in message["content"]}


def test_allowed_tools_when_one_is_required(client: openai.OpenAI) -> None:
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "required",
            "tools": [{"type": "function", "function": {"name": "order"}}],
        },
    }
    answer = ask(client, "What is the weather in Rome?", tool_choice=allowed)
    assert set(check_calls(answer.choices[0])) == {"order"}


def test_strict_tools_hold_calls_that_the_model_makes_by_itself(client: openai.OpenAI) -> None:
    answer = ask(client, "What is the weather in Rome?", tools=tools(strict=True))
    assert check_calls(answer.choices[0]) == ["get_weather"]
    said = ask(client, "What is the capital of France?", tools=tools(strict=True)).choices[0]
    assert said.finish_reason == "stop"
    assert "Paris" in said.message.content


def test_one_call_at_a_time(client: openai.OpenAI) -> None:
    text = "What is the weather in Paris and in Rome?"
    assert len(ask(client, text).choices[0].message.tool_calls) == 2
    one = ask(client, text, parallel_tool_calls=False).choices[0]
    assert one.finish_reason == "tool_calls"
    assert len(one.message.tool_calls) == 1


def test_a_required_call_after_reasoning(client: openai.OpenAI) -> None:
    answer = ask(client, tool_choice="required", reasoning_effort="high", max_tokens=300)
    assert check_calls(answer.choices[0])


def test_content_of_a_schema_after_reasoning(server: Server) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    fields = {"response_format": schema, "reasoning_effort": "high", "max_tokens": 300}
    answer = server.chat("What is the capital of France?", **fields).json()
    message = answer["choices"][0]["message"]
    jsonschema.validate(json.loads(message["content"]), CITY)
    reasoned = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert bool(reasoned) == ("reasoning" in message)


def test_a_schema_and_tools(client: openai.OpenAI) -> None:
    """Content has the format; a call is a call."""
    schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": CITY}}
    for text in ("What is the weather in Rome?", "What is the capital of France?"):
        choice = ask(client, text, response_format=schema).choices[0]
        if choice.message.tool_calls:
            assert check_calls(choice)
        else:
            jsonschema.validate(json.loads(choice.message.content), CITY)


def test_a_schema_that_cannot_be_held_is_refused(server: Server) -> None:
    tool = {
        "name": "f",
        "parameters": {"type": "object", "unevaluatedProperties": {"type": "null"}},
    }
    fields = {"tools": [{"type": "function", "function": tool}], "tool_choice": "required"}
    error = server.chat(**fields).json()["error"]
    assert error["param"] == "tools"
    assert "unevaluatedProperties" in error["message"]


class Order(pydantic.BaseModel):
    """The SDK makes a strict tool of it, and parses the arguments into it."""

    dish: Literal["soup", "salad"]
    count: int
    note: Literal["hot", "cold"] | None


def test_the_sdk_parses_arguments_into_models(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model=MODEL,
        messages=[{"role": "user", "content": "I order two soups."}],
        tools=[openai.pydantic_function_tool(Order)],
        tool_choice="required",
        temperature=0,
        max_tokens=200,
    )
    calls = answer.choices[0].message.tool_calls
    assert calls
    assert isinstance(calls[0].function.parsed_arguments, Order)
