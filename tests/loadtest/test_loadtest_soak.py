"""The soak test: its random requests, and the differences it must detect."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from loadtest.soak.answers import comparable_answer, first_difference, read_stream
from loadtest.soak.request_generator import RequestGenerator, SoakRequest
from loadtest.soak.run import main

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USAGE = {"prompt_tokens": 5, "completion_tokens": 4, "total_tokens": 9}


def draw(seed: int, count: int = 400) -> list[SoakRequest]:
    drawing = RequestGenerator(seed, ["model", "adapter"], vocab=500, longest=40)
    return [drawing.generate() for _ in range(count)]


def stream(*events: dict[str, Any], ends: bool = True) -> bytes:
    lines = [f"data: {json.dumps(event)}\n\n" for event in events]
    return "".join([": heartbeat\n\n", *lines, "data: [DONE]\n\n" if ends else ""]).encode()


def chunk(index: int, finish_reason: str | None = None, **delta: Any) -> dict[str, Any]:
    piece = {"index": index, "delta": delta, "finish_reason": finish_reason, "logprobs": None}
    return {"id": "chatcmpl-1", "choices": [piece], "usage": None}


def call(index: int, arguments: str, name: str | None = None) -> dict[str, Any]:
    function = {"arguments": arguments} | ({"name": name} if name else {})
    return {"index": index, "function": function}


def test_a_seed_draws_the_same_requests_and_those_are_of_many_kinds() -> None:
    asks = draw(1)
    assert asks == draw(1)
    assert asks != draw(2)
    seen = Counter(name for ask in asks for name in (ask.path, *ask.body))
    for name in ("/v1/embeddings", "/v1/responses", "use_beam_search", "structured_outputs"):
        assert seen[name], name
    assert {"tools", "n", "best_of", "stop", "prompt_logprobs", "echo"} < seen.keys()
    for ask in asks:
        if ask.body.get("temperature", 0) > 0:
            assert "seed" in ask.body, "what has more than one answer cannot be compared"


def test_a_stream_is_folded_into_the_answer_at_once() -> None:
    streamed = stream(
        chunk(0, role="assistant", content=""),
        chunk(1, role="assistant", content=""),
        chunk(1, content="Ro"),
        chunk(0, reasoning="Hm."),
        chunk(0, tool_calls=[call(0, "", "add")]),
        chunk(0, tool_calls=[call(0, '{"a":')]),
        chunk(1, content="me"),
        chunk(0, tool_calls=[call(0, " 1}")]),
        chunk(0, "tool_calls"),
        chunk(1, "stop"),
        {"id": "chatcmpl-1", "choices": [], "usage": USAGE},
    )
    first = {
        "content": None,
        "reasoning": "Hm.",
        "tool_calls": [{"id": "call-1", "function": {"name": "add", "arguments": '{"a": 1}'}}],
    }
    second = {"content": "Rome", "reasoning": None, "tool_calls": None}
    at_once = {
        "id": "chatcmpl-2",
        "choices": [
            {"index": 0, "message": first, "finish_reason": "tool_calls", "logprobs": None},
            {"index": 1, "message": second, "finish_reason": "stop", "logprobs": None},
        ],
        "usage": USAGE,
    }
    wanted, told = (
        comparable_answer(CHAT, at_once),
        comparable_answer(CHAT, read_stream(CHAT, streamed)),
    )
    assert first_difference(wanted, told) is None


@pytest.mark.parametrize(
    "body",
    [
        stream(chunk(0, "stop"), ends=False),
        stream(chunk(0, "stop"), chunk(0, content="more")),
        stream(chunk(0, content="a"), {"error": {"message": "gone"}}),
    ],
)
def test_a_stream_without_a_proper_end_is_a_fault(body: bytes) -> None:
    with pytest.raises(ValueError, match="end"):
        read_stream(CHAT, body)


def test_a_difference_is_found_and_rounding_is_none() -> None:
    def told(text: str, logprob: float, rank: int, tokens: int = 4) -> dict[str, Any]:
        entry = {"7": {"logprob": logprob, "rank": rank}}
        choice = {"index": 0, "text": text, "finish_reason": "stop", "prompt_logprobs": [entry]}
        usage = USAGE | {"completion_tokens": tokens}
        return comparable_answer(COMPLETIONS, {"choices": [choice], "usage": usage})

    wanted = told("Rome", -3.1, 900)
    assert first_difference(wanted, told("Rome", -3.1001, 901)) is None
    for other, where in (
        (told("Oslo", -3.1, 900), ".choices[0].text: 'Oslo' in place of 'Rome'"),
        (told("Rome", -3.2, 900), ".choices[0].prompt_logprobs[0].7.logprob"),
        (told("Rome", -3.1, 990), ".choices[0].prompt_logprobs[0].7.rank"),
        (told("Rome", -3.1, 900, tokens=5), ".usage.completion_tokens: 5 in place of 4"),
        ({"error": 500}, ": ["),
    ):
        assert (first_difference(wanted, other) or "").startswith(where)
    assert first_difference([1, 2], [1]) == " (length): 1 in place of 2"


@pytest.mark.slow
def test_a_small_cache_that_is_shared_changes_no_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ["--num-gpu-blocks-override", "200", "--max-model-len", "1500"]
    status = main(["--requests", "30", "--in-flight", "8", "--longest", "24", "--", *flags])
    told = capsys.readouterr().out
    assert status == 0, told
    assert json.loads(told.splitlines()[-1])["requests"] == 30
