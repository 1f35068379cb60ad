"""What follows the last chunk of a body: trailers, of which nothing is read."""

from __future__ import annotations

import contextlib
import json
import socket

import psutil
import pytest

from tests.servers import MODEL, Server, read_answer

BODY = json.dumps({"model": MODEL, "prompt": "One, two,", "max_tokens": 2}).encode()
ENDLESS = 16 * 2**20


def request_head(*headers: str) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "Host: test", "Content-Type: application/json"]
    return "\r\n".join([*lines, *headers, "Transfer-Encoding: chunked"]).encode() + b"\r\n\r\n"


def with_trailers(head: bytes, *trailers: str) -> bytes:
    last = "".join(f"{trailer}\r\n" for trailer in trailers).encode()
    return head + b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(BODY), BODY, last)


def test_a_key_in_a_trailer_is_none(guarded_server: Server) -> None:
    key = f"Authorization: Bearer {guarded_server.key}"
    answer = guarded_server.raw(with_trailers(request_head(), key, "x-last: 1"))
    assert (answer.status, answer.error["code"]) == (401, "invalid_api_key")


def test_trailers_change_nothing(guarded_server: Server) -> None:
    head = request_head(f"Authorization: Bearer {guarded_server.key}")
    trailers = ("Authorization: Bearer no", "Content-Encoding: gzip", "Content-Type: text/plain")
    data = with_trailers(head, *trailers, "x-request-id: mine")
    with guarded_server.connect() as sock:
        for _ in range(2):  # on one connection
            sock.sendall(data)
            answer = read_answer(sock)
            assert (answer.status, json.loads(answer.body)["object"]) == (200, "text_completion")
            assert answer.headers["x-request-id"] != "mine"


@pytest.mark.parametrize("has_key", [False, True])
@pytest.mark.parametrize("pieces", ["one", "many"])
def test_trailers_without_end_are_cut_off(
    guarded_server: Server, has_key: bool, pieces: str
) -> None:
    """Also behind a request that is answered already: their memory was never given back."""
    key = [f"Authorization: Bearer {guarded_server.key}"] if has_key else []
    memory = psutil.Process(guarded_server.process.pid).memory_info
    before = memory().rss
    sent = 0
    with guarded_server.connect() as sock:
        sock.sendall(request_head(*key) + b"2\r\n{ \r\n0\r\n")
        piece = b"x" * 2**16 if pieces == "one" else b"x-%d: y\r\n" % 1 * 2**13
        sock.sendall(b"x-long: " if pieces == "one" else b"")
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            while sent < ENDLESS:
                sock.sendall(piece)
                sent += len(piece)
            sock.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            answer = read_answer(sock)
            assert answer.status in ((431,) if has_key else (401, 431))
            assert not answer.rest
            assert not sock.recv(1)
    assert memory().rss - before < ENDLESS // 2
    assert guarded_server.get("/health").status_code == 200
