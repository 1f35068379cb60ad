"""The embedded model on two engines, over HTTP: answers, counters, adapters, and deaths."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.lora.test_recorded_adapters import make_adapter
from tests.server.test_workers import streaming, wait_for_workers
from tests.servers import MODEL, ROOT, Server, running_server

QUESTION = "What is the capital of France?"
QUESTIONS = (QUESTION, "What is paged attention?", "Tell me a story.", "Who wrote Faust?")


@pytest.fixture(scope="module")
def two(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("two")
    (home / "shelf").mkdir()
    for name in ("late", "broken"):
        make_adapter(home / "shelf" / name, {"self_attn.q_proj": (256, 256)}, rank=8, seed=1)
    (home / "shelf" / "broken" / "adapter_model.safetensors").write_bytes(b"no weights")
    flags = (
        *("--data-parallel-size", "2", "--lora-dir", str(home / "shelf")),
        *("--enable-sleep-mode", "--profile", str(home / "traces")),
    )
    with running_server(home / "server.log", *flags) as running:
        yield running


def ask_all(server: Server, bodies: list[dict[str, Any]]) -> list[str]:
    """Send all at once; returns the texts."""

    def ask(body: dict[str, Any]) -> str:
        answer = server.post("/v1/chat/completions", {"model": MODEL, "max_tokens": 60, **body})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(ask, bodies))


def steps(server: Server) -> dict[str, float]:
    """The steps that each engine has run, by its label."""
    families = text_string_to_metric_families(server.get("/metrics").text)
    (family,) = [one for one in families if one.name == "quire:engine_steps"]
    return {sample.labels["engine"]: sample.value for sample in family.samples}


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "temperature": 0, **fields}


def test_two_engines_answer_as_one(server: Server, two: Server) -> None:
    bodies = [chat(question) for question in QUESTIONS]
    bodies += [chat(question, temperature=1, seed=7) for question in QUESTIONS]
    alone = [ask_all(server, [body])[0] for body in bodies]
    before = steps(two)
    assert ask_all(two, bodies) == alone
    after = steps(two)
    assert set(after) == {"0", "1"}
    assert all(after[engine] > before[engine] for engine in after), "one did all the work"
    assert two.get("/ready").json() == {"status": "ready", "engines": {"serving": 2, "total": 2}}
    assert server.get("/ready").json() == {"status": "ready"}


def test_numbers_are_told_of_each_engine_and_of_all(server: Server, two: Server) -> None:
    labels: dict[str, list[str]] = {}
    for family in text_string_to_metric_families(two.get("/metrics").text):
        for sample in family.samples:
            if "engine" in sample.labels and "le" not in sample.labels:
                labels.setdefault(sample.name, []).append(sample.labels["engine"])
    of_each = {name for name, told in labels.items() if sorted(told) == ["0", "1"]}
    of_all = {name for name, told in labels.items() if told == ["all"]}
    assert {"quire:kv_blocks_total", "quire:num_requests_running"} <= of_each
    assert {"quire:engine_restarts_total", "quire:engine_up"} <= of_each
    assert {"quire:generation_tokens_total", "quire:prompt_tokens_total"} <= of_all
    ours, theirs = two.metrics(), server.metrics()
    assert ours["kv_blocks_total"] == 2 * theirs["kv_blocks_total"]
    told = server.get("/metrics").text  # with a single engine, nothing is added
    assert 'engine="1"' not in told
    assert 'engine="all"' not in told
    assert "engine_up" not in told


@pytest.mark.slow
async def test_a_killed_engine_costs_no_stream_a_token(two: Server) -> None:
    count = 8
    bodies = [chat(f"Tell me {n} things.", max_tokens=200, ignore_eos=True) for n in range(count)]
    expected = await asyncio.to_thread(ask_all, two, bodies)
    before = two.wait_idle()
    victim = two.engines()[1]
    texts, begun = [""] * count, asyncio.Event()

    async def read(client: httpx.AsyncClient, index: int) -> None:
        body = {"model": MODEL, "stream": True, **bodies[index]}
        async with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    delta = json.loads(line[6:])["choices"][0]["delta"]
                    texts[index] += delta.get("content") or ""
                    if all(len(text) > 30 for text in texts):
                        begun.set()

    async with httpx.AsyncClient(base_url=two.url, timeout=60) as client:
        readers = [asyncio.create_task(read(client, index)) for index in range(count)]
        await begun.wait()
        victim.send_signal(signal.SIGKILL)
        told = []
        while not told or told[-1]["serving"] == 2:  # until the death is noticed
            ready = await client.get("/ready")
            assert ready.status_code == 200, "one is there"
            told.append(ready.json()["engines"])
        assert (await client.get("/health")).json()["engines"] == {"serving": 1, "total": 2}
        await asyncio.gather(*readers)
    assert texts == expected
    two.wait_for(lambda metrics: metrics["engine_up"] == 2, "the successor")
    after = two.wait_idle()
    assert after["engine_restarts_total"] == before["engine_restarts_total"] + 1
    assert after["requests_resumed_total"] > before["requests_resumed_total"]
    assert after["request_failed_total"] == 0
    log = two.log.read_text()
    lost, other = (
        re.findall(rf"{what} engine (\d)", log)[0] for what in ("restarting", "continue in")
    )
    assert {lost, other} == {"0", "1"}
    assert f"[engine {other}] " in log


def test_an_adapter_is_served_by_all_or_none(two: Server) -> None:
    bodies = [chat(f"{n}: {QUESTION}") for n in range(16)]
    plain = ask_all(two, bodies)
    late = adapter("late")
    assert two.post("/v1/load_lora_adapter", late).status_code == 200
    before = steps(two)
    adapted = ask_all(two, [{**body, "model": "late"} for body in bodies])
    after = steps(two)
    assert all(after[engine] > before[engine] for engine in after)
    assert adapted != plain
    assert adapted == [ask_all(two, [{**body, "model": "late"}])[0] for body in bodies]
    refused = two.post("/v1/load_lora_adapter", adapter("broken"))
    assert refused.status_code == 400
    assert "broken" not in [model["id"] for model in two.get("/v1/models").json()["data"]]
    del late["lora_path"]
    two.post("/v1/unload_lora_adapter", late)
    assert two.chat(QUESTION, model="late").status_code == 404


def adapter(name: str) -> dict[str, str]:
    return {"lora_name": name, "lora_path": name}


def test_all_sleep_wake_record_and_are_looked_at(two: Server) -> None:
    assert two.post("/sleep", None).json()["is_sleeping"] is True
    told = two.get("/ready")
    assert (told.status_code, told.json()["error"]["code"]) == (503, "engine_asleep")
    assert two.chat().status_code == 503
    assert two.post("/wake_up", None).json() == {"is_sleeping": False, "activity": "serving"}
    assert two.post("/reload_weights", {}).json()["generation"] == 1
    assert two.post("/start_profile", {"num_steps": 3}).status_code == 200
    ask_all(two, [chat(f"{n} {QUESTION}") for n in range(16)])
    trace = two.post("/stop_profile", None).json()
    files = {path.name for path in (two.log.parent / "traces").iterdir()}
    assert {trace["file"], *trace["other_files"]} == files
    assert len(files) == 2
    for engine in range(2):
        state = two.get("/dashboard/state", params={"engine": engine}).json()
        assert (state["status"], state["engines"]) == ("serving", 2)
    refused = two.get("/dashboard/state", params={"engine": 2})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "engine")


@pytest.mark.slow
async def test_several_workers_share_several_engines(tmp_path: Path) -> None:
    flags = (
        *("--api-workers", "2", "--data-parallel-size", "2"),
        *("--load-format", "stub", "--stub-step-ms", "5"),
    )
    with running_server(tmp_path / "log", *flags) as server:
        wait_for_workers(server)
        async with streaming(server) as streams:
            expected = await asyncio.gather(*streams.tasks)
        assert all(value > 0 for value in steps(server).values())
        async with streaming(server) as streams:
            victim = server.engines()[0]
            victim.send_signal(signal.SIGKILL)
            assert await asyncio.gather(*streams.tasks) == expected
        server.wait_for(lambda metrics: metrics["engine_up"] == 2, "the successor")
        after = server.wait_idle()
        assert (after["engine_restarts_total"], after["engine_up"]) == (1, 2)
        assert after["requests_resumed_total"] > 0
        assert len(server.engines()) == 2
        family = psutil.Process(server.process.pid).children(recursive=True)
        assert server.stop() == 0
        assert psutil.wait_procs(family, timeout=10)[1] == []


@pytest.mark.slow
def test_engines_of_several_ranks_answer_as_one(tmp_path: Path) -> None:
    bodies = [chat(question) for question in QUESTIONS]
    with running_server(tmp_path / "alone", "--dtype", "float32") as alone:
        expected = ask_all(alone, bodies)
    flags = ("--data-parallel-size", "2", "--tensor-parallel-size", "2", "--dtype", "float32")
    with running_server(tmp_path / "log", *flags) as shared:
        assert len(shared.engines()) == 2
        assert len(shared.processes("engine.parallel.follower")) == 2
        before = steps(shared)
        assert ask_all(shared, bodies) == expected
        after = steps(shared)
        assert all(after[engine] > before[engine] for engine in after)


def test_no_engine_is_left_behind_by_a_killed_server(two: Server) -> None:
    processes = two.engines()
    assert len(processes) == 2
    two.process.kill()  # the last test to use it
    assert psutil.wait_procs(processes, timeout=10)[1] == []


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("serve", "--data-parallel-size", "0"), "--data-parallel-size: must be greater"),
        pytest.param(
            ("serve", "--data-parallel-size", "2", "--device", "cuda"),
            "no GPU",
            marks=pytest.mark.slow,  # the check is in the engine
        ),
        (("run-batch", "x", "-o", "y", "--data-parallel-size", "2"), "--data-parallel-size: there"),
    ],
)
def test_what_cannot_be_is_one_line(arguments: tuple[str, ...], told: str) -> None:
    command = [sys.executable, "-m", "server", *arguments]
    if arguments[0] == "serve":
        command += ["--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode, done.stderr
    problems = [line for line in done.stderr.splitlines() if told in line]
    assert len(problems) == 1, done.stderr
    assert "Traceback" not in done.stderr
