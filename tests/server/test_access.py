"""Keys, limits and timeouts on a server that has them; routes are discovered, not listed here."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi.routing import APIRoute

from engine.config import EngineConfig
from engine.process import SubprocessClient
from server.app import create_app
from server.settings import Settings
from tests.servers import MODEL, RawAnswer, Server, http_post, read_answer

CHAT = "/v1/chat/completions"
BODY = json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "Hi"}]}).encode()
KEY = "sk-test-0123456789"


def all_routes() -> list[tuple[str, str]]:
    app = create_app(Settings(), SubprocessClient(EngineConfig(model="none")))
    found = []
    for path, methods in walk(app.routes):
        found += [(method, path) for method in sorted(methods)]
    assert ("POST", CHAT) in found
    assert ("GET", "/openapi.json") in found
    return found


def walk(routes: list[Any]) -> Iterator[tuple[str, set[str]]]:
    for route in routes:
        if isinstance(route, APIRoute) or hasattr(route, "methods"):
            yield route.path, route.methods
        else:
            inner = getattr(route, "original_router", None) or getattr(route, "app", None)
            yield from walk(getattr(inner, "routes", []))


def request(server: Server, method: str, path: str, *headers: str) -> RawAnswer:
    target = path.replace("{model_id:path}", MODEL)
    host = () if any(header.startswith("Host:") for header in headers) else ("Host: t",)
    lines = [f"{method} {target} HTTP/1.1", *host, "Content-Length: 0", *headers]
    return server.raw("\r\n".join(lines).encode() + b"\r\n\r\n")


@pytest.mark.parametrize(("method", "path"), all_routes(), ids=str)
def test_every_route_asks_for_a_key(guarded_server: Server, method: str, path: str) -> None:
    if method == "HEAD":
        return
    without = request(guarded_server, method, path)
    if path in ("/health", "/dashboard"):  # the page that asks its reader for a key
        assert without.status == 200
        return
    assert without.status == 401
    assert without.error["type"] == "authentication_error"
    if not path.startswith("/v1/messages"):  # Anthropic's errors have no codes
        assert without.error["code"] == "invalid_api_key"
    assert request(guarded_server, method, path, f"Authorization: Bearer {KEY}").status != 401


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "//v1/models",
        "/v1/models/",
        "/%76%31/models",
        "/v1/%2e%2e/metrics",
        "/health/",
        "//health",
        "/health/../metrics",
        f"/metrics?api_key={KEY}",
    ],
)
def test_no_spelling_of_a_path_gets_round_the_key(guarded_server: Server, path: str) -> None:
    assert request(guarded_server, "GET", path).status == 401


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        (("Authorization: Bearer wrong",), 401),
        ((f"Authorization: Bearer {KEY[:-1]}",), 401),
        ((f"Authorization: Bearer {KEY}x",), 401),
        ((f"Authorization: Basic {KEY}",), 401),
        ((f"Authorization: {KEY}",), 401),
        (("Authorization: Bearer",), 401),
        ((f"Authorization: Bearer {KEY}", f"Authorization: Bearer {KEY}"), 400),
        (("Host: a/b?c",), 401),
        ((f"Authorization: bearer {KEY}",), 200),
        (("Authorization: Bearer another-key",), 200),
    ],
)
def test_keys(guarded_server: Server, headers: tuple[str, ...], status: int) -> None:
    answer = request(guarded_server, "GET", "/v1/models", *headers)
    assert answer.status == status
    if status != 200:
        assert KEY.encode() not in answer.body


def test_strict_refuses_unknown_fields(guarded_server: Server) -> None:
    refused = guarded_server.chat(colour="blue")
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "colour"
    nested = guarded_server.chat(stream=True, stream_options={"colour": 1})
    assert nested.json()["error"]["param"] == "stream_options.colour"
    assert guarded_server.chat(max_tokens=1).status_code == 200


def test_headers_that_stall(guarded_server: Server) -> None:
    with guarded_server.connect() as sock:
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: t\r\n")
        answer = read_answer(sock)
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert {"x-request-id", "openai-processing-ms", "openai-version"} <= answer.headers.keys()
        assert sock.recv(1) == b""


def test_a_body_that_stalls(guarded_server: Server) -> None:
    with guarded_server.connect() as sock:
        sock.sendall(http_post(CHAT, BODY, f"Authorization: Bearer {KEY}")[:-5])
        answer = read_answer(sock)
        assert (answer.status, answer.error["code"]) == (408, "request_timeout")
        assert answer.headers["connection"] == "close"


def test_silent_connections_are_closed(guarded_server: Server) -> None:
    with guarded_server.connect() as sock:
        assert sock.recv(1) == b""


def test_a_full_queue_refuses_exactly_what_is_beyond(guarded_server: Server) -> None:
    """Two run and two wait; any further request gets a 503, and no accepted one does."""
    fields = {"max_tokens": 1500, "ignore_eos": True, "stream": True, "temperature": 0}
    body = json.dumps({"model": MODEL, "prompt": "Go", **fields}).encode()
    data = http_post("/v1/completions", body, f"Authorization: Bearer {KEY}")
    before = guarded_server.metrics()
    held = [guarded_server.connect() for _ in range(4)]
    for sock in held:
        sock.sendall(data)
    guarded_server.wait_for(
        lambda m: (
            m["request_params_n_count"] - before["request_params_n_count"] == 4
            and m["num_requests_running"] == 2
        ),
        "four sequences",
    )
    for _ in range(3):
        refused = guarded_server.raw(data)
        assert refused.status == 503
        assert refused.error["type"] == "service_unavailable_error"
        assert refused.error["code"] == "server_is_overloaded"
        assert int(refused.headers["retry-after"]) >= 1
    # Waiting streams get a comment line at intervals.
    waiting = held[-1]
    assert waiting.recv(65536).startswith(b"HTTP/1.1 200 OK")
    for sock in held:
        sock.close()
    after = guarded_server.wait_idle()
    key = "admission_rejections_total{queue_full}"
    assert after[key] - before.get(key, 0) == 3
    aborted = after["request_aborted_total"] - before.get("request_aborted_total", 0)
    assert aborted == 4
    assert guarded_server.chat(max_tokens=1).status_code == 200


def test_heartbeats_while_a_request_waits(guarded_server: Server) -> None:
    fields = {"max_tokens": 1500, "ignore_eos": True, "stream": True}
    body = json.dumps({"model": MODEL, "prompt": "Go", **fields}).encode()
    data = http_post("/v1/completions", body, f"Authorization: Bearer {KEY}")
    with guarded_server.connect() as one, guarded_server.connect() as two:
        one.sendall(data)
        two.sendall(data)
        guarded_server.wait_for(lambda m: m["num_requests_running"] == 2, "both running")
        with guarded_server.connect() as waiting:
            waiting.sendall(data)
            received = b""
            while received.count(b": keep-alive\n\n") < 2:
                received += waiting.recv(65536)
            assert b"data:" not in received
    guarded_server.wait_idle()
