"""``return_progress`` on a real server: chunks that only requests with the field receive."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.servers import MODEL, Server, running_server

LONG = "word " * 700
FIELDS = {"index", "total", "cache", "processed", "time_ms", "queue_position"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("progress") / "log"
    flags = ("--max-num-batched-tokens", "32", "--max-num-seqs", "1")
    with running_server(log, *flags) as server:
        yield server


def chunks(server: Server, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    text = server.stream(path, {"model": MODEL, "max_tokens": 3, **body}).decode()
    events = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    return [json.loads(event) for event in events if not event.startswith(":")]


def check(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The progress, which comes in separate chunks before the text."""
    told = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    for chunk in found[: len(told)]:
        assert chunk["choices"] == []
        assert set(chunk["prompt_progress"]) == FIELDS
    assert all(chunk["choices"] or chunk.get("usage") for chunk in found[len(told) :])
    assert [item["processed"] for item in told] == sorted(item["processed"] for item in told)
    assert told[-1]["processed"] == told[-1]["total"]
    return told


@pytest.mark.parametrize(
    "asked", [{"return_progress": True}, {"stream_options": {"include_progress": True}}]
)
def test_a_chat_tells_how_far_its_prompt_has_come(server: Server, asked: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": f"{len(asked)} {next(iter(asked))} {LONG}"}]
    found = chunks(server, "/v1/chat/completions", {"messages": messages, **asked})
    told = check(found)
    assert len(told) >= 2
    assert told[0]["processed"] < told[0]["total"]
    times = [item["time_ms"] for item in told]
    assert times == sorted(times)
    assert found[len(told)]["choices"][0]["delta"]["role"] == "assistant"
    again = check(chunks(server, "/v1/chat/completions", {"messages": messages, **asked}))
    assert again[0]["cache"] > 0.9 * again[0]["total"]


def test_completions_too_each_prompt_by_its_index(server: Server) -> None:
    body = {"prompt": ["One " + LONG, "Two " + LONG], "return_progress": True}
    options = {"stream_options": {"include_usage": True}}
    found = chunks(server, "/v1/completions", {**body, **options})
    told = [chunk["prompt_progress"] for chunk in found if "prompt_progress" in chunk]
    assert all(chunk["usage"] is None for chunk in found[:-1])
    for index in (0, 1):
        own = [item for item in told if item["index"] == index]
        assert own[-1]["processed"] == own[-1]["total"]
    assert any(item["queue_position"] == 0 for item in told if item["index"] == 1)


def test_who_waits_sees_the_queue(server: Server) -> None:
    body = {"model": MODEL, "prompt": "Before", "max_tokens": 1500, "ignore_eos": True}
    before = threading.Thread(target=server.post, args=("/v1/completions", body))
    before.start()
    server.wait_for(lambda m: m["num_requests_running"] == 1, "a running request")
    told = check(
        chunks(server, "/v1/completions", {"prompt": "Behind " + LONG, "return_progress": True})
    )
    before.join()
    assert told[0]["queue_position"] == 0
    assert (told[0]["processed"], told[0]["time_ms"]) == (0, 0)
    assert told[-1]["queue_position"] is None


def test_nobody_else_is_told(server: Server) -> None:
    messages = [{"role": "user", "content": "Silent " + LONG}]
    for options in ({}, {"stream_options": {"include_progress": False}}):
        found = chunks(server, "/v1/chat/completions", {"messages": messages, **options})
        assert not any("prompt_progress" in chunk for chunk in found)
    whole = server.chat("Hello", return_progress=True, max_tokens=1)
    assert whole.headers["x-quire-ignored-params"] == "return_progress"


def test_the_sdk_reads_such_a_stream(server: Server) -> None:
    client = OpenAI(base_url=server.url + "/v1", api_key="none")
    stream = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Read " + LONG}],
        max_tokens=4,
        stream=True,
        extra_body={"return_progress": True},
    )
    told, text = [], ""
    for chunk in stream:
        if progress := getattr(chunk, "prompt_progress", None):
            told.append(progress["processed"])
        elif chunk.choices:
            text += chunk.choices[0].delta.content or ""
    assert len(told) >= 2
    assert text
