"""Tools on the demo model, which really calls them: the openai SDK against a real server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletionMessageParam, ChatCompletionToolParam

from tests.servers import MODEL, Server

WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
TIME: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "get_time",
        "description": "Get the time in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
QUESTION: list[ChatCompletionMessageParam] = [
    {"role": "user", "content": "What is the weather in Paris?"}
]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"messages": QUESTION, "tools": [WEATHER, TIME], **fields}
    return client.chat.completions.create(model=MODEL, temperature=0, **fields)


def streamed(client: openai.OpenAI, **fields: Any) -> tuple[dict[int, dict[str, str]], str, str]:
    """The calls of a stream by index, its content and its finish reason."""
    calls: dict[int, dict[str, str]] = {}
    content, reason = "", ""
    for chunk in ask(client, stream=True, **fields):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            if call.index not in calls:
                assert call.type == "function"
                assert call.function.arguments == ""
                calls[call.index] = {"name": call.function.name, "id": call.id, "arguments": ""}
            else:
                assert (call.id, call.type, call.function.name) == (None, None, None)
                calls[call.index]["arguments"] += call.function.arguments
    return calls, content, reason


def test_the_model_calls_a_tool_and_uses_its_result(client: openai.OpenAI) -> None:
    answer = ask(client)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert call.id.startswith("call_")
    assert len(call.id) == 29
    result = {"temperature": 21, "condition": "sunny"}
    history = [
        *QUESTION,
        choice.message,
        {"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)},
    ]
    said = ask(client, messages=history).choices[0]
    assert said.finish_reason == "stop"
    assert "21" in said.message.content
    assert "sunny" in said.message.content
    assert said.message.tool_calls is None


def test_a_stream_assembles_to_the_same_calls(client: openai.OpenAI) -> None:
    several: list[ChatCompletionMessageParam] = [
        {"role": "user", "content": "What is the weather in Paris and in Rome?"}
    ]
    for messages in (QUESTION, several):
        whole = ask(client, messages=messages).choices[0].message
        calls, content, reason = streamed(client, messages=messages)
        assert [(call["name"], call["arguments"]) for call in calls.values()] == [
            (call.function.name, call.function.arguments) for call in whole.tool_calls
        ]
        assert list(calls) == list(range(len(whole.tool_calls)))
        assert len({call["id"] for call in calls.values()}) == len(calls)
        assert (content, reason) == ("", "tool_calls")


def test_the_sdk_helper_understands_the_stream(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL, messages=QUESTION, tools=[WEATHER], temperature=0
    ) as stream:
        done = [e for e in stream if e.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [json.loads(event.arguments) for event in done] == [{"city": "Paris"}]
    assert final.choices[0].finish_reason == "tool_calls"


def test_none_shows_no_tools(client: openai.OpenAI) -> None:
    plain = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    none = ask(client, tool_choice="none")
    assert plain.usage is not None
    assert none.usage.prompt_tokens == plain.usage.prompt_tokens
    assert none.choices[0].message.content == plain.choices[0].message.content
    assert none.choices[0].message.tool_calls is None


def test_a_tool_that_may_not_be_called_is_not(client: openai.OpenAI) -> None:
    """The prompt includes all tools, so that its cached prefix is used; a call is text."""
    allowed = {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "get_time"}}],
        },
    }
    answer = ask(client, tool_choice=allowed)
    assert answer.usage.prompt_tokens == ask(client).usage.prompt_tokens
    for call in answer.choices[0].message.tool_calls or []:
        assert call.function.name == "get_time"


def test_functions_as_they_were_before_tools(client: openai.OpenAI) -> None:
    fields: Any = {"tools": openai.omit, "functions": [WEATHER["function"]]}
    choice = ask(client, **fields).choices[0]
    assert choice.finish_reason == "function_call"
    assert choice.message.tool_calls is None
    assert choice.message.function_call.name == "get_weather"
    assert json.loads(choice.message.function_call.arguments) == {"city": "Paris"}
    name, arguments, reason = "", "", ""
    for chunk in ask(client, stream=True, **fields):
        call = chunk.choices[0].delta.function_call
        name += (call and call.name) or ""
        arguments += (call and call.arguments) or ""
        reason = chunk.choices[0].finish_reason or reason
    assert (name, json.loads(arguments)) == ("get_weather", {"city": "Paris"})
    assert reason == "function_call"
    history = [
        *QUESTION,
        choice.message,
        {
            "role": "function",
            "name": "get_weather",
            "content": '{"temperature": 3, "condition": "foggy"}',
        },
    ]
    assert "foggy" in ask(client, messages=history, **fields).choices[0].message.content


def test_tokenize_counts_tools(client: openai.OpenAI, server: Server) -> None:
    body = {"model": MODEL, "messages": QUESTION, "tools": [WEATHER, TIME]}
    assert server.post("/tokenize", body).json()["count"] == ask(client).usage.prompt_tokens


def test_logprobs_come_with_calls(client: openai.OpenAI) -> None:
    whole = ask(client, logprobs=True).choices[0]
    tokens = [
        entry.token
        for chunk in ask(client, logprobs=True, stream=True)
        for entry in (chunk.choices[0].logprobs and chunk.choices[0].logprobs.content) or []
    ]
    assert tokens == [entry.token for entry in whole.logprobs.content]
    assert "<tool_call>" in tokens


@pytest.mark.parametrize("stop", ["aris", "Pa", '"}', "</tool_call>", 'ments": {'])
@pytest.mark.parametrize("tool_choice", ["auto", "required"])
def test_a_stop_string_cuts_a_call_off_where_it_is(
    client: openai.OpenAI, stop: str, tool_choice: str
) -> None:
    """As with a length limit: the partial call and its finish reason are returned."""
    fields = {"stop": stop, "tool_choice": tool_choice}
    choice = ask(client, **fields).choices[0]
    told = choice.message.tool_calls or []
    arguments = [call.function.arguments for call in told]
    calls, content, reason = streamed(client, **fields)
    assert [call["arguments"] for call in calls.values()] == arguments
    assert (content, reason) == (choice.message.content or "", choice.finish_reason)
    assert choice.model_extra["stop_reason"] == stop
    if stop == "</tool_call>":  # after all of it
        assert (reason, json.loads(arguments[0])) == ("tool_calls", {"city": "Paris"})
    elif stop != 'ments": {':  # the start of a call without a name yet is text
        assert reason == "stop"
        assert not content
        assert '{"city": "Paris"}'.startswith(arguments[0])
