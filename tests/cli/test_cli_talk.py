"""``quire chat`` and ``quire complete`` against a scripted server."""

from __future__ import annotations

import contextlib
import io
import json
import socket
import ssl
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from server.cli.chat import _CONTROLS, chat_main, complete_main

CERTIFICATE = Path(__file__).parents[1] / "server" / "certificates" / "server.pem"


class Script:
    """How the server answers, and a record of its requests."""

    def __init__(self) -> None:
        self.asked: list[dict] = []
        self.answer: list[str] = ["Hel", "lo ", "😀"]
        self.thoughts: list[dict[str, str]] = []  # deltas before the answer to a chat
        self.end = b"data: [DONE]\n\n"
        self.status = 200
        self.key: str | None = None


@pytest.fixture
def script():
    told = Script()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args):
            pass

        def do_GET(self):
            self._send(200, json.dumps({"data": [{"id": "the-model"}]}).encode())

        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            told.asked.append(body)
            told.key = self.headers.get("Authorization")
            if told.status != 200:
                error = {"error": {"message": "that cannot be", "type": "x"}}
                self._send(told.status, json.dumps(error).encode())
                return
            chunks = [b": waiting\n\n"]
            choices = [{"text": piece} for piece in told.answer]
            if "messages" in body:
                deltas = [*told.thoughts, *({"content": piece} for piece in told.answer)]
                choices = [{"delta": delta} for delta in deltas]
            events = [json.dumps({"choices": [choice]}).encode() for choice in choices]
            chunks += [b"data: " + event + b"\n\n" for event in events]
            self._send(200, b"".join(chunks) + told.end)

        def _send(self, status, payload):
            self.send_response(status)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        told.url = f"http://127.0.0.1:{server.server_port}"
        yield told
        server.shutdown()
        thread.join()


def test_a_pipe_holds_a_conversation_with_history(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n\nAnd of Italy?\n"))
    arguments = ["--url", script.url + "/v1/", "--system-prompt", "Be brief.", "--api-key", "k"]
    assert chat_main([*arguments, "--temperature", "0", "--seed", "3"]) == 0
    assert capsys.readouterr().out == "Hello 😀\nHello 😀\n"
    first, second = script.asked
    system = {"role": "system", "content": "Be brief."}
    assert first["messages"] == [system, {"role": "user", "content": "Hi"}]
    assert second["messages"] == [
        *first["messages"],
        {"role": "assistant", "content": "Hello 😀"},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert first["model"] == "the-model"
    assert (first["temperature"], first["seed"], first["stream"]) == (0.0, 3, True)
    assert script.key == "Bearer k"


def test_a_single_message_gets_a_single_answer(script, capsys):
    assert chat_main(["--url", script.url, "--model", "mine", "Hi"]) == 0
    assert capsys.readouterr().out == "Hello 😀\n"
    assert script.asked[0]["model"] == "mine"


def test_reasoning_is_faint_at_a_terminal_and_left_out_elsewhere(script, monkeypatch, capsys):
    script.thoughts = [{"reasoning": "I ", "reasoning_content": "I "}, {"reasoning_content": "am"}]
    assert chat_main(["--url", script.url, "Hi"]) == 0
    assert capsys.readouterr().out == "Hello 😀\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\nTwo\n"))
    assert chat_main(["--url", script.url]) == 0
    assert capsys.readouterr().out == "\x1b[2mI am\x1b[0m\n\nHello 😀\n" * 2
    history = script.asked[-1]["messages"]
    assert history[1] == {"role": "assistant", "content": "Hello 😀"}


def test_images_go_with_the_next_message_and_stay_in_the_history(
    script, monkeypatch, capsys, tmp_path
):
    one, two = tmp_path / "one.png", tmp_path / "two.jpg"
    one.write_bytes(b"1")
    two.write_bytes(b"2")
    lines = iter([f"/image {two}", "Hi", "/image nothing.png", "/image notes.txt", "Bye", "/quit"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    assert chat_main(["--url", script.url, "--image", str(one)]) == 0
    urls = ["data:image/png;base64,MQ==", "data:image/jpeg;base64,Mg=="]
    shown = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    first, second = (asked["messages"] for asked in script.asked)
    assert first == [{"role": "user", "content": [*shown, {"type": "text", "text": "Hi"}]}]
    assert second == [
        *first,
        {"role": "assistant", "content": "Hello 😀"},
        {"role": "user", "content": "Bye"},
    ]
    told = capsys.readouterr().err
    assert "nothing.png: No such file" in told
    assert "notes.txt: not an image" in told
    assert chat_main(["--url", script.url, "--image", "notes.txt", "Hi"]) == 1


def test_commands_at_a_terminal(script, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    lines = iter(["/system Shout.", "Hi", "/reset", "Again", "/nonsense", "/quit", "never"])
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _: next(lines))
    assert chat_main(["--url", script.url]) == 0
    out = capsys.readouterr().out
    assert "System prompt: Shout." in out
    assert "There is no command /nonsense" in out
    roles = [[turn["role"] for turn in asked["messages"]] for asked in script.asked]
    assert roles == [["system", "user"], ["system", "user"]]  # /reset discarded "Hi" and its answer
    assert next(lines) == "never"


def test_a_failed_turn_is_not_remembered(script, monkeypatch, capsys):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    def lines():
        script.end = b""  # truncated before [DONE]
        yield "one"
        script.end = b"data: [DONE]\n\n"
        yield "two"
        raise EOFError

    turns = lines()
    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr("builtins.input", lambda _: next(turns))
    assert chat_main(["--url", script.url]) == 0
    assert "ended the stream before its end" in capsys.readouterr().err
    assert [turn["content"] for turn in script.asked[1]["messages"]] == ["two"]


def test_complete_takes_its_prompt_from_a_pipe(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon\na time"))
    assert complete_main(["--url", script.url, "--max-tokens", "9", "--echo"]) == 0
    assert capsys.readouterr().out == "Once upon\na timeHello 😀\n"
    assert script.asked[0]["prompt"] == "Once upon\na time"
    assert script.asked[0]["max_tokens"] == 9


@pytest.mark.parametrize("command", [chat_main, complete_main])
def test_a_refusal_and_an_absent_server_are_told_in_one_line(command, script, capsys):
    script.status = 400
    assert command(["--url", script.url, "Hi"]) == 1
    assert capsys.readouterr().err == "quire: the server answered 400: that cannot be\n"
    assert command(["--url", "http://127.0.0.1:9", "Hi"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("quire: no server answers at http://127.0.0.1:9 (")
    assert "start one with: quire serve" in error
    for url in ("ftp://x", "http://x:port", "http://x:0", "http://[::1", "http://a b/"):
        assert command(["--url", url, "Hi"]) == 1
        assert "is not an address" in capsys.readouterr().err
    for key in ("ключ", "key\n"):
        assert command(["--url", script.url, "--api-key", key, "Hi"]) == 1
        assert "no header can hold" in capsys.readouterr().err


def test_what_is_not_http_is_not_printed(capsys):
    """At a port for TLS, what is not encrypted gets such an answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"\x15\x03\x01\x00\x02\x02F\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        assert complete_main(["--url", url, "Hi"]) == 1
        thread.join()
    told = "is not HTTP; if it serves TLS, its address begins with https://"
    assert capsys.readouterr().err == f"quire: what {url} answers {told}\n"


def test_an_untrusted_certificate_is_not_taken_for_an_absent_server(capsys):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse_once() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                context.wrap_socket(connection, server_side=True)

        thread = threading.Thread(target=refuse_once)
        thread.start()
        url = f"https://127.0.0.1:{listener.getsockname()[1]}"
        assert chat_main(["--url", url, "Hi"]) == 1
        thread.join()
    error = capsys.readouterr().err
    assert error.startswith(f"quire: the certificate of {url} is not trusted (")
    assert error.endswith("name its authorities in SSL_CERT_FILE\n")


def test_a_server_without_tls_is_not_taken_for_an_absent_one(script, capsys):
    url = script.url.replace("http:", "https:")
    assert chat_main(["--url", url, "Hi"]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"quire: no secure connection to {url} (")
    assert error.endswith("if it serves plain HTTP, its address begins with http://\n")


def test_an_error_inside_the_stream_is_told(script, capsys):
    script.end = b'data: {"error": {"message": "the engine is gone"}}\n\ndata: [DONE]\n\n'
    assert chat_main(["--url", script.url, "Hi"]) == 1
    assert "the engine is gone" in capsys.readouterr().err


def test_a_terminal_is_not_steered_by_a_model():
    assert "a\x1b[2Jb\x9b\rc\td\ne".translate(_CONTROLS) == "a[2Jbc\td\ne"
