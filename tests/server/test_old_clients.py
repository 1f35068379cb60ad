"""Clients of HTTP/1.0, such as nginx by default: they know neither chunks nor 100 Continue."""

from __future__ import annotations

import json
from typing import NamedTuple

import pytest

from tests.servers import MODEL, Server

CHAT = "/v1/chat/completions"
STORY = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 12}


class OldAnswer(NamedTuple):
    """What such a client makes of a response: what follows the headers is the body, as it is."""

    status: int
    headers: dict[str, str]
    body: bytes


def ask(
    server: Server, method: str, path: str, body: bytes = b"", *headers: str, version: str = "1.0"
) -> OldAnswer:
    """Send a request, and read until the server closes the connection."""
    lines = [f"{method} {path} HTTP/{version}", "Content-Type: application/json", *headers]
    if server.key is not None:
        lines.append(f"Authorization: Bearer {server.key}")
    if body:
        lines.append(f"Content-Length: {len(body)}")
    with server.connect() as sock:
        sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + body)
        data = b"".join(iter(lambda: sock.recv(65536), b""))
    head, _, rest = data.partition(b"\r\n\r\n")
    status, *fields = head.decode().split("\r\n")
    named = (field.partition(":") for field in fields)
    return OldAnswer(
        int(status.split()[1]), {name.lower(): value.strip() for name, _, value in named}, rest
    )


@pytest.mark.parametrize("path", ["/v1/completions", CHAT, "/v1/responses", "/v1/messages"])
def test_a_stream_is_delimited_by_the_end_of_the_connection(server: Server, path: str) -> None:
    asked = {"model": MODEL, "stream": True, "max_tokens": 12, "temperature": 0}
    if path == "/v1/completions":
        asked["prompt"] = STORY["prompt"]
    elif path == "/v1/responses":
        asked = {"model": MODEL, "stream": True, "input": "Hello!", "max_output_tokens": 16}
    else:
        asked["messages"] = [{"role": "user", "content": "Hello!"}]
    answer = ask(server, "POST", path, json.dumps(asked).encode())
    assert answer.status == 200
    assert answer.headers["connection"] == "close"
    assert not {"transfer-encoding", "content-length"} & set(answer.headers)
    assert answer.body.startswith((b"data: ", b"event: "))
    assert answer.body.endswith(b"\n\n")
    events = answer.body.removesuffix(b"data: [DONE]\n\n").split(b"\n\n")[:-1]
    assert all(json.loads(event.split(b"data: ", 1)[1]) for event in events)


def test_whole_answers_and_errors_have_their_length(server: Server) -> None:
    answer = ask(server, "POST", "/v1/completions", json.dumps(STORY).encode())
    newer = server.post("/v1/completions", STORY).json()
    assert json.loads(answer.body)["choices"] == newer["choices"]
    lost = ask(server, "GET", "/v1/nothing")
    assert (lost.status, json.loads(lost.body)["error"]["code"]) == (404, "not_found")
    for each in (answer, lost, ask(server, "GET", "/v1/models"), ask(server, "GET", "/dashboard")):
        assert "transfer-encoding" not in each.headers
        assert int(each.headers["content-length"]) == len(each.body) > 0


def test_metrics_are_read(server: Server) -> None:
    answer = ask(server, "GET", "/metrics")
    assert (answer.status, "transfer-encoding" in answer.headers) == (200, False)
    assert answer.body.startswith(b"# HELP")
    assert answer.body.endswith(b"\n")


def test_a_head_request_has_headers_only(server: Server) -> None:
    answer = ask(server, "HEAD", "/health")
    assert "transfer-encoding" not in answer.headers
    assert answer.body == b""


def test_files_arrive_as_they_were(server: Server) -> None:
    content = b"\x00\r\n0\r\n\r\n" * 10_000
    sent = server._client.post(
        f"{server.url}/v1/files", files={"file": ("a.bin", content)}, data={"purpose": "user_data"}
    )
    answer = ask(server, "GET", f"/v1/files/{sent.json()['id']}/content")
    assert (answer.status, answer.body) == (200, content)


def test_an_error_before_a_stream_begins_keeps_its_status(guarded_server: Server) -> None:
    asked = {**STORY, "stream": True, "max_tokens": -1}
    answer = ask(guarded_server, "POST", "/v1/completions", json.dumps(asked).encode())
    assert (answer.status, json.loads(answer.body)["error"]["param"]) == (400, "max_tokens")


def test_an_expectation_is_ignored(server: Server) -> None:
    """An interim response would be taken for the answer."""
    body = json.dumps(STORY).encode()
    answer = ask(server, "POST", "/v1/completions", body, "Expect: 100-continue")
    assert (answer.status, json.loads(answer.body)["object"]) == (200, "text_completion")


def test_a_client_of_today_still_gets_chunks(server: Server) -> None:
    body = json.dumps({**STORY, "stream": True}).encode()
    headers = ("Host: test", "Connection: close")
    answer = ask(server, "POST", "/v1/completions", body, *headers, version="1.1")
    assert answer.headers["transfer-encoding"] == "chunked"
    assert answer.body.endswith(b"\r\n0\r\n\r\n")
