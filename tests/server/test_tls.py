"""HTTPS: certificates, client certificates, and connections that end abnormally."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import openai
import pytest

from server.http.tls import Tls
from server.setting_sources import InvalidSettings
from tests.servers import MODEL, RawAnswer, Server, http_post, read_answer, running_server

HERE = Path(__file__).parent / "certificates"
CLIENT = ssl.create_default_context(cafile=HERE / "authority.pem")


@pytest.fixture(scope="module")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A server of two workers with TLS, and its certificate file."""
    home = tmp_path_factory.mktemp("secure")
    certificate = home / "server.pem"
    shutil.copy(HERE / "server.pem", certificate)
    flags = [
        *("--ssl-certfile", str(certificate), "--body-timeout-s", "1", "--max-body-bytes", "1MiB"),
        *("--api-workers", "2", "--load-format", "stub", "--stub-step-ms", "5"),
    ]
    with running_server(home / "log", *flags, key="sk-tls", wait=False) as server:
        deadline_s = time.monotonic() + 60
        with httpx.Client(verify=CLIENT, headers=server.headers, timeout=60) as client:
            while client.get(url(server, "/ready")).status_code != 200:
                assert time.monotonic() < deadline_s, server.tail()
                time.sleep(0.05)
        yield server, certificate


def url(server: Server, path: str) -> str:
    return f"https://127.0.0.1:{server.port}{path}"


def connect(server: Server, context: ssl.SSLContext = CLIENT) -> ssl.SSLSocket:
    sock = socket.create_connection(("127.0.0.1", server.port), timeout=20)
    return context.wrap_socket(sock, server_hostname="127.0.0.1")


def test_the_sdk_streams_over_tls(secure: tuple[Server, Path]) -> None:
    server, _ = secure
    with httpx.Client(verify=CLIENT) as http:
        client = openai.OpenAI(base_url=url(server, "/v1"), api_key="sk-tls", http_client=http)
        messages = [{"role": "user", "content": "Hi"}]
        stream = client.chat.completions.create(
            model=MODEL, messages=messages, max_tokens=50, stream=True
        )
        finish = [chunk.choices[0].finish_reason for chunk in stream]
    assert finish[-1] == "length"
    assert len(finish) > 10


def test_plain_http_finds_nothing_there(secure: tuple[Server, Path]) -> None:
    server, _ = secure
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://127.0.0.1:{server.port}/health")
    with connect(server) as sock:
        assert sock.version() in ("TLSv1.2", "TLSv1.3")


def test_a_body_that_is_refused_unread_is_answered(secure: tuple[Server, Path]) -> None:
    """TLS has no half-close: the response must reach a client that is still sending."""
    server, _ = secure
    for length in (2 * 2**20, 200 * 2**20):
        with connect(server) as sock:
            head = http_post("/v1/completions", b"", "Authorization: Bearer sk-tls")
            sock.sendall(head.replace(b"Length: 0", b"Length: %d" % length))
            sock.sendall(b"x" * 100_000)
            answer = read_answer(sock)
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


def test_malformed_and_stalled_requests_are_answered(secure: tuple[Server, Path]) -> None:
    server, _ = secure

    def answer_to(data: bytes) -> RawAnswer:
        with connect(server) as sock:
            sock.sendall(data)
            return read_answer(sock)

    assert answer_to(b"NONSENSE\r\n\r\n").status == 400
    assert answer_to(b"GET / HTTP/1.1\r\nx: " + b"a" * 70_000 + b"\r\n\r\n").status == 431
    body = json.dumps({"model": MODEL, "prompt": "Hi"}).encode()
    post = http_post("/v1/completions", body, "Authorization: Bearer sk-tls")
    assert answer_to(post[:-3]).status == 408


def test_a_client_that_goes_away_ends_its_request(secure: tuple[Server, Path]) -> None:
    server, _ = secure
    fields = {"max_tokens": 2000, "stream": True}
    body = json.dumps({"model": MODEL, "prompt": "Hi", **fields}).encode()
    with httpx.Client(verify=CLIENT, headers=server.headers, timeout=60) as client:
        for reset in (False, True):
            with connect(server) as sock:
                sock.sendall(http_post("/v1/completions", body, "Authorization: Bearer sk-tls"))
                assert sock.recv(1000).startswith(b"HTTP/1.1 200")
                if reset:
                    linger = struct.pack("ii", 1, 0)
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            deadline_s = time.monotonic() + 20
            running = 'quire:num_requests_running{engine="0",model_name="quire-demo"} 0.0'
            while running not in client.get(url(server, "/metrics")).text:
                assert time.monotonic() < deadline_s, "its request runs on"
                time.sleep(0.05)


def test_a_new_certificate_is_shown_after_sighup(secure: tuple[Server, Path]) -> None:
    server, certificate = secure

    def shown() -> bytes | None:
        with connect(server) as sock:
            return sock.getpeercert(binary_form=True)

    def wait_until(condition: Callable[[], bool]) -> None:
        deadline_s = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < deadline_s, server.tail()
            time.sleep(0.05)

    before = shown()
    shutil.copy(HERE / "client.pem", certificate)
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: all(shown() != before for _ in range(10)))
    after = shown()
    certificate.write_bytes(b"no certificate")
    server.process.send_signal(signal.SIGHUP)
    wait_until(lambda: server.tail().count("keeping the current certificate") == 2)
    assert shown() == after


def test_clients_must_show_a_certificate_where_that_is_asked(tmp_path: Path) -> None:
    flags = [
        *("--ssl-certfile", str(HERE / "server.pem"), "--load-format", "stub"),
        *("--ssl-ca-certs", str(HERE / "authority.pem")),
    ]
    known = ssl.create_default_context(cafile=HERE / "authority.pem")
    known.load_cert_chain(HERE / "client.pem")
    with running_server(tmp_path / "log", *flags, wait=False) as server:
        address = url(server, "/health")
        assert httpx.get(address, verify=known, timeout=60).status_code == 200
        with pytest.raises((httpx.TransportError, ssl.SSLError)):
            httpx.get(address, verify=CLIENT)


@pytest.mark.parametrize(
    ("files", "told"),
    [
        (("missing.pem", None, None), "no such file"),
        (("server-only.pem", None, None), "--ssl-certfile"),
        (("server.pem", "client.pem", None), "key values mismatch"),
        (("server.pem", None, "README.md"), "--ssl-ca-certs"),
    ],
)
def test_files_that_cannot_be_used_are_told_in_a_line(
    files: tuple[str, str | None, str | None], told: str
) -> None:
    certificate, key, authorities = (HERE / name if name else None for name in files)
    assert certificate is not None
    Tls(HERE / "server-only.pem", HERE / "server-key.pem")
    with pytest.raises(InvalidSettings, match=told) as refused:
        Tls(certificate, key, authorities)
    assert "\n" not in str(refused.value)
