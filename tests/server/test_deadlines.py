"""Deadlines of requests: a late one ends with a 504 and frees what it held."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest

from server.openai import generation
from tests.server.asgi import running_app
from tests.servers import MODEL, Server, http_post, running_server

ENDLESS = {"max_tokens": 1500, "ignore_eos": True}
LATE = {
    "message": "The request's deadline passed before its end.",
    "type": "timeout_error",
    "param": None,
    "code": "deadline_exceeded",
}


@pytest.mark.parametrize("deadline_ms", [1, 200])
def test_what_is_late_ends_with_a_504(server: Server, deadline_ms: int) -> None:
    for answer in (
        server.complete(**ENDLESS, deadline_ms=deadline_ms),
        server.chat(**ENDLESS, n=3, deadline_ms=deadline_ms),
        server.post(
            "/v1/completions",
            {"model": MODEL, "prompt": ["a", "b"], **ENDLESS, "deadline_ms": 60_000},
            headers={"x-quire-deadline-ms": str(deadline_ms)},
        ),
    ):
        assert answer.status_code == 504
        assert answer.json()["error"] == LATE
    server.wait_idle()


def test_a_stream_that_is_late_says_so(tmp_path: Path) -> None:
    slow = "--load-format", "stub", "--stub-step-ms", "20"  # half a minute in all
    with running_server(tmp_path / "log", *slow) as server:
        body = {"model": MODEL, "prompt": "One", **ENDLESS, "deadline_ms": 1500}
        *chunks, error, done, _ = server.stream("/v1/completions", body).split(b"\n\n")
        assert chunks, "some of it came before"
        assert json.loads(error.removeprefix(b"data: ")) == {"error": LATE}
        assert done == b"data: [DONE]"
        assert server.wait_idle()["request_failed_total{deadline}"] == 1


def test_what_is_in_time_is_not_touched(server: Server) -> None:
    plain = server.complete(max_tokens=4).json()["choices"]
    assert server.complete(max_tokens=4, deadline_ms=60_000).json()["choices"] == plain


def test_a_deadline_is_a_number_of_milliseconds(server: Server) -> None:
    for value in (0, -1, 10**12, 1.5, "100"):
        answer = server.complete(deadline_ms=value)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "deadline_ms")
    for text in ("0", "soon", "1e3", "9" * 30):
        body = {"model": MODEL, "prompt": "x"}
        answer = server.post("/v1/completions", body, headers={"x-quire-deadline-ms": text})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-quire-deadline-ms")


def test_a_default_for_all_and_an_end_for_those_who_wait(tmp_path: Path) -> None:
    flags = ("--load-format", "stub", "--stub-step-ms", "20", "--max-num-seqs", "1")
    with running_server(tmp_path / "log", *flags, "--default-deadline-s", "2") as server:
        assert server.complete(**ENDLESS).status_code == 504
        assert server.complete(max_tokens=1).status_code == 200
        # The request's own deadline applies, though it is later.
        body = {"model": MODEL, "prompt": "One", **ENDLESS, "deadline_ms": 60_000}
        with server.connect() as first:
            first.sendall(http_post("/v1/completions", json.dumps(body).encode()))
            server.wait_for(lambda m: m["num_requests_running"] == 1, "the first to run")
            assert server.complete(max_tokens=1, deadline_ms=100).status_code == 504
            waiting = server.metrics()
            assert (waiting["num_requests_running"], waiting["num_requests_waiting"]) == (1, 0)
        server.wait_idle()


async def test_a_deadline_passes_while_the_model_loads() -> None:
    async with running_app(loaded=False) as app:
        late = await app.post("/v1/completions", prompt="Hi", deadline_ms=30).done()
        assert (late.status, late.error) == (504, LATE)
        assert not app.engine.streams
        app.engine.loaded.set()
        await app.state.model()


async def test_a_deadline_of_speech_passes_while_the_model_loads() -> None:
    async with running_app(loaded=False, default_deadline_s=0.03) as app:
        transport = httpx.ASGITransport(app.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://t") as client:
            form = {"data": {"model": "quire-demo"}, "files": {"file": ("a.wav", b"RIFF")}}
            late = await client.post("/v1/audio/transcriptions", **form)
        assert (late.status_code, late.json()["error"]["code"]) == (504, LATE["code"])
        app.engine.loaded.set()
        await app.state.model()


async def test_an_engine_that_hangs_holds_nobody_beyond_the_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generation, "_DEADLINE_GRACE_S", 0.02)
    async with running_app() as app:
        call = app.post("/v1/completions", prompt="Hi", deadline_ms=30, n=2)
        await app.engine.next_stream()
        await call.done()
        assert (call.status, call.error) == (504, LATE)
        assert all(stream.aborted for stream in app.engine.streams)
        assert app.state.num_live_sequences == 0
