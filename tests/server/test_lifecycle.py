"""Requests from arrival to end: many at once, disconnects, matching counters, clean shutdowns."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.test_streams import events_of
from tests.servers import MODEL, ROOT, Server, http_post, read_answer, running_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONG = {"model": MODEL, "prompt": "Go on", "max_tokens": 1500, "ignore_eos": True}


def prompts(count: int) -> list[dict[str, Any]]:
    """Requests that differ in prompt, length and sampling."""
    bodies: list[dict[str, Any]] = []
    for index in range(count):
        body = {"model": MODEL, "prompt": f"Item {index} of the list is" + " a" * (index % 7)}
        body |= {"max_tokens": 4 + index % 9, "ignore_eos": True}
        body |= {"temperature": 0} if index % 2 else {"temperature": 0.9, "seed": index}
        bodies.append(body)
    return bodies


def memory_of(server: Server) -> int:
    """The resident bytes of all of the server's processes."""
    parent = psutil.Process(server.process.pid)
    return sum(p.memory_info().rss for p in [parent, *parent.children(recursive=True)])


def finished(metrics: dict[str, float]) -> float:
    names = ("request_success_total", "request_aborted_total", "request_failed_total")
    return sum(metrics.get(name, 0.0) for name in names)


async def test_64_concurrent_streams_equal_their_solo_runs(server: Server) -> None:
    bodies = prompts(64)
    before = server.wait_idle()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def run(body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
            answer = await client.post(COMPLETIONS, json={**body, **options})
            *chunks, last = events_of(answer.content)
            return "".join(c["choices"][0]["text"] for c in chunks), last["usage"]

        rounds = [await asyncio.gather(*map(run, bodies))]
        memory = memory_of(server)
        rounds += [await asyncio.gather(*map(run, bodies)) for _ in range(2)]
    assert memory_of(server) - memory < 8 * 2**20  # flat: the first round has warmed everything up
    between = server.wait_idle()
    alone = [server.post(COMPLETIONS, body).json() for body in bodies]
    after = server.wait_idle()

    for together in rounds:
        assert [text for text, _ in together] == [a["choices"][0]["text"] for a in alone]
    assert after["kv_blocks_free"] == before["kv_blocks_free"]

    # The counters agree with what clients received.
    def gained(name: str) -> float:
        return between.get(name, 0.0) - before.get(name, 0.0)

    told = [usage for together in rounds for _, usage in together]
    assert gained("generation_tokens_total") == sum(u["completion_tokens"] for u in told)
    assert gained("prompt_tokens_total") == sum(u["prompt_tokens"] for u in told)
    cached = sum(u["prompt_tokens_details"]["cached_tokens"] for u in told)
    assert gained("prompt_tokens_cached_total") == cached
    assert gained("request_success_total{length}") == len(told)
    assert gained("http_requests_total{POST,/v1/completions,200}") == len(told)
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds"):
        assert gained(f"{name}_count") == len(told)
    tokens_after_first = sum(u["completion_tokens"] - 1 for u in told)
    assert gained("inter_token_latency_seconds_count") == tokens_after_first
    assert gained("request_generation_tokens_sum") == sum(u["completion_tokens"] for u in told)
    assert gained("request_aborted_total") == gained("request_failed_total") == 0


def reset(sock: socket.socket) -> None:
    """Close with RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


@pytest.mark.parametrize("close", [socket.socket.close, reset], ids=["FIN", "RST"])
@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_leaves_frees_its_blocks(
    server: Server, close: Any, stream: bool, n: int
) -> None:
    before = server.wait_idle()
    body = {**LONG, "stream": stream, "n": n}
    sock = server.connect()
    sock.sendall(http_post(COMPLETIONS, json.dumps(body).encode()))
    server.wait_for(lambda m: m["num_requests_running"] == n, "the request running")
    close(sock)
    after = server.wait_idle()
    assert after["kv_blocks_free"] == before["kv_blocks_free"]
    key = "request_aborted_total{decoding}"
    aborted = after["request_aborted_total"] - before.get("request_aborted_total", 0.0)
    assert aborted == n
    assert after.get(key, 0) >= before.get(key, 0)
    # Long before its natural end.
    assert after["generation_tokens_total"] - before["generation_tokens_total"] < 1500 * n


@pytest.mark.parametrize("sent", ["nothing", "headers", "body", "all"])
def test_leaving_at_any_stage_of_the_request(server: Server, sent: str) -> None:
    before = server.wait_idle()
    data = http_post(COMPLETIONS, json.dumps({**LONG, "stream": True}).encode())
    cut = {"nothing": 0, "headers": 40, "body": len(data) - 9, "all": len(data)}[sent]
    for _ in range(10):
        sock = server.connect()
        sock.sendall(data[:cut])
        sock.close()
    after = server.wait_for(
        lambda m: (
            m["num_requests_running"] == m["num_requests_waiting"] == m["kv_blocks_held"] == 0
            and finished(m) == finished(before) + after_count(m, before)
        ),
        "an idle engine",
    )
    assert after["kv_blocks_free"] == before["kv_blocks_free"]
    assert server.chat(max_tokens=1).status_code == 200


def after_count(metrics: dict[str, float], before: dict[str, float]) -> float:
    """The sequences accepted since ``before``, each of which has to end."""
    name = "request_prompt_tokens_count"
    return metrics[name] - before[name]


def test_a_reader_that_stops_holds_nobody_up(server: Server) -> None:
    """A client that reads nothing: the others continue, and little is buffered for it."""
    body = {**LONG, "stream": True, "logprobs": 20, "max_tokens": 600}
    with server.connect() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.sendall(http_post(COMPLETIONS, json.dumps(body).encode()))
        server.wait_for(lambda m: m["num_requests_running"] == 1, "the stream")
        assert server.chat(max_tokens=4).status_code == 200
    server.wait_idle()


def test_pipelined_and_kept_alive(server: Server) -> None:
    data = http_post(COMPLETIONS, json.dumps({**LONG, "max_tokens": 2}).encode())
    with server.connect() as sock:
        sock.sendall(data + data)
        first = read_answer(sock)
        assert first.status == 200
        assert read_answer(sock, first.rest).status == 200


def test_garbage_after_a_request_does_not_cost_its_answer(server: Server) -> None:
    data = http_post(COMPLETIONS, json.dumps({**LONG, "max_tokens": 2}).encode())
    with server.connect() as sock:
        sock.sendall(data + b"GARBAGE\r\n\r\n")
        answer = read_answer(sock)
        assert (answer.status, answer.headers["connection"]) == (200, "close")
        assert sock.recv(1) == b""


@pytest.mark.parametrize("name", ["Upgrade", "UPGRADE"])
def test_an_offer_to_upgrade_is_ignored(server: Server, name: str) -> None:
    """Java's HTTP client offers h2c; its request is answered like any other."""
    offer = ("Connection: Upgrade, HTTP2-Settings", f"{name}: h2c", "HTTP2-Settings: AAMAAABk")
    body = json.dumps({**LONG, "max_tokens": 2}).encode()
    data = http_post(COMPLETIONS, body, *offer)
    with server.connect() as sock:
        for _ in range(2):
            sock.sendall(data)
            assert read_answer(sock).status == 200
        sock.sendall(data[:-9])
        server.metrics()  # a round trip, so that the rest arrives separately
        sock.sendall(data[-9:])
        assert read_answer(sock).status == 200


# ---------------------------------------------------------------- separate servers


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="bounded by Linux only")
def test_a_reader_that_stops_is_disconnected(tmp_path: Path) -> None:
    """Little is buffered for it, in the kernel neither, so it is noticed before the text ends."""
    body = {**LONG, "stream": True, "logprobs": 5}
    with running_server(tmp_path / "log", "--body-timeout-s", "2", is_forked=False) as server:
        with server.connect() as lazy:
            lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            lazy.sendall(http_post(COMPLETIONS, json.dumps(body).encode()))
            metrics = server.wait_for(lambda m: m.get("request_aborted_total", 0) == 1, "the end")
        assert metrics.get("request_success_total", 0) == 0
        server.wait_idle()


def test_sigterm_lets_requests_finish(tmp_path: Path) -> None:
    """Unready at once, no new work, running requests are answered in full, exit status 0."""
    with running_server(tmp_path / "log", is_forked=False) as server:
        body = {**LONG, "stream": True, "max_tokens": 200}
        body |= {"stream_options": {"include_usage": True}}
        with server.connect() as sock:
            sock.sendall(http_post(COMPLETIONS, json.dumps(body).encode()))
            server.wait_for(lambda m: m["num_requests_running"] == 1, "the stream")
            server.process.send_signal(signal.SIGTERM)
            saw_unready = saw_refusal = False
            while not (saw_unready and saw_refusal):
                saw_unready = saw_unready or server.get("/ready").status_code == 503
                refused = server.chat(max_tokens=1)
                if refused.status_code == 503:
                    assert refused.json()["error"]["code"] == "engine_unavailable"
                    saw_refusal = True
            assert server.get("/health").status_code == 200
            data = b""
            while received := sock.recv(65536):
                data += received
        assert b'"finish_reason":"length"' in data
        assert b'"completion_tokens":200' in data
        assert data.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert server.process.wait(60) == 0


def test_a_second_sigterm_ends_at_once(tmp_path: Path) -> None:
    with running_server(tmp_path / "log", is_forked=False) as server:
        with server.connect() as sock:
            sock.sendall(http_post(COMPLETIONS, json.dumps({**LONG, "stream": True}).encode()))
            server.wait_for(lambda m: m["num_requests_running"] == 1, "the stream")
            server.process.send_signal(signal.SIGTERM)
            server.wait_for(lambda m: server.get("/ready").status_code == 503, "the drain")
            server.process.send_signal(signal.SIGTERM)
            data = b""
            while received := sock.recv(65536):
                data += received
        assert b'"finish_reason":"length"' not in data
        assert b'data: {"error":' in data
        assert server.process.wait(20) == 0
    assert "Traceback" not in server.tail()


def test_a_killed_engine_costs_no_token(tmp_path: Path) -> None:
    """kill -9 of the engine during a stream, which continues in the next engine."""
    fields = {"temperature": 0.8, "seed": 11, "max_tokens": 120, "ignore_eos": True}
    body = {"model": MODEL, "prompt": "Once upon a time", **fields}
    with running_server(tmp_path / "log", is_forked=False) as server:
        expected = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
        with server.connect() as sock:
            data = http_post(COMPLETIONS, json.dumps({**body, "stream": True}).encode())
            sock.sendall(data)
            raw = sock.recv(65536)
            while raw.count(b"data: {") < 5:
                raw += sock.recv(65536)
            server.engines()[0].kill()
            while not raw.endswith(b"0\r\n\r\n"):
                raw += sock.recv(65536)
        _, _, chunked = raw.partition(b"\r\n\r\n")
        text = "".join(e["choices"][0]["text"] for e in events_of(dechunk(chunked)))
        assert text == expected
        metrics = server.wait_idle()
        assert metrics["engine_restarts_total"] == 1
        assert metrics["requests_resumed_total"] == 1
        assert server.get("/ready").status_code == 200
        assert server.stop() == 0


def dechunk(data: bytes) -> bytes:
    body = b""
    while data:
        size, _, rest = data.partition(b"\r\n")
        body += rest[: int(size, 16)]
        data = rest[int(size, 16) + 2 :]
    return body


def test_the_api_process_imports_nothing_that_the_engine_does() -> None:
    program = """
import sys
import server.app, server.cli, server.cli.serve, server.http, engine.process
heavy = {"torch", "transformers", "numpy", "safetensors", "tokenizers", "jinja2", "httpx"}
heavy |= {"PIL"}  # until the first image comes
parts = {"engine.core", "engine.gguf.tokenizer", "engine.grammar.llguidance_backend"}
found = (heavy | parts) & set(sys.modules)
assert not found, found
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


@pytest.mark.parametrize("stream", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_prompt_that_fits_the_context_but_not_the_pool(tmp_path: Path, stream: bool) -> None:
    """Row 48: rejected at once and by name; a request that fits is answered afterwards."""
    flags = ("--num-gpu-blocks-override", "8", "--max-model-len", "1024")
    with running_server(tmp_path / "log", *flags, is_forked=False) as server:
        answer = server.chat("one two " * 200, stream=stream)
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert (error["param"], error["code"]) == ("messages", "context_length_exceeded")
        assert server.chat(max_tokens=16).status_code == 200
