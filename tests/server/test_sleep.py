"""Sleep, wake and reload on a real server: what operators see, and the effect on clients."""

from __future__ import annotations

import json
import shutil
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import EngineAsleep, InvalidParameter
from engine.paths import default_model_dir
from engine.pooling import PoolingInfo
from engine.types import EngineInfo
from tests.server.asgi import FakeEngine, running_app
from tests.servers import Server, running_server

BODY = {"model": "quire-demo", "prompt": "Once", "max_tokens": 3, "temperature": 0}
TEXT = "What is the capital of France?"


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model with noise in its head, a truncated one, and one of another kind."""
    home = tmp_path_factory.mktemp("weights")
    for name in ("noisy", "short", "other"):
        shutil.copytree(default_model_dir(), home / name)
    path = home / "noisy" / "model.safetensors"
    tensors = load_file(path)
    generator = torch.Generator().manual_seed(1)
    name = "model.embed_tokens.weight"
    noise = torch.randn(tensors[name].shape, generator=generator)
    save_file({**tensors, name: noise.to(tensors[name].dtype)}, path, {"format": "pt"})
    with (home / "short" / "model.safetensors").open("r+b") as file:
        file.truncate(1_000_000)
    (home / "circle").symlink_to("circle")
    config = json.loads((home / "other" / "config.json").read_text())
    (home / "other" / "config.json").write_text(json.dumps({**config, "rope_theta": 5000.0}))
    return home


@pytest.fixture(scope="module")
def server(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("sleepy") / "log"
    flags = ("--enable-sleep-mode", "--weights-dir", str(weights))
    with running_server(log, *flags, key="a-key") as server:
        yield server


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("workers") / "log"
    with running_server(log, "--enable-sleep-mode", "--api-workers", "2") as server:
        yield server


def answer(server: Server) -> str:
    told = server.chat(TEXT, max_tokens=12)
    assert told.status_code == 200, told.text
    return told.json()["choices"][0]["message"]["content"]


def code(response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def activity(server: Server) -> str:
    return server.get("/is_sleeping").json()["activity"]


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes(server: Server, level: int) -> None:
    before = answer(server)
    slept = server.post(f"/sleep?level={level}", None)
    assert slept.json() == {"is_sleeping": True, "activity": "asleep"}, slept.text
    assert server.get("/is_sleeping").json()["is_sleeping"]
    refused = server.chat(TEXT)
    assert code(refused) == (503, "engine_asleep")
    assert refused.headers["retry-after"] == "30"
    assert code(server.complete("a", stream=True)) == (503, "engine_asleep")
    ready = server.get("/ready")
    assert (*code(ready), ready.json()["error"]["message"]) == (
        *(503, "engine_asleep"),
        "The server is asleep.",
    )
    for path in ("/health", "/v1/models", "/metrics"):
        assert server.get(path).status_code == 200
    assert code(server.post("/reload_weights", {})) == (409, "asleep")
    woken = server.post("/wake_up", None)
    assert woken.json() == {"is_sleeping": False, "activity": "serving"}, woken.text
    assert server.get("/ready").status_code == 200
    assert answer(server) == before
    assert server.post("/wake_up", None).status_code == 200


def test_the_engines_process_gives_its_memory_back(server: Server) -> None:
    def resident_mib() -> float:
        return engine.memory_info().rss / 2**20

    (engine,) = server.engines()
    prompts = [[100 + index] * 3900 for index in range(4)]
    filled = server.complete(prompts, max_tokens=1)
    assert filled.status_code == 200, filled.text
    tokens = filled.json()["usage"]["prompt_tokens"]
    cache_mib = tokens * 2048 / 2**20  # bytes per token, for this model in bfloat16
    full = resident_mib()
    assert server.post("/sleep", None).status_code == 200
    assert full - resident_mib() > 0.8 * cache_mib
    assert server.post("/wake_up", None).status_code == 200


def test_who_is_being_served_goes_on_or_is_told(server: Server) -> None:
    body = {"model": "quire-demo", "prompt": "Once", "max_tokens": 3000, "ignore_eos": True}
    for query, ending in (("mode=wait", "[DONE]"), ("mode=abort", "engine_asleep")):
        tokens = 200 if "wait" in query else 3000
        told: list[bytes] = []

        def stream(told: list[bytes] = told, tokens: int = tokens) -> None:
            told.append(server.stream("/v1/completions", {**body, "max_tokens": tokens}))

        running = threading.Thread(target=stream)
        running.start()
        server.wait_for(lambda m: m["num_requests_running"] == 1, "a running request")
        assert server.post(f"/sleep?{query}", None).status_code == 200
        running.join()
        assert ending in told[0].decode()
        assert ("engine_asleep" in told[0].decode()) == (ending == "engine_asleep")
        assert server.post("/wake_up", None).status_code == 200
    server.wait_idle()


def test_other_weights_and_back(weights: Path, server: Server) -> None:
    before = answer(server)
    prints = {server.chat(TEXT, max_tokens=1).json()["system_fingerprint"]}
    first = server.metrics()["weights_generation"]
    reloaded = server.post("/reload_weights", {"model_path": "noisy"})
    assert reloaded.status_code == 200, reloaded.text
    assert reloaded.json()["generation"] == first + 1
    assert answer(server) != before
    prints.add(server.chat(TEXT, max_tokens=1).json()["system_fingerprint"])
    assert prints >= {reloaded.json()["system_fingerprint"]}
    assert len(prints) == 2
    for path, told in (
        ("short", "short/model.safetensors"),
        ("other", "rope"),
        ("none", "--weights-dir"),
        ("../..", "--weights-dir"),
        ("circle", "--weights-dir"),
    ):
        noisy = answer(server)
        refused = server.post("/update_weights_from_disk", {"model_path": path})
        assert refused.status_code == 400, refused.text
        error = refused.json()["error"]
        assert error["param"] == "model_path"
        assert told in error["message"]
        assert str(default_model_dir().parent) not in error["message"]
        assert answer(server) == noisy
    server.post("/reload_weights", {"model_path": "short/../noisy"})
    assert server.metrics()["weights_generation"] == first + 2
    shutil.copytree(default_model_dir(), weights / "first")
    assert server.post("/reload_weights", {"model_path": "first"}).status_code == 200
    assert answer(server) == before


class Meanwhile(threading.Thread):
    """Calls something in a thread; the result is available at the end."""

    def __init__(self, ask, *args, **fields) -> None:
        super().__init__()
        self._ask = lambda: ask(*args, **fields)
        self.start()

    def run(self) -> None:
        self.answer = self._ask()

    def whole(self):
        self.join()
        assert self.answer.status_code == 200, self.answer.text
        return self.answer.json()


def test_who_waits_for_other_weights_is_told_which_have_answered(server: Server) -> None:
    running = Meanwhile(server.complete, "Once", max_tokens=600, ignore_eos=True)
    server.wait_for(lambda m: m["num_requests_running"] == 1, "a running request")
    reload = Meanwhile(server.post, "/reload_weights", {})
    while activity(server) != "reloading":
        assert running.is_alive(), "it has not waited"
    streamed = Meanwhile(server.post, "/v1/completions", {**BODY, "stream": True})
    whole = Meanwhile(server.chat, TEXT, max_tokens=2).whole()
    print_ = reload.whole()["system_fingerprint"]
    assert whole["system_fingerprint"] == print_ != running.whole()["system_fingerprint"]
    streamed.join()
    chunks = streamed.answer.text.split("\n\n")[:-2]
    assert {json.loads(chunk[6:])["system_fingerprint"] for chunk in chunks} == {print_}


def test_being_awake_is_no_reason_to_end_anybody(server: Server) -> None:
    running = Meanwhile(server.complete, "Once", max_tokens=600, ignore_eos=True)
    server.wait_for(lambda m: m["num_requests_running"] == 1, "a running request")
    assert server.post("/wake_up", None).status_code == 200
    assert running.whole()["usage"]["completion_tokens"] == 600


async def test_where_the_model_lies_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    async def reload(engine: FakeEngine, model: str | None, timeout_s: float) -> None:
        raise InvalidParameter(f"{engine.info.model}/config.json: missing", param="model_path")

    async def wake(engine: FakeEngine) -> None:
        raise EngineAsleep(f"The engine cannot be woken: {engine.info.model}/config.json: missing")

    monkeypatch.setattr(FakeEngine, "reload", reload, raising=False)
    monkeypatch.setattr(FakeEngine, "wake", wake, raising=False)
    async with running_app(enable_sleep_mode=True) as app:
        assert app.engine.info.model == "fake"
        for path, status in (("/reload_weights", 400), ("/wake_up", 503)):
            refused = await app.request("POST", path).done()
            assert refused.status == status
            message = refused.error["message"]
            assert "quire-demo/config.json: missing" in message
            assert "fake" not in message


async def test_vectors_of_one_answer_are_of_the_same_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    generation = 0
    fake = FakeEngine().info

    def info(engine: FakeEngine) -> EngineInfo:
        pooling = PoolingInfo(kind="last", size=1)
        return msgspec.structs.replace(fake, pooling=pooling, generation=generation)

    monkeypatch.setattr(FakeEngine, "info", property(info))
    async with running_app(enable_sleep_mode=True, max_num_seqs=512) as app:
        asked = app.post("/v1/embeddings", input=["a"] * 300)
        for number, count in enumerate((256, 44, 256, 44)):
            await app.engine.next_stream()
            streams, app.engine.streams = app.engine.streams, []
            assert len(streams) == count
            generation = min(number, 1)  # exchanged during the first of two waves
            for stream in streams:
                stream.put(end="length", embedding=struct.pack("<f", generation))
        told = json.loads((await asked.done()).body)
    assert [item["embedding"] for item in told["data"]] == [[1.0]] * 300


def test_bad_requests_are_refused(server: Server) -> None:
    for path in ("/sleep?level=3", "/sleep?mode=keep", "/sleep?timeout_s=-1", "/wake_up?tags=kv"):
        assert server.post(path, None).status_code == 400, path
    for path in ("/sleep?lvl=2&mode=wait", "/wake_up?lvl=2&tags=weights&tags=kv_cache"):
        assert server.post(path, None).headers["x-quire-ignored-params"] == "lvl"
        bodied = server.post(path, {"level": 2, "tags": None})
        assert bodied.headers["x-quire-ignored-params"] == "lvl,level"
        assert server.post(path, [2]).status_code == 400
    partly = server.post("/wake_up?tags=weights", None)
    assert (partly.status_code, partly.json()["error"]["param"]) == (400, "tags")
    assert activity(server) == "serving"


@pytest.mark.slow  # a second server; see tests/engine/process/test_sleep_controller.py
def test_every_worker_knows(workers: Server) -> None:
    assert workers.post("/sleep?level=2", None).status_code == 200
    for _ in range(6):  # each over its own connection, and so at either worker
        workers._client.close()
        workers.__post_init__()
        assert workers.chat(TEXT).status_code == 503
    assert workers.post("/wake_up", None).status_code == 200
    deadline = time.monotonic() + 30
    for _ in range(6):
        workers._client.close()
        workers.__post_init__()
        while workers.chat(TEXT, max_tokens=2).status_code != 200:
            assert time.monotonic() < deadline
    without = workers.post("/reload_weights", {"model_path": "x"})
    assert (without.status_code, without.json()["error"]["param"]) == (400, "model_path")
    assert workers.post("/reload_weights", {}).json()["generation"] == 1


async def test_it_is_off_unless_asked_for() -> None:
    async with running_app() as app:
        for path in ("/sleep", "/wake_up", "/reload_weights", "/update_weights_from_disk"):
            refused = await app.request("POST", path).done()
            assert (refused.status, refused.error["code"]) == (404, "not_found")
        assert (await app.get("/is_sleeping")).status == 404
