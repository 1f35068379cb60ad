"""What clients receive when the engine or the server fails; with a fake engine."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from engine.errors import (
    ContextLengthExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    InvalidParameter,
    ModelLoadError,
    OutOfMemory,
    RequestFailed,
)
from engine.paths import default_model_dir
from engine.types import RequestTimings
from server.access.caller import ANONYMOUS, Caller
from server.errors import ApiError
from tests.server.asgi import running_app

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hi"}]
SECRET = "secret detail in engine/core.py"

FAILURES = [
    (ContextLengthExceeded("too long"), 400, "invalid_request_error", "context_length_exceeded"),
    (InvalidParameter("bad", param="top_k"), 400, "invalid_request_error", None),
    (RequestFailed(SECRET), 500, "server_error", None),
    (OutOfMemory(SECRET), 503, "service_unavailable_error", "server_is_overloaded"),
    (EngineAsleep("asleep"), 503, "service_unavailable_error", "engine_asleep"),
    (EngineDead(SECRET), 503, "service_unavailable_error", "engine_unavailable"),
]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("error", "status", "type", "code"), FAILURES)
async def test_failure_before_the_first_byte(
    error: EngineError, status: int, type: str, code: str | None, stream: bool
) -> None:
    async with running_app() as app:
        call = app.post(CHAT, messages=USER, stream=stream)
        (await app.engine.next_stream()).fail(error)
        await call.done()
        assert call.status == status
        assert (call.error["type"], call.error["code"]) == (type, code)
        assert SECRET.encode() not in call.body
        assert ("retry-after" in call.headers) == (status == 503)
        if isinstance(error, ContextLengthExceeded):
            assert call.error["param"] == "messages"
        if status == 500:
            assert call.headers["x-request-id"] in call.error["message"]
        assert await app.metric("request_failed_total") == 1
        assert app.state.num_live_sequences == 0


async def test_failure_after_the_first_byte_is_an_event() -> None:
    async with running_app() as app:
        call = app.post(COMPLETIONS, prompt="Hi", n=2, stream=True)
        await app.engine.next_stream()
        one, two = app.engine.streams
        one.put(300)
        await call.until(b"data: ")
        two.fail(RequestFailed(SECRET))
        await call.done()
        assert call.status == 200
        *_, error, done, end = call.body.split(b"\n\n")
        assert (done, end) == (b"data: [DONE]", b"")
        told = json.loads(error.removeprefix(b"data: "))["error"]
        assert set(told) == {"message", "type", "param", "code"}
        assert told["type"] == "server_error"
        assert SECRET.encode() not in call.body
        assert one.aborted
        assert await app.metric("request_failed_total") == 2


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("tokens", [0, 1])
async def test_hanging_up_aborts(stream: bool, tokens: int) -> None:
    async with running_app() as app:
        call = app.post(COMPLETIONS, prompt="Hi", n=2, stream=stream)
        await app.engine.next_stream()
        for fake in app.engine.streams:
            for _ in range(tokens):
                fake.put(300)
        if stream and tokens:
            await call.until(b"data: ")
        call.hang_up()
        await call.done()
        assert all(fake.aborted for fake in app.engine.streams)
        assert app.state.num_live_sequences == app.state.requests_in_flight == 0
        assert await app.metric("request_aborted_total") == 2
        assert await app.metric("request_success_total") == 0


async def test_hanging_up_before_the_model_is_loaded() -> None:
    async with running_app(loaded=False) as app:
        calls = [app.post(CHAT, messages=USER, stream=stream) for stream in (True, False)]
        for call in calls:
            call.hang_up()
            await call.done()
            assert call.status == 0
        assert app.state.requests_in_flight == 0
        assert not app.engine.streams


async def test_requests_wait_for_the_model() -> None:
    async with running_app(loaded=False, heartbeat_s=0.01) as app:
        assert (await app.get("/health")).status == 200
        assert (await app.get("/ready")).status == 503
        call = app.post(COMPLETIONS, prompt="Hi", stream=True)
        await call.until(b": keep-alive\n\n")
        app.engine.loaded.set()
        (await app.engine.next_stream()).put(300, end="length")
        await call.done()
        assert call.body.endswith(b"data: [DONE]\n\n")
        assert (await app.get("/ready")).status == 200


async def test_a_model_that_cannot_be_loaded() -> None:
    async with running_app(loaded=False) as app:
        waiting = app.post(CHAT, messages=USER)
        app.engine.start_error = ModelLoadError(SECRET)
        app.engine.loaded.set()
        await waiting.done()
        assert (waiting.status, waiting.error["code"]) == (503, "engine_unavailable")
        for path in ("/health", "/ready"):
            assert (await app.get(path)).status == 503
        assert isinstance(app.state.failure, ModelLoadError)


async def test_an_engine_that_is_stopped_is_not_ready() -> None:
    async with running_app() as app:
        app.engine.responsive = False
        assert [(await app.get(path)).status for path in ("/health", "/ready")] == [200, 503]
        app.engine.responsive = True
        assert (await app.get("/ready")).status == 200


async def test_an_engine_between_two_lives_and_after_the_last() -> None:
    async with running_app() as app:
        app.engine.alive = False
        assert [(await app.get(path)).status for path in ("/health", "/ready")] == [200, 503]
        refused = await app.post(CHAT, messages=USER).done()
        assert (refused.status, refused.error["code"]) == (503, "engine_unavailable")
        assert app.state.num_live_sequences == 0
        app.engine.dead = True
        assert [(await app.get(path)).status for path in ("/health", "/ready")] == [503, 503]


async def test_draining() -> None:
    async with running_app() as app:
        running = app.post(COMPLETIONS, prompt="Hi")
        stream = await app.engine.next_stream()
        app.state.draining = True
        assert [(await app.get(path)).status for path in ("/health", "/ready")] == [200, 503]
        assert (await app.post(COMPLETIONS, prompt="Hi").done()).status == 503
        assert app.state.requests_in_flight == 1
        stream.put(300, end="length")
        assert (await running.done()).status == 200
        assert app.state.requests_in_flight == 0


async def test_a_cancelled_stream_says_so() -> None:
    """The server shuts down without waiting: an error event, never a clean [DONE] alone."""
    async with running_app() as app:
        call = app.post(COMPLETIONS, prompt="Hi", stream=True)
        (await app.engine.next_stream()).put(300)
        await call.until(b"data: ")
        call.task.cancel()
        await call.done()
        assert b'data: {"error":' in call.body
        assert call.body.endswith(b"data: [DONE]\n\n")
        waiting = app.post(COMPLETIONS, prompt="Hi")
        await app.engine.next_stream()
        waiting.task.cancel()
        await waiting.done()
        assert waiting.status == 503


async def test_our_own_fault_is_a_500_with_an_id(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_app() as app:

        def broken(*args: object) -> list[object]:
            raise RuntimeError(SECRET)

        monkeypatch.setattr(app.engine, "submit", broken)
        call = await app.post(CHAT, messages=USER).done()
        assert (call.status, call.error["type"], call.error["code"]) == (500, "server_error", None)
        assert call.headers["x-request-id"] in call.error["message"]
        assert SECRET.encode() not in call.body
        assert app.state.num_live_sequences == 0


async def test_the_queue_limit_is_exact() -> None:
    async with running_app(max_num_seqs=2, max_queued_requests=3) as app:
        calls = [app.post(COMPLETIONS, prompt="Hi") for _ in range(25)]
        refused = calls[5:]
        await asyncio.gather(*(call.done() for call in refused))
        assert {call.status for call in refused} == {503}
        assert len(app.engine.streams) == 5
        assert await app.metric("admission_rejections_total") == 20
        two = await app.post(COMPLETIONS, prompt="Hi", n=2).done()
        assert two.status == 503
        for stream in app.engine.streams:
            stream.put(300, end="length")
        await asyncio.gather(*(call.done() for call in calls))
        assert {call.status for call in calls[:5]} == {200}
        assert app.state.num_live_sequences == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 6}, "n"),
        ({"prompt": ["Hi", "Ho"], "n": 3}, "n"),
        ({"prompt": ["Hi"] * 6}, "prompt"),
        ({"best_of": 6}, "best_of"),
        ({"use_beam_search": True, "beam_width": 6}, "beam_width"),
        ({"use_beam_search": True, "n": 6}, "n"),
    ],
)
async def test_more_sequences_than_the_queue_holds_are_refused_for_good(
    fields: dict[str, Any], param: str
) -> None:
    async with running_app(max_num_seqs=2, max_queued_requests=3) as app:
        answer = await app.post(COMPLETIONS, **{"prompt": "Hi", **fields}).done()
        assert (answer.status, answer.error["param"]) == (400, param)
        assert answer.error["message"] == (
            f"'{param}' makes this request one of 6 sequences, and the server's limit of running "
            "and waiting sequences is 5"
        )
        assert await app.metric("admission_rejections_total") == 0


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": "Hi"}),
        (CHAT, {"messages": USER}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": USER, "max_tokens": 1}),
        ("/v1/embeddings", {"input": "Hi"}),
        ("/v1/rerank", {"query": "Hi", "documents": ["Hi"]}),
        ("/v1/score", {"text_1": "Hi", "text_2": "Hi"}),
    ],
)
async def test_a_full_queue_is_seen_before_anything_else(path: str, fields: dict[str, Any]) -> None:
    """Of what is turned away nothing has been rendered or tokenised."""
    async with running_app(max_num_seqs=2, max_queued_requests=3) as app:
        assert app.state.admission.try_admit(5, ANONYMOUS)
        answer = await app.post(path, **fields, model="nobody").done()
        assert answer.status == 503
        assert await app.metric("admission_rejections_total") == 1
        app.state.release(5, ANONYMOUS)
        assert (await app.post(path, **fields, model="nobody").done()).status == 404


async def test_a_tenant_that_is_turned_away_by_a_sleeping_server_is_counted() -> None:
    async with running_app() as app:
        app.engine.activity = "asleep"
        with pytest.raises(ApiError, match="asleep"):
            app.state.check_capacity(Caller("anna"))
        with pytest.raises(ApiError, match="asleep"):
            app.state.admit(1, Caller("anna"))
        assert await app.metric("admission_rejections_total") == 2
        assert await app.metric("tenant_rejections_total") == 2


async def test_timings_become_histograms() -> None:
    async with running_app() as app:
        call = app.post(COMPLETIONS, prompt="Hi")
        stream = await app.engine.next_stream()
        timings = RequestTimings(
            arrival_s=10.0, scheduled_s=10.5, first_token_s=11.5, finished_s=13.5
        )
        stream.put(300, 301, 302, end="length", timings=timings)
        await call.done()
        for name, value in (
            ("request_queue_time_seconds", 0.5),
            ("request_prefill_time_seconds", 1.0),
            ("request_decode_time_seconds", 2.0),
            ("request_inference_time_seconds", 3.0),
            ("request_time_per_output_token_seconds", 1.0),
        ):
            assert await app.metric(f"{name}_sum") == value
            assert await app.metric(f"{name}_count") == 1


async def test_a_lagging_client_gets_merged_steps() -> None:
    """Output that accumulated while the transport was full is written as one event."""
    async with running_app() as app:
        call = app.post(COMPLETIONS, prompt="Hi", stream=True)
        stream = await app.engine.next_stream()
        stream.put(300, 301, 302, 303, end="length")  # four steps, merged by the stream
        await call.done()
        assert call.body.count(b'"choices":[{') == 1


async def test_a_models_own_template_that_cannot_be_used_is_told_at_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copy(Path(default_model_dir(), "tokenizer.json"), tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}\n{% for m in messages %}")
    problem = "the chat template failed: Unexpected end of template"
    async with running_app(model=str(tmp_path), served_model_names=["quire-demo"]) as app:
        call = await app.post(CHAT, messages=USER).done()
        assert any(
            record.levelname == "WARNING" and problem in record.getMessage()
            for record in caplog.records
        )
        assert call.error["code"] == "template_error"
        assert call.error["message"].startswith(problem)
        assert call.error["message"].endswith("(line 2)")
        call = app.post(COMPLETIONS, prompt="Hi")
        (await app.engine.next_stream()).put(300, end="length")
        assert (await call.done()).status == 200


@pytest.mark.parametrize(
    "source",
    ["{% for i in range(10**12) %}{% endfor %}", "{{ messages.__class__.__mro__ }}"],
    ids=["68 loops", "69 dunder"],
)
async def test_a_template_that_misbehaves(tmp_path: Path, source: str) -> None:
    path = tmp_path / "template.jinja"
    path.write_text(source)
    async with running_app(chat_template=path) as app:
        for stream in (False, True):
            call = await app.post(CHAT, messages=USER, stream=stream).done()
            assert call.status == 400
            assert (call.error["param"], call.error["code"]) == ("messages", "template_error")
        assert app.state.requests_in_flight == app.state.num_live_sequences == 0
        # Completions need no template, and continue to work.
        call = app.post(COMPLETIONS, prompt="Hi")
        (await app.engine.next_stream()).put(300, end="length")
        assert (await call.done()).status == 200
