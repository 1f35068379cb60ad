"""A server whose model is still downloaded: alive, not ready, and soon ended by a signal."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from tests.hub import FakeHub, fake_hub
from tests.servers import Server, running_server

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


def serving(environment: dict[str, str], log: Path) -> AbstractContextManager[Server]:
    flags = (NAME, "--log-format", "json")
    return running_server(log, *flags, key=KEY, wait=False, environment=environment)
