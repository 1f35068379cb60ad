"""For any kind of answer, the events add up to the response, in the documented order."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.errors import ApiError
from server.openai.outputs import (
    CompletionTokensDetails,
    FinishReason,
    PromptTokensDetails,
    TokenLogprob,
    Usage,
)
from server.openai.responses.builder import ResponseBuilder
from server.openai.responses.events import Numbering, to_sse
from server.openai.responses.input_items import read_input
from server.openai.responses.outputs import ReasoningConfig, Response
from server.openai.responses.tools import read_tools
from server.text.parts import Part, Reasoning, Text, ToolCallArguments, ToolCallBegin

USAGE = Usage(3, 4, 7, PromptTokensDetails(1), CompletionTokensDetails(2))
TOOLS = read_tools([{"type": "function", "name": "f"}, {"type": "custom", "name": "c"}]).offered


def blank() -> Response:
    return Response(
        id="resp_1",
        created_at=1,
        status="in_progress",
        background=False,
        instructions=None,
        max_output_tokens=None,
        max_tool_calls=None,
        model="m",
        parallel_tool_calls=True,
        previous_response_id=None,
        prompt_cache_key=None,
        reasoning=ReasoningConfig(),
        safety_identifier=None,
        store=True,
        temperature=1.0,
        text={"format": {"type": "text"}},
        tool_choice="auto",
        tools=[],
        top_logprobs=0,
        top_p=1.0,
        truncation="disabled",
        user=None,
        metadata={},
    )


class Client:
    """A client that assembles a stream using only the guarantees of its events."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self.text = ""  # text of the open item, from its deltas
        self.response: dict[str, Any] = {}
        self.kinds: list[str] = []
        self.open = False

    def read(self, data: bytes) -> None:
        name, payload = data.removesuffix(b"\n\n").split(b"\n")
        event = msgspec.json.decode(payload.removeprefix(b"data: "))
        kind = event["type"]
        assert name == b"event: " + kind.encode()
        assert event["sequence_number"] == len(self.kinds)
        self.kinds.append(kind)
        getattr(self, "_" + kind.split(".", 1)[1].replace(".", "_"), self._piece)(event)

    def _lifecycle(self, event: dict[str, Any]) -> None:
        self.response = event["response"]

    _created = _queued = _in_progress = _completed = _incomplete = _failed = _lifecycle

    def _output_item_added(self, event: dict[str, Any]) -> None:
        assert not self.open
        assert event["output_index"] == len(self.items)
        assert event["item"]["status"] == "in_progress"
        self.open, self.text = True, ""
        self.items.append(event["item"])

    def _output_item_done(self, event: dict[str, Any]) -> None:
        assert self.open
        assert event["item"]["id"] == self.items[-1]["id"]
        self.open = False
        self.items[-1] = event["item"]

    def _piece(self, event: dict[str, Any]) -> None:
        """Handle the events between the start and the end of an item."""
        assert self.open
        assert event["item_id"] == self.items[-1]["id"]
        assert event["output_index"] == len(self.items) - 1
        if "delta" in event:
            self.text += event["delta"]
        whole = event.get("part", {}).get("text") or event.get("text") or event.get("arguments")
        whole = whole or event.get("input")
        if whole is not None:
            assert whole == self.text


texts = st.text(min_size=1, max_size=8)
runs = st.lists(
    st.one_of(
        st.tuples(st.just("text"), st.lists(texts, min_size=1, max_size=3)),
        st.tuples(st.just("reasoning"), st.lists(texts, min_size=1, max_size=3)),
        st.tuples(st.just("call"), st.lists(texts, min_size=1, max_size=3)),
        st.tuples(st.just("custom"), st.lists(texts, min_size=1, max_size=3)),
    ),
    max_size=6,
)


def parts_of(script: list[tuple[str, list[str]]]) -> list[Part]:
    parts: list[Part] = []
    num_calls = 0
    for kind, pieces in script:
        if kind == "text":
            parts += map(Text, pieces)
        elif kind == "reasoning":
            parts += map(Reasoning, pieces)
        else:
            name = "f" if kind == "call" else "c"
            parts.append(ToolCallBegin(num_calls, f"call_{num_calls}", name))
            parts += [ToolCallArguments(num_calls, piece) for piece in pieces]
            num_calls += 1
    return parts


@given(
    runs,
    st.sampled_from(["stop", "length", "failed", "cancelled"]),
    st.booleans(),
    st.booleans(),
    st.data(),
)
def test_events_add_up(script, ending, summaries, in_background, data) -> None:
    assembly = ResponseBuilder(
        blank(),
        Numbering(),
        lambda: 5.0,
        TOOLS,
        reasoning_as_summary=summaries,
        include_encrypted=summaries,
    )
    client = Client()
    events = [*(assembly.queued() if in_background else []), *assembly.begin()]
    parts = parts_of(script)
    while parts:
        count = data.draw(st.integers(1, len(parts)))
        events += assembly.push(parts[:count], [])
        parts = parts[count:]
    if ending == "failed":
        events += assembly.fail(ApiError(503, "gone"))
    elif ending == "cancelled":
        events += assembly.cancel()
    else:
        events += assembly.end(ending, USAGE)
        events += assembly.finish()
    for event in events:
        client.read(to_sse(event))
    start = ["response.created", *(["response.queued"] if in_background else [])]
    assert client.kinds[: len(start) + 1] == [*start, "response.in_progress"]
    assert client.response == msgspec.json.decode(msgspec.json.encode(assembly.response))
    if ending in ("stop", "length"):
        assert not client.open
        assert client.items == client.response["output"]
        expected = "response.completed" if ending == "stop" else "response.incomplete"
        assert client.kinds[-1] == expected
        # Output items are valid as input.
        assert len(read_input(client.items)) == len(client.items)
    joined = "".join(part.text for part in parts_of(script) if not isinstance(part, ToolCallBegin))
    if ending != "cancelled":
        assert "".join(map(whole_text, client.response["output"])) == joined


words = st.lists(st.text("abc é", min_size=1, max_size=3), min_size=1, max_size=4)
kinds = st.sampled_from(["text", "reasoning", "call"])


@given(st.lists(st.tuples(kinds, words), max_size=5), st.data())
def test_a_message_has_the_log_probabilities_of_its_tokens(script, data) -> None:
    """For any number of tokens per step, of any parts; markers stand between parts."""
    tokens = []
    for kind, of_a_kind in groupby(script, key=lambda part: part[0]):
        for index, (_, pieces) in enumerate(of_a_kind):
            if not index or kind == "call":
                tokens.append(("mark", f"<{kind}>"))
            tokens += [(kind, piece) for piece in pieces]
    assembly, num_calls = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS), 0
    while tokens:
        count = data.draw(st.integers(1, len(tokens)))
        parts: list[Part] = []
        for kind, group in groupby(tokens[:count], key=lambda token: token[0]):
            joined = "".join(piece for _, piece in group)
            if kind == "text":
                parts.append(Text(joined))
            elif kind == "reasoning":
                parts.append(Reasoning(joined))
            elif kind == "call":
                parts.append(ToolCallArguments(num_calls - 1, joined))
            elif joined == "<call>":
                parts.append(ToolCallBegin(num_calls, f"call_{num_calls}", "f"))
                num_calls += 1
        told = [TokenLogprob(piece, -1.0, list(piece.encode()), []) for _, piece in tokens[:count]]
        assembly.push(parts, told)
        tokens = tokens[count:]
    assembly.end("stop", USAGE)
    for item in assembly.response.output:
        told = msgspec.to_builtins(item)
        for part in told["content"] if told["type"] == "message" else ():
            heard = b"".join(bytes(each["bytes"]) for each in part["logprobs"])
            assert heard.decode() == part["text"]


@pytest.mark.parametrize("behind", ["reasoning", "call"])
def test_a_token_that_is_held_back_keeps_its_logprob(behind: str) -> None:
    """A "<" may begin a call; here it came in one step with the end of what was before it."""
    assembly = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    if behind == "reasoning":
        steps = [
            ([Reasoning("Hm.")], ["<think>", "Hm", ".", "</think>", "\n", "<"]),
            ([Text("<b>")], ["b", ">"]),
        ]
    else:
        steps = [
            ([ToolCallBegin(0, "call_0", "f")], ["<call>", "f"]),
            ([ToolCallArguments(0, '{"a": 1}')], ['{"', "a", '": ', "1", "}}", "</call>", "<"]),
            ([Text("<b>")], ["b", ">"]),
        ]
    assembly.begin()
    for parts, tokens in steps:
        told = [TokenLogprob(token, -1.0, list(token.encode()), []) for token in tokens]
        assembly.push(parts, told)
    assembly.end("stop", USAGE)
    last = msgspec.to_builtins(assembly.response.output[-1])
    assert [each["token"] for each in last["content"][0]["logprobs"]] == ["<", "b", ">"]


def test_marks_before_a_text_with_broken_characters_are_not_part_of_it() -> None:
    assembly = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    tokens = [b"<think>", b"Hm", b"</think>", b"so", b"\xf0", b"!"]
    told = [TokenLogprob(each.decode(errors="replace"), -1.0, [*each], []) for each in tokens]
    assembly.begin()
    assembly.push([Reasoning("Hm"), Text("so\ufffd!")], told)
    assembly.end("stop", USAGE)
    message = msgspec.to_builtins(assembly.response.output[-1])
    heard = [each["token"] for each in message["content"][0]["logprobs"]]
    assert heard == ["so", "\ufffd", "!"]


def whole_text(item: dict[str, Any]) -> str:
    if item["type"] in ("function_call", "custom_tool_call"):
        return item["arguments"] if "arguments" in item else item["input"]
    parts = item["content"] if item["type"] == "message" else item["content"] or item["summary"]
    return "".join(part["text"] for part in parts)


def test_the_order_of_a_message() -> None:
    assembly = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    events = [*assembly.begin(), *assembly.push([Text("a"), Text("b")], [])]
    events += [*assembly.end("stop", USAGE), *assembly.finish()]
    assert [event.__struct_config__.tag for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


@pytest.mark.parametrize(
    ("reason", "status"),
    [("tool_calls", "completed"), ("length", "incomplete"), ("stop", "incomplete")],
)
def test_the_order_of_a_call(reason: FinishReason, status: str) -> None:
    """A call that a stop string cuts off is reported as incomplete, as with a length limit."""
    assembly = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    call = [ToolCallBegin(0, "call_1", "f"), ToolCallArguments(0, "{}")]
    events = [*assembly.push(call, []), *assembly.end(reason, USAGE)]
    assert [event.__struct_config__.tag for event in events] == [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    (item,) = assembly.response.output
    assert (item.call_id, item.name, item.arguments) == ("call_1", "f", "{}")
    assert item.status == status


def test_the_input_of_a_custom_call_arrives_in_pieces() -> None:
    assembly = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    parts = [ToolCallBegin(0, "call_1", "c", True), ToolCallArguments(0, "a\n", True)]
    events = assembly.push(parts, [])
    events += assembly.push([ToolCallArguments(0, '"b"', True)], [])
    events += assembly.end("tool_calls", USAGE)
    assert [event.__struct_config__.tag for event in events] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    (item,) = assembly.response.output
    assert (item.call_id, item.name, item.input) == ("call_1", "c", 'a\n"b"')
    cut = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    cut.push(parts, [])
    cut.end("length", USAGE)
    assert (cut.response.output[0].input, cut.response.output[0].status) == ("a\n", "incomplete")


@pytest.mark.parametrize(
    ("status", "code"),
    [(503, "server_error"), (429, "rate_limit_exceeded"), (400, "invalid_prompt")],
)
def test_a_failure_has_one_of_the_codes_of_the_specification(status: int, code: str) -> None:
    assembly = ResponseBuilder(blank(), Numbering(), lambda: 5.0, TOOLS)
    (event,) = assembly.fail(ApiError(status, "reason"))
    assert event.response.error is not None
    assert (event.response.error.code, event.response.error.message) == (code, "reason")
