"""A server whose model is still downloaded: alive, not ready, and soon ended by a signal."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from server.http.waiting import WaitingRoom
from server.settings import Settings
from tests.hub import FakeHub, fake_hub
from tests.servers import Server, read_answer, running_server

MODEL = Path(__file__).parents[2] / "demo" / "model"
NAME = "org/demo"
KEY = "sk-test"


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    files = {path.name: path.read_bytes() for path in MODEL.iterdir()}
    with fake_hub({NAME: files}) as running:
        running.gives_weights.clear()
        yield running


def test_a_server_tells_that_its_model_is_downloaded(hub: FakeHub, tmp_path: Path) -> None:
    environment = hub.environment(tmp_path / "home")
    with serving(environment, tmp_path / "first.log") as server:
        assert server.get("/health").json() == {"status": "ok"}
        for answer in (server.get("/ready"), server.chat(), server.post("/v1/messages", {})):
            assert answer.status_code == 503
            assert 0 < int(answer.headers["retry-after"]) <= 60
            assert answer.headers["x-request-id"]
            message = answer.json()["error"]["message"]
            assert "downloading org/demo, 0." in message
            assert message.endswith(" of 7.7 MB.")
        server.key = None
        assert server.get("/health").status_code == 200
        assert server.get("/ready").status_code == 401, "all else needs a key"
        assert server.stop() == 0
    with serving(environment, tmp_path / "second.log") as server:
        assert server.get("/ready").status_code == 503
        hub.gives_weights.set()
        while server.get("/ready").status_code != 200:
            assert server.process.poll() is None, server.tail()
            time.sleep(0.05)
        assert server.chat(model=NAME, max_tokens=4).status_code == 200
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        assert not {line["logger"] for line in lines} & {"httpx", "httpx2"}, "each request's line"


def test_who_has_connected_is_answered_before_the_room_closes() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        room = WaitingRoom(Settings(), [listener], "not yet")
        room.open()
        with socket.create_connection(listener.getsockname(), timeout=60) as early:
            while not room._server.server_state.connections:
                time.sleep(0.01)
            closing = threading.Thread(target=room.close)
            closing.start()
            while not room._server.should_exit or room._server.servers[0].is_serving():
                time.sleep(0.01)
            early.sendall(b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")
            answer = read_answer(early)
        closing.join()
        # And who comes later waits for the application.
        with socket.create_connection(listener.getsockname(), timeout=60):
            listener.settimeout(60)
            listener.accept()[0].close()
    assert (answer.status, answer.error["message"]) == (503, "not yet")


def serving(environment: dict[str, str], log: Path) -> AbstractContextManager[Server]:
    flags = (NAME, "--log-format", "json")
    return running_server(log, *flags, key=KEY, wait=False, environment=environment)
