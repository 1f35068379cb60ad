"""Anthropic's Messages API on the demo model: raw HTTP, and its own SDK if installed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import msgspec
import pytest

from server.anthropic.blocks import complete_blocks
from server.text.parts import ToolCallArguments, ToolCallBegin
from tests.servers import MODEL, Server

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
WEATHER = {
    "name": "get_weather",
    "description": "Get the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
ASKS_WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]


def send(server: Server, path: str = "/v1/messages", **fields: Any) -> httpx.Response:
    body = {"model": MODEL, "max_tokens": 60, "messages": QUESTION, "temperature": 0, **fields}
    return server.post(path, {name: value for name, value in body.items() if value is not None})


def message(server: Server, **fields: Any) -> dict[str, Any]:
    answer = send(server, **fields)
    assert answer.status_code == 200, answer.text
    return answer.json()


def events(server: Server, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream, whose names equal their types."""
    answer = send(server, stream=True, **fields)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    found = []
    for event in answer.text.rstrip("\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


def assembled(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """The message assembled from a stream's events; checks their order."""
    start, ping, *rest = stream
    assert (start["type"], ping) == ("message_start", {"type": "ping"})
    whole = start["message"]
    assert (whole["content"], whole["stop_reason"]) == ([], None)
    is_open = False
    for event in rest[:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(whole["content"])
                is_open = True
                whole["content"].append(event["content_block"])
                arguments = ""
            case "content_block_delta":
                assert is_open
                assert event["index"] == len(whole["content"]) - 1
                block, delta = whole["content"][-1], event["delta"]
                kinds = ("text_delta", "thinking_delta", "signature_delta", "input_json_delta")
                assert delta["type"] in kinds
                if delta["type"] == "input_json_delta":
                    arguments += delta["partial_json"]
                elif delta["type"] == "signature_delta":
                    block["signature"] += delta["signature"]
                else:
                    block[block["type"]] += delta[block["type"]]
            case "content_block_stop":
                assert is_open
                is_open = False
                if whole["content"][-1]["type"] == "tool_use":
                    whole["content"][-1]["input"] = json.loads(arguments)
            case kind:
                raise AssertionError(kind)
    end, stop = rest[-2:]
    assert (end["type"], stop, is_open) == ("message_delta", {"type": "message_stop"}, False)
    return {**whole, **end["delta"], "usage": end["usage"]}


def without_ids(whole: dict[str, Any]) -> dict[str, Any]:
    """What two answers to the same request share."""
    usage = {key: value for key, value in whole["usage"].items() if "input" not in key}
    content = [{k: v for k, v in block.items() if k != "id"} for block in whole["content"]]
    return {**whole, "id": "", "usage": usage, "content": content}


def test_an_answer_at_once_and_as_a_stream(server: Server) -> None:
    whole = message(server)
    assert whole["id"].startswith("msg_")
    assert (whole["type"], whole["role"], whole["model"]) == ("message", "assistant", MODEL)
    (block,) = whole["content"]
    assert (block["type"], block["text"]) == ("text", "The capital of France is Paris.")
    assert (whole["stop_reason"], whole["stop_sequence"]) == ("end_turn", None)
    chat = server.chat(QUESTION[0]["content"]).json()
    usage, theirs = whole["usage"], chat["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == theirs["prompt_tokens"]
    assert usage["output_tokens"] == theirs["completion_tokens"]
    assert without_ids(assembled(events(server))) == without_ids(whole)


def test_stop_reasons(server: Server) -> None:
    cut = message(server, max_tokens=3)
    assert (cut["stop_reason"], cut["usage"]["output_tokens"]) == ("max_tokens", 3)
    stopped = message(server, stop_sequences=["1", "2", "3", "4", "5", " is"])
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " is")
    assert stopped["content"][0]["text"] == "The capital of France"
    # More than fits is accepted: a client that wants an answer of any length need not count.
    assert message(server, max_tokens=1_000_000)["stop_reason"] == "end_turn"


def test_system_prompts_history_and_a_beginning_of_the_answer(server: Server) -> None:
    blocks = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    history = [
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": "Hello! How can I help?"},
        *QUESTION,
    ]
    for system in ("Be brief.", blocks):
        answer = send(server, system=system, messages=history)
        assert answer.status_code == 200
        assert "x-quire-ignored-params" not in answer.headers
        assert "Paris" in answer.json()["content"][0]["text"]
    begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    assert message(server, messages=begun)["content"][0]["text"].strip() == "Paris."
    neighbours = [{"role": "user", "content": "Hello"}, {"role": "user", "content": "there"}]
    joined = [{"role": "user", "content": "Hello\nthere"}]
    later = [{"role": "system", "content": "Be brief."}, *QUESTION]
    first = message(server, system="Be brief.")
    assert message(server, messages=later)["content"] == first["content"]
    assert (
        message(server, messages=neighbours)["content"]
        == message(server, messages=joined)["content"]
    )


def test_a_tool_is_called_and_its_result_used(server: Server) -> None:
    asked = {"messages": ASKS_WEATHER, "tools": [WEATHER]}
    whole = message(server, **asked)
    assert whole["stop_reason"] == "tool_use"
    call = whole["content"][-1]
    assert call["type"] == "tool_use"
    assert (call["name"], call["input"]) == ("get_weather", {"city": "Paris"})
    assert call["id"].startswith("toolu_")
    assert without_ids(assembled(events(server, **asked))) == without_ids(whole)
    result = {"type": "tool_result", "tool_use_id": call["id"]}
    result |= {"content": [{"type": "text", "text": '{"temperature": 21, "condition": "sunny"}'}]}
    history = [
        *ASKS_WEATHER,
        {"role": "assistant", "content": whole["content"]},
        {"role": "user", "content": [result]},
    ]
    said = message(server, messages=history, tools=[WEATHER])
    assert said["stop_reason"] == "end_turn"
    assert "21" in said["content"][0]["text"]


@pytest.mark.parametrize(
    ("choice", "calls"),
    [
        ({"type": "none"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}, True),
    ],
)
def test_tools_may_be_forbidden_and_forced(
    server: Server, choice: dict[str, Any], calls: bool
) -> None:
    asked = {"messages": QUESTION, "tools": [WEATHER], "tool_choice": choice}
    for whole in (message(server, **asked), assembled(events(server, **asked))):
        kinds = {block["type"] for block in whole["content"]}
        assert kinds == ({"tool_use"} if calls else {"text"})
        assert (whole["stop_reason"] == "tool_use") == calls
        if calls:
            assert isinstance(whole["content"][0]["input"]["city"], str)


def test_thinking_is_there_when_it_is_asked_for(server: Server) -> None:
    asked = {"thinking": {"type": "enabled", "budget_tokens": 1024}, "max_tokens": 200}
    answer = send(server, **asked)
    assert answer.headers["x-quire-ignored-params"] == "thinking.budget_tokens"
    whole = answer.json()
    assert [block["type"] for block in whole["content"]] == ["thinking", "text"]
    assert "France" in whole["content"][0]["thinking"]
    assert whole["content"][0]["signature"]  # clients do not send thinking back without one
    usage = whole["usage"]
    assert 0 < usage["output_tokens_details"]["thinking_tokens"] < usage["output_tokens"]
    assert without_ids(assembled(events(server, **asked))) == without_ids(whole)
    history = [*QUESTION, {"role": "assistant", "content": whole["content"]}, *QUESTION]
    assert message(server, messages=history)["content"][0]["type"] == "text"


def test_thinking_that_only_its_maker_reads_is_left_out(server: Server) -> None:
    """A conversation may have begun elsewhere, whose thinking comes encrypted."""
    sealed, said = {"type": "redacted_thinking", "data": "EmwKAhgB"}, {"type": "text", "text": "Hi"}
    told = []
    for blocks in ([said], [sealed, said]):
        turns = [*QUESTION, {"role": "assistant", "content": blocks}, *QUESTION]
        told.append(send(server, messages=turns, max_tokens=8))
        assert told[-1].status_code == 200, told[-1].text
    plain, sealed_too = (without_ids(answer.json()) for answer in told)
    assert plain["content"] == sealed_too["content"]
    assert "x-quire-ignored-params" not in told[0].headers
    assert told[1].headers["x-quire-ignored-params"] == "messages.1.content.0.data"


def test_a_call_that_was_cut_off_has_what_is_whole_of_its_input(server: Server) -> None:
    """The answer is JSON wherever a limit or a stop sequence cuts it off."""
    asked = {"messages": ASKS_WEATHER, "tools": [WEATHER], "tool_choice": {"type": "any"}}
    told = [message(server, **asked, max_tokens=limit) for limit in range(10, 30)]
    told += [message(server, **asked, stop_sequences=[stop]) for stop in ("aris", '"}')]
    reasons = set()
    for answer in told:
        inputs = [block["input"] for block in answer["content"] if block["type"] == "tool_use"]
        assert inputs in ([], [{}], [{"city": "Paris"}])
        if answer["stop_reason"] == "tool_use":
            assert inputs == [{"city": "Paris"}]
        reasons |= {(answer["stop_reason"], inputs == [{}])}
    assert reasons >= {("max_tokens", True), ("stop_sequence", True), ("tool_use", False)}


def test_inputs_are_whole_where_the_arguments_are() -> None:
    def read(*pieces: str) -> Any:
        parts = [ToolCallBegin(0, "call_1", "f"), *(ToolCallArguments(0, p) for p in pieces)]
        (block,) = complete_blocks(parts)
        return json.loads(msgspec.json.encode(block))["input"]

    half = '{"a": "\\ud800"}'  # half a surrogate pair: valid JSON, but not text
    for text in ('{"a": [1, {"b": "\\u00e9"}], "c": 1e2}', half):
        assert read(*text) == json.loads(text)
        for end in range(len(text)):
            assert isinstance(read(*text[:end]), dict)
    assert read('{"a": [1, {"b": "é"}], "c', '": 1') == {"a": [1, {"b": "é"}], "c": 1}


def test_output_held_to_a_schema(server: Server) -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": form}}, {"output_format": form}):
        text = message(server, **fields)["content"][0]["text"]
        assert isinstance(json.loads(text)["n"], int)


def test_a_form_by_its_older_name_is_judged_by_it(server: Server) -> None:
    body = {"model": MODEL, "max_tokens": 9, "messages": QUESTION}
    form = {"type": "json_schema", "schema": {"type": "array", "uniqueItems": True}}
    other = {"type": "json_schema", "schema": {"type": "integer"}}
    for fields, told in (
        ({"output_format": form}, "uniqueItems"),
        ({"output_format": {"type": "json_schema"}}, "output_format.schema"),
        ({"output_format": form, "output_config": {"format": other}}, "another form"),
    ):
        answer = server.post("/v1/messages", body | fields)
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert message.startswith("'output_format")
        assert told in message


def test_tokens_are_counted_as_they_would_be_taken(server: Server) -> None:
    asked = {"messages": ASKS_WEATHER, "tools": [WEATHER], "system": "Be brief."}
    body = {"model": MODEL, **asked}
    counted = server.post("/v1/messages/count_tokens", body).json()
    usage = message(server, **asked)["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]}


IMAGE = {"type": "image", "source": {"type": "url", "url": "http://169.254.169.254/"}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "named"),
    [
        ({"max_tokens": None}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0}, 400, "invalid_request_error", "max_tokens"),
        ({"model": "claude"}, 404, "not_found_error", "claude"),
        ({"messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "invalid_request_error",
         "messages.0.role"),
        ({"messages": [{"role": "user", "content": [IMAGE]}]}, 400, "invalid_request_error",
         "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, 400,
         "invalid_request_error", "'document'"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "a", "content": [IMAGE]}]}]}, 400,
         "invalid_request_error", "'image'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use"}]}]}, 400,
         "invalid_request_error", "messages.0.content"),
        ({"temperature": 1.5}, 400, "invalid_request_error", "temperature"),
        ({"stop_sequences": [""]}, 400, "invalid_request_error", "stop_sequences.0"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, 400,
         "invalid_request_error", "web_search_20250305"),
        ({"tools": [{**WEATHER, "input_schema": {"type": "stsring"}}]}, 400,
         "invalid_request_error", "tools"),
        ({"tool_choice": {"type": "any"}}, 400, "invalid_request_error", "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "x"}}, 400,
         "invalid_request_error", "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 5}}, 400, "invalid_request_error",
         "thinking.budget_tokens"),
        ({"system": [IMAGE]}, 400, "invalid_request_error", "system"),
        ({"messages": [{"role": "user", "content": "long " * 20_000}]}, 400,
         "invalid_request_error", "prompt is too long: "),
    ],
)  # fmt: skip
def test_errors_have_the_shape_of_this_api(
    server: Server, fields: dict[str, Any], status: int, kind: str, named: str
) -> None:
    for stream in (False, True):
        answer = send(server, stream=stream, **fields)
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)
        assert named in body["error"]["message"]
        ids = {answer.headers["x-request-id"], answer.headers["request-id"]}
        assert ids == {body["request_id"]}


def test_errors_from_before_the_route_too(server: Server, guarded_server: Server) -> None:
    answers = [
        (server.get("/v1/messages"), 405, "invalid_request_error"),
        (server.post("/v1/messages/none", {}), 404, "not_found_error"),
        (httpx.post(f"{server.url}/v1/messages", content=b"{"), 415, "invalid_request_error"),
        (httpx.post(f"{guarded_server.url}/v1/messages", json={}), 401, "authentication_error"),
        (guarded_server.post("/v1/messages", {"x": "x" * 2**20}), 413, "request_too_large"),
    ]
    for answer, status, kind in answers:
        body = answer.json()
        assert (answer.status_code, body["type"], body["error"]["type"]) == (status, "error", kind)


def test_a_key_may_come_as_anthropics_clients_send_it(guarded_server: Server) -> None:
    body = {"model": MODEL, "max_tokens": 2, "messages": QUESTION}
    headers = {"x-api-key": guarded_server.key or "", "anthropic-version": "2023-06-01"}
    url = f"{guarded_server.url}/v1/messages"
    assert httpx.post(url, json=body, headers=headers).status_code == 200
    headers["x-api-key"] += "x"
    assert httpx.post(url, json=body, headers=headers).status_code == 401


# ---------------------------------------------------------------- Anthropic's SDK


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def test_sdk(client: Any) -> None:
    greedy = {"temperature": 0}  # in the body: newer versions have no parameter for it
    asked = {"model": MODEL, "max_tokens": 200, "messages": QUESTION, "extra_body": greedy}
    whole = client.messages.create(**asked)
    with client.messages.stream(**asked) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(model=MODEL, messages=QUESTION)
    assert counted.input_tokens > 5
    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(**{**asked, "thinking": thinking}) as stream:
        thought, said = stream.get_final_message().content
        assert (thought.type, said.type) == ("thinking", "text")
        assert thought.signature


def test_sdk_tools(client: Any) -> None:
    greedy = {"temperature": 0}
    asked = {"model": MODEL, "max_tokens": 200, "tools": [WEATHER], "extra_body": greedy}
    with client.messages.stream(messages=ASKS_WEATHER, **asked) as stream:
        called = stream.get_final_message()
    call = called.content[-1]
    assert (called.stop_reason, call.name, call.input) == (
        "tool_use", "get_weather", {"city": "Paris"}
    )  # fmt: skip
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"temperature": 21}'}
    history = [
        *ASKS_WEATHER,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [result]},
    ]
    assert "21" in client.messages.create(messages=history, **asked).content[0].text


def test_sdk_errors(client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(
            model=MODEL, max_tokens=5, messages=QUESTION, extra_body={"temperature": 7}
        )
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(model="claude", max_tokens=5, messages=QUESTION)
