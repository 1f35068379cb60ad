"""Everything that a request allocates is freed when it ends, without the cyclic garbage collector.

The collector runs at long intervals (``engine/gc_tuning.py``): until then a busy server would hold
memory, and sockets, that only the collector can free.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.servers import MODEL, ROOT, Server, http_post, running_server

# Runs in the API process: collects garbage from the command to begin, and reports its types.
_WATCH = """
import collections, gc, json, pathlib, sys, threading, time

def watch(folder):
    while True:
        for name, act in (("begin", begin), ("end", end)):
            if (told := folder / name).exists():
                act(folder)
                told.unlink()
        time.sleep(0.01)

def begin(folder):
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)

def end(folder):
    gc.collect()
    kinds = collections.Counter(f"{type(o).__module__}.{type(o).__qualname__}" for o in gc.garbage)
    gc.set_debug(0)
    gc.garbage.clear()
    gc.enable()
    (folder / "garbage.json").write_text(json.dumps(kinds))

if "serve" in sys.orig_argv:
    folder = pathlib.Path(__file__).parent
    threading.Thread(target=watch, args=(folder,), daemon=True).start()
"""
_MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]
_CHAT = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 8}
_LONG = {"model": MODEL, "messages": _MESSAGES, "max_tokens": 400, "ignore_eos": True}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    folder = tmp_path_factory.mktemp("watched")
    (folder / "sitecustomize.py").write_text(_WATCH)
    path = os.pathsep.join((str(folder), str(ROOT)))
    with running_server(folder / "log", environment={"PYTHONPATH": path}) as server:
        yield server, folder


def post(path: str, body: object) -> Callable[[Server], object]:
    return lambda server: server.post(path, body)


def stream(path: str, body: dict[str, object]) -> Callable[[Server], object]:
    return lambda server: server.stream(path, body)


def hang_up(path: str, body: dict[str, object]) -> Callable[[Server], object]:
    """Disconnect after the first bytes or, without a stream, after a moment."""

    def act(server: Server) -> None:
        with server.connect() as sock:
            sock.sendall(http_post(path, json.dumps(body).encode()))
            sock.settimeout(0.05)
            with suppress(TimeoutError):
                sock.recv(200)

    return act


KINDS: dict[str, Callable[[Server], object]] = {
    "chat": post("/v1/chat/completions", _CHAT),
    "chat, streamed": stream("/v1/chat/completions", _CHAT),
    "chat, hung up on": hang_up("/v1/chat/completions", _LONG),
    "stream, hung up on": hang_up("/v1/chat/completions", {**_LONG, "stream": True}),
    "choices": stream("/v1/completions", {"model": MODEL, "prompt": "a", "n": 3}),
    "a schema": post("/v1/chat/completions", {**_CHAT, "response_format": {"type": "json_object"}}),
    "a tool": stream("/v1/chat/completions", {**_CHAT, "tools": [_TOOL]}),
    "response": post("/v1/responses", {"model": MODEL, "input": "a", "max_output_tokens": 16}),
    "response, streamed": stream(
        "/v1/responses", {"model": MODEL, "input": "a", "max_output_tokens": 16}
    ),
    "message": stream("/v1/messages", _CHAT),
    "embedding": post("/v1/embeddings", {"model": MODEL, "input": ["a", "b"]}),
    "refused": post("/v1/chat/completions", {**_CHAT, "temperature": 9}),
    "too long": post("/v1/completions", {"model": MODEL, "prompt": [300] * 100_000}),
    "no JSON": lambda server: server.raw(http_post("/v1/completions", b"{", "Connection: close")),
    "no route": lambda server: server.get("/nowhere"),
    "tokens": post("/tokenize", {"model": MODEL, "prompt": "a"}),
    "metrics": lambda server: server.get("/metrics"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_leaves_no_garbage(watched: tuple[Server, Path], kind: str) -> None:
    server, folder = watched
    KINDS[kind](server)  # the first one may compile or cache something
    server.wait_idle()
    tell(folder, "begin")
    for _ in range(5):
        KINDS[kind](server)
    server.wait_idle()
    tell(folder, "end")
    garbage = json.loads((folder / "garbage.json").read_text())
    assert not [f"{count} {name}" for name, count in garbage.items() if count >= 5]


def tell(folder: Path, what: str) -> None:
    """Give the watcher a command and wait until it is done."""
    (folder / what).touch()
    deadline = time.monotonic() + 60
    while (folder / what).exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
