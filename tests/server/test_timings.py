"""``return_timings``: how the time of each choice was spent."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from server.openai.timings import times_until_now, timings_of
from tests.servers import MODEL, Server

IN_ENGINE = ("queue_ms", "prefill_ms", "decode_ms")


def timed(server: Server, *, stream: bool, **fields: Any) -> list[dict[str, Any]]:
    """The timings of a chat's choices, by index."""
    messages = [{"role": "user", "content": "Tell me a story."}]
    body = {"model": MODEL, "messages": messages, "return_timings": True, "max_tokens": 8, **fields}
    if not stream:
        choices = server.post("/v1/chat/completions", body).json()["choices"]
        return [choice["timings"] for choice in choices]
    lines = server.stream("/v1/chat/completions", body).decode().split("\n\n")
    found: dict[int, Any] = {}
    for line in lines:
        if line.startswith("data: {"):
            (choice,) = json.loads(line.removeprefix("data: "))["choices"]
            assert ("timings" in choice) == (choice["finish_reason"] is not None)
            if "timings" in choice:
                found[choice["index"]] = choice["timings"]
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_each_choice_tells_its_times(server: Server, stream: bool) -> None:
    both = timed(server, stream=stream, n=2)
    assert len(both) == 2
    for told in both:
        assert sum(told[name] for name in IN_ENGINE) <= told["total_ms"] + 1
        assert 0 < told["first_token_ms"] <= told["total_ms"]
        assert told["decode_ms"] > 0
        assert (told["num_preemptions"], told["num_draft_tokens"]) == (0, 0)


def test_a_stop_string_leaves_out_only_the_counts(server: Server) -> None:
    before = server.metrics()["request_queue_time_seconds_count"]
    (told,) = timed(server, stream=False, stop=["e"], max_tokens=400)  # otherwise it may have ended
    assert sum(told[name] for name in IN_ENGINE) <= told["total_ms"] + 1
    assert told["prefill_ms"] > 0
    assert told["total_ms"] >= told["first_token_ms"] > 0
    assert told["num_preemptions"] is None
    assert server.metrics()["request_queue_time_seconds_count"] == before + 1


def test_completions_tell_theirs_and_nobody_who_did_not_ask(server: Server) -> None:
    (choice,) = server.complete(return_timings=True, max_tokens=2).json()["choices"]
    assert choice["timings"]["total_ms"] > 0
    (choice,) = server.complete(max_tokens=2).json()["choices"]
    assert "timings" not in choice
    assert "timings" not in server.chat(max_tokens=2).json()["choices"][0]


def test_a_choice_without_a_token_ends_when_it_would_begin() -> None:
    times = times_until_now(time.monotonic() - 0.25, 0.0, 0.0)
    told = timings_of(times, 0.0, is_reported=False)
    assert told.first_token_ms == told.total_ms >= 250.0
    assert told.queue_ms is None
