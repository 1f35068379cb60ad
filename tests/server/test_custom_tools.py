"""Custom tools of chats on the demo model: calls whose input is a text, held to its format."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.server.test_tools import WEATHER
from tests.servers import MODEL, Server

QUESTION: Any = {"role": "user", "content": "What is the weather in Paris?"}
RECURSIVE = 'start: "(" start ")" | "x"'
DATE = r'^(?P<year>[0-9]{4})-(0[1-9]|1[0-2])\n"[a-z]{2,8}"$'
CHOICE = {"type": "custom", "custom": {"name": "run"}}


def custom(syntax: str = "", definition: str = "", **fields: Any) -> Any:
    if syntax:
        grammar = {"syntax": syntax, "definition": definition}
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": "custom", "custom": {"name": "run", "description": "Notes a day.", **fields}}


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def ask(client: openai.OpenAI, *tools: Any, **fields: Any) -> Any:
    fields = {"messages": [QUESTION], "temperature": 0, "max_tokens": 80, **fields}
    return client.chat.completions.create(model=MODEL, tools=tools, **fields)


def test_a_call_has_an_input_of_the_format(client: openai.OpenAI) -> None:
    fields: Any = {"tool_choice": CHOICE, "temperature": 1.5, "seed": 1, "n": 3}
    tools = (WEATHER, custom("regex", DATE))
    choices = ask(client, *tools, **fields).choices
    for choice in choices:
        (call,) = choice.message.tool_calls
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
        assert (call.type, call.custom.name, call.id[:5]) == ("custom", "run", "call_")
        assert re.fullmatch(DATE, call.custom.input)
    inputs, heads = ["", "", ""], list[Any]()
    for chunk in ask(client, *tools, **fields, stream=True):
        for choice in chunk.choices:
            for delta in choice.delta.model_dump()["tool_calls"] or []:
                assert delta["function"] is None
                inputs[choice.index] += delta["custom"].pop("input")
                heads += [delta] if delta["custom"] else []
    assert inputs == [choice.message.tool_calls[0].custom.input for choice in choices]
    assert len(heads) == 3
    assert all((head["type"], head["custom"]) == ("custom", {"name": "run"}) for head in heads)


def test_a_grammar_in_larks_notation_is_held(client: openai.OpenAI) -> None:
    grammar = 'start: item ("," item)~1..2\nitem: /[a-z]/~2..6 "\\n"'
    answer = ask(client, custom("lark", grammar), tool_choice="required", temperature=1.5, seed=2)
    (call, *_) = answer.choices[0].message.tool_calls
    assert re.fullmatch(r"[a-z]{2,6}\n(,[a-z]{2,6}\n){1,2}", call.custom.input)


def test_a_call_and_its_result_are_history(client: openai.OpenAI, guarded_server: Server) -> None:
    tools = (WEATHER, custom("regex", DATE))
    message = ask(client, *tools, tool_choice=CHOICE).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "noted"}
    assert ask(client, *tools, messages=[QUESTION, message, result]).choices[0].message.content
    # The model sees what it wrote: a call of the function that stands for the tool.
    called = {"name": "run", "arguments": {"input": message.tool_calls[0].custom.input}}
    same = {"role": "assistant", "tool_calls": [{"type": "function", "function": called}]}
    counts = [
        client.post("/../tokenize", body={"model": MODEL, "messages": [QUESTION, each]},
                    cast_to=dict[str, Any])["tokens"]
        for each in (message.to_dict(), {**same, "content": None})
    ]  # fmt: skip
    assert counts[0] == counts[1]
    body = {"model": MODEL, "messages": [QUESTION, message.model_dump(), result], "max_tokens": 1}
    sent_back = guarded_server.post("/v1/chat/completions", {**body, "tools": list(tools)})
    assert sent_back.status_code == 200, sent_back.text  # by a strict server, too


def test_tools_of_both_kinds_may_be_allowed(client: openai.OpenAI) -> None:
    listed = [CHOICE, {"type": "function", "function": {"name": "get_weather"}}]
    for tools, kind in ((listed[:1], "custom"), (listed[1:], "function"), (listed, "function")):
        allowed: Any = {"mode": "required", "tools": tools}
        choice: Any = {"type": "allowed_tools", "allowed_tools": allowed}
        answer = ask(client, WEATHER, custom("regex", "[a-z]{5}"), tool_choice=choice)
        assert {call.type for call in answer.choices[0].message.tool_calls} == {kind}


def test_a_stored_chat_keeps_calls_tools_and_choice(client: openai.OpenAI) -> None:
    tools = (WEATHER, custom("regex", "[a-z]{5}"))
    answer = ask(client, *tools, tool_choice=CHOICE, store=True)
    history = [QUESTION, answer.choices[0].message, {"role": "tool", "content": "ok"}]
    again = ask(client, *tools, messages=history, store=True, max_tokens=1)
    kept = client.chat.completions.retrieve(answer.id).to_dict()
    assert kept["choices"] == answer.to_dict()["choices"]
    assert kept["tools"][1] == tools[1]
    assert kept["tool_choice"] == CHOICE
    said = list(client.chat.completions.messages.list(again.id))[1].to_dict()
    assert said["tool_calls"] == answer.choices[0].message.to_dict()["tool_calls"]


def test_the_prompt_is_counted_with_them(client: openai.OpenAI, server: Server) -> None:
    tools = [WEATHER, custom("lark", RECURSIVE)]
    body = {"model": MODEL, "messages": [QUESTION], "tools": tools}
    counted = server.post("/tokenize", body).json()["count"]
    assert counted == ask(client, *tools, max_tokens=1).usage.prompt_tokens
    bare = server.post("/tokenize", {**body, "tools": [WEATHER, custom()]}).json()["count"]
    assert counted > bare  # the model is told of the grammar


def test_a_format_that_is_only_told_is_reported(server: Server, guarded_server: Server) -> None:
    tools = [WEATHER, custom("lark", RECURSIVE, mood="good")]
    answer = server.chat(tools=tools, max_tokens=1)
    told = answer.headers["x-quire-ignored-params"]
    assert told == "tools.1.custom.mood,tools.1.custom.format"
    assert "x-quire-ignored-params" not in server.chat(tools=[custom("regex", "a")]).headers
    refused = guarded_server.chat(tools=[custom("lark", RECURSIVE)])
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools.0.custom.format")


def test_responses_send_the_input_as_it_is_written(client: openai.OpenAI) -> None:
    form = {"type": "grammar", "syntax": "regex", "definition": "([a-z]{3} ){6}"}
    tool: Any = {"type": "custom", "name": "run", "format": form}
    stream = client.responses.create(
        model=MODEL,
        input="Hello",
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        temperature=0,
        max_output_tokens=80,
        stream=True,
    )
    deltas, done = list[str](), ""
    for event in stream:
        if event.type == "response.custom_tool_call_input.delta":
            deltas.append(event.delta)
        elif event.type == "response.custom_tool_call_input.done":
            done = event.input
    assert re.fullmatch(form["definition"], done)
    assert "".join(deltas) == done
    assert len(deltas) > 3
