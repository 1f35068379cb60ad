"""Tools, reasoning and structured text through the Responses API, on the demo model."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.servers import MODEL, Server

WEATHER: Any = {
    "type": "function",
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
    "strict": False,
}
QUESTION = "What is the weather in Paris?"
THINK = "What is the capital of France?"


class Place(BaseModel):
    city: str
    country: str


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(client: openai.OpenAI, **fields: Any) -> Any:
    fields = {"input": QUESTION, "tools": [WEATHER], "temperature": 0, **fields}
    return client.responses.create(model=MODEL, **fields)


def test_a_tool_is_called_and_its_result_used(client: openai.OpenAI) -> None:
    first = ask(client)
    (call,) = first.output
    assert (call.type, call.name, call.status) == ("function_call", "get_weather", "completed")
    assert call.id.startswith("fc_")
    assert json.loads(call.arguments) == {"city": "Paris"}
    assert first.tools[0].to_dict() == WEATHER
    result = {
        "type": "function_call_output",
        "call_id": call.call_id,
        "output": json.dumps({"temperature": 21, "condition": "sunny"}),
    }
    by_id = ask(client, input=[result], previous_response_id=first.id)
    whole = [{"role": "user", "content": QUESTION}, call.to_dict(), result]
    by_hand = ask(client, input=whole)
    assert "21" in by_id.output_text
    assert by_id.output_text == by_hand.output_text
    given = client.responses.input_items.list(by_id.id).data
    assert [item.type for item in given] == ["function_call_output"]


def test_a_call_is_streamed(client: openai.OpenAI) -> None:
    (whole,) = ask(client).output
    fields: Any = {"input": QUESTION, "tools": [WEATHER], "temperature": 0}
    with client.responses.stream(model=MODEL, **fields) as stream:
        events = list(stream)
        (call,) = stream.get_final_response().output
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (done,) = (e for e in events if e.type == "response.function_call_arguments.done")
    assert "".join(deltas) == done.arguments == call.arguments == whole.arguments
    assert (done.name, call.name) == ("get_weather", "get_weather")


@pytest.mark.parametrize(
    "choice",
    [
        "none",
        {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
    ],
    ids=["none", "others"],
)
def test_a_tool_that_may_not_be_called_is_not(client: openai.OpenAI, choice: Any) -> None:
    tools = [WEATHER, {**WEATHER, "name": "x"}]
    answer = ask(client, tools=tools, tool_choice=choice)
    assert all(getattr(item, "name", "x") == "x" for item in answer.output)
    assert answer.tool_choice == choice or answer.tool_choice.to_dict() == choice


def test_parsed_text(client: openai.OpenAI) -> None:
    answer = client.responses.parse(model=MODEL, input=THINK, text_format=Place, temperature=0)
    assert isinstance(answer.output_parsed, Place)
    assert answer.text is not None
    assert answer.text.format is not None
    assert answer.text.format.type == "json_schema"
    with client.responses.stream(
        model=MODEL, input=THINK, text_format=Place, temperature=0
    ) as stream:
        final = stream.get_final_response()
    assert final.output_parsed == answer.output_parsed


def test_a_schema_that_cannot_be_held_names_its_field(client: openai.OpenAI) -> None:
    text: Any = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "stsring"}}}
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, tools=[], text=text, stream=stream)
        assert caught.value.param == "text.format"
        assert "response_format" not in caught.value.message


def think(client: openai.OpenAI, **fields: Any) -> Any:
    reasoning = {"effort": "high", **fields.pop("reasoning", {})}
    return ask(client, input=THINK, tools=[], reasoning=reasoning, **fields)


def test_reasoning_is_an_item_of_its_own(client: openai.OpenAI, server: Server) -> None:
    told = server.chat(THINK, reasoning_effort="high").json()["choices"][0]["message"]
    answer = think(client)
    reasoning, message = answer.output
    assert (reasoning.type, message.type) == ("reasoning", "message")
    assert reasoning.content[0].text == told["reasoning"]
    assert reasoning.summary == []
    assert answer.output_text == told["content"]
    assert 0 < answer.usage.output_tokens_details.reasoning_tokens < answer.usage.output_tokens
    kinds = [event.type for event in think(client, stream=True)]
    assert kinds.index("response.reasoning_text.done") < kinds.index("response.output_text.delta")
    assert kinds.count("response.output_item.done") == 2


def test_reasoning_as_a_summary(client: openai.OpenAI) -> None:
    plain = think(client).output[0].content[0].text
    events = list(think(client, reasoning={"summary": "auto"}, stream=True))
    deltas = [e.delta for e in events if e.type == "response.reasoning_summary_text.delta"]
    item = events[-1].response.output[0]
    assert "".join(deltas) == item.summary[0].text == plain
    assert item.content is None


def test_reasoning_comes_back_sealed(client: openai.OpenAI) -> None:
    first = think(client, store=False, include=["reasoning.encrypted_content"])
    reasoning, message = first.output
    assert reasoning.encrypted_content
    question = {"role": "user", "content": THINK}
    again = {"role": "user", "content": "And of Italy?"}
    sealed = {"type": "reasoning", "encrypted_content": reasoning.encrypted_content}
    for item in (sealed, reasoning.to_dict()):
        answer = ask(client, input=[question, item, message.to_dict(), again], tools=[])
        assert "Rome" in answer.output_text
    sealed["encrypted_content"] = "quire1.###"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, input=[question, sealed], tools=[])
    assert caught.value.param == "input.1.encrypted_content"


def test_responses_in_a_batch(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "input": THINK, "temperature": 0}
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/responses", "body": {**body, **fields}}
        for name, fields in (("good", {}), ("bad", {"background": True}))
    ]
    data = "\n".join(map(json.dumps, lines)).encode()
    file = client.files.create(file=("in.jsonl", data), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/responses", completion_window="24h"
    )
    deadline = time.monotonic() + 60
    while batch.status not in ("completed", "failed"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    assert batch.output_file_id
    assert batch.error_file_id
    answer = json.loads(client.files.content(batch.output_file_id).text)["response"]["body"]
    expected = client.responses.create(model=MODEL, input=THINK, temperature=0)
    assert answer["output"][0]["content"][0]["text"] == expected.output_text
    error = json.loads(client.files.content(batch.error_file_id).text)["response"]["body"]["error"]
    assert error["param"] == "background"


def test_logprobs_are_those_of_the_text(client: openai.OpenAI) -> None:
    answer = think(client, top_logprobs=1)
    (part,) = answer.output[1].content
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode().strip() == part.text
