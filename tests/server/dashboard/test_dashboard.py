"""The live dashboard of a real server: its data under load, access to it, and what it draws."""

from __future__ import annotations

import asyncio
import base64
import gc
import hashlib
import itertools
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from engine.errors import EngineDead
from engine.snapshot import BlockMap, Phase, PhaseKind, RequestRecord, Snapshot
from engine.stats import EngineStats
from server.dashboard import poller
from server.metrics import MetricValues
from server.settings import Settings
from tests.server.asgi import FakeEngine, running_app
from tests.servers import ROOT, Server, running_server

FLAGS = ("--load-format", "stub", "--stub-step-ms", "3", "--max-num-seqs", "4")
STATE = "/dashboard/state"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("dashboard") / "log"
    with running_server(log, *FLAGS, "--num-gpu-blocks-override", "96") as server:
        yield server


@contextmanager
def load(
    server: Server, count: int = 8, *, again: bool = False, **fields: Any
) -> Iterator[list[str]]:
    """Ask so many questions at once, ``again`` and again during the block; yields a list that gets
    the answers' ids."""
    ids: list[str] = []
    over = threading.Event()

    def ask(index: int) -> None:
        text = f"request {index} says something of its own " * 8
        while True:
            answer = server.complete(text, **{"max_tokens": 150, "ignore_eos": True, **fields})
            assert answer.status_code == 200, answer.text
            ids.append(answer.json()["id"])
            if over.is_set() or not again:
                return

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield ids
    finally:
        over.set()
        for thread in threads:
            thread.join()


def watch(server: Server, wanted: Any, limit_s: float = 30.0) -> dict[str, Any]:
    """Poll until ``wanted(state)``, which is asked only of states with a snapshot.

    There is none while the engine is in a long step.
    """
    deadline_s = time.monotonic() + limit_s
    while True:
        state = server.get(STATE).json()
        if "totals" in state and wanted(state):
            return state
        assert time.monotonic() < deadline_s, state
        time.sleep(0.05)


def snapshot_of(now_s: float, *lives: RequestRecord) -> Snapshot:
    return Snapshot(now_s, now_s, EngineStats(), (), (), lives, BlockMap(1, (), (), ()))


def ended_life(id: str, *, arrival_s: float, ended_s: float) -> RequestRecord:
    phases = (Phase("queued", arrival_s), Phase("prefill", arrival_s), Phase("decode", arrival_s))
    return RequestRecord(id, "", False, 2, 0, 8, 8, 0, phases, ended_s, "stop", "", 0, 8, 1, 1.0, 0)


def test_a_crowd_is_seen_while_it_lasts_and_after(server: Server) -> None:
    assert server.get(STATE).json()["status"] == "serving"  # steps are recorded from now on
    with load(server) as ids:
        busy = watch(
            server,
            lambda state: (
                state["totals"]["running"] == 4
                and state["totals"]["waiting"]
                and len(state["steps"]) > 20
            ),
        )
    done = watch(server, lambda state: not state["totals"]["running"])

    live = [request for request in busy["requests"] if request["ended_ago_ms"] is None]
    running, waiting = live[:4], live[4:]
    assert {request["status"] for request in running} <= {"prefill", "decode"}
    assert {request["status"] for request in waiting} == {"queued"}
    blocks = busy["blocks"]
    assert len(blocks["owners"]) == blocks["total"] == 96
    for place, request in enumerate(running):
        assert blocks["owners"].count(place + 2) == request["blocks"] > 0
    rows = max(step[2] + step[3] for step in busy["steps"])
    assert rows == 4

    ended = [request for request in done["requests"] if request["status"] == "done"]
    assert len(ended) == 8
    assert {request["id"] for request in ended} == {id[-8:] for id in ids}
    for request in ended:
        assert request["output_tokens"] == 150
        kinds = [kind for kind, _ in request["phases"]]
        assert kinds == ["queued", "prefill", "decode"]
        assert sum(ms for _, ms in request["phases"]) == pytest.approx(request["total_ms"], abs=1)
    # Half of them had to wait until one of the others was done.
    first_end = max(request["ended_ago_ms"] for request in ended)
    begun = [
        request["ended_ago_ms"] + request["total_ms"] - request["phases"][0][1] for request in ended
    ]
    assert sum(ago > first_end + 1 for ago in begun) == 4
    assert all(request["why"] for request in ended if request["total_ms"] > 400)
    told = json.dumps(done) + json.dumps(busy)
    assert "something" not in told, "a prompt has leaked"
    assert not any(id in told for id in ids), "an id is told whole"


async def test_a_client_that_does_not_read_is_named() -> None:
    """The engine is done, and its output waits in the API process."""
    async with running_app() as application:
        engine = application.engine
        exchange = application.post("/v1/completions", prompt=[1, 2], max_tokens=8)
        stream = await engine.next_stream()
        now_s = time.monotonic()
        engine.show(
            snapshot_of(
                now_s,
                ended_life(stream.request_id, arrival_s=now_s - 6.0, ended_s=now_s - 5.0),
            )
        )
        (request,) = json.loads((await application.get(STATE)).body)["requests"]
        line = "slow client: finished 5.0 s before it was read"
        assert request["why"] == line
        stream.put(1, 2, 3, end="stop")
        assert (await exchange.done()).status == 200
        await asyncio.sleep(0.25)  # the interval between snapshots
        (request,) = json.loads((await application.get(STATE)).body)["requests"]
        assert request["why"] == line, "what was seen is kept"


def test_the_page_is_whole_and_may_load_nothing(server: Server) -> None:
    answer = server.get("/dashboard")
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    policy = dict(
        rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; ")
    )
    assert policy["default-src"] == "'none'"
    html = answer.text
    for tag, rule in (("style", "style-src"), ("script", "script-src")):
        (inline,) = re.findall(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()
        assert policy[rule] == f"'sha256-{digest}'"
        assert len(inline) > 1000
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", html)
    assert "style=" not in html


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "0.0.0.0", "api_keys": ["k"]}, True),
        ({"host": "box.example", "dashboard": True}, True),
        ({"dashboard": False}, False),
    ],
)
def test_it_is_shown_where_that_is_safe(settings: dict[str, Any], shown: bool) -> None:
    assert Settings(**settings).is_dashboard_enabled is shown


async def test_where_it_is_off_there_is_nothing() -> None:
    async with running_app(dashboard=False) as application:
        for path in ("/dashboard", STATE):
            answer = await application.get(path)
            assert answer.status == 404
            assert "--dashboard" in answer.error["message"]


async def test_a_step_that_takes_long_is_told_so_and_asked_about_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(poller, "_TIMEOUT_S", 0.05)
    async with running_app() as application:
        for _ in range(2):
            assert json.loads((await application.get(STATE)).body)["status"] == "busy"
        assert application.engine.num_looks == 1
        application.engine.show(snapshot_of(time.monotonic()))
        await asyncio.sleep(0.05)
        assert json.loads((await application.get(STATE)).body)["status"] == "serving"


async def test_an_engine_that_dies_while_nobody_waits_for_it_is_no_error(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(poller, "_TIMEOUT_S", 0.01)
    monkeypatch.setattr(poller, "_MIN_INTERVAL_S", 0.0)
    dies = asyncio.Event()

    async def snapshot(engine: FakeEngine) -> Snapshot:
        await dies.wait()
        raise EngineDead("gone")

    with monkeypatch.context() as patch:
        patch.setattr(FakeEngine, "snapshot", snapshot)
        async with running_app() as application:
            assert json.loads((await application.get(STATE)).body)["status"] == "busy"
            dies.set()
            await asyncio.sleep(0)  # the engine dies after the page has given up
            assert json.loads((await application.get(STATE)).body)["status"] == "restarting"
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_restarts_are_those_that_the_whole_server_has_seen() -> None:
    async with running_app() as application:
        total = MetricValues.zero()
        total.engines[0].num_restarts = 3  # by the supervisor of several API workers

        async def gather() -> MetricValues:
            return total

        application.state.gather_metrics = gather
        application.engine.show(snapshot_of(time.monotonic()))
        assert json.loads((await application.get(STATE)).body)["totals"]["restarts"] == 3


async def test_an_engine_that_loads_is_told_so() -> None:
    async with running_app(loaded=False) as application:
        answer = await application.get(STATE)
        assert (answer.status, json.loads(answer.body)["status"]) == (200, "loading")
        application.engine.loaded.set()
        await application.state.model()
        application.engine.activity = "falling_asleep"
        assert json.loads((await application.get(STATE)).body)["status"] == "asleep"
        application.engine.alive = False
        assert json.loads((await application.get(STATE)).body)["status"] == "restarting"


def test_only_administrators_may_look(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    digest = hashlib.sha256(b"sk-quire-test-anna").hexdigest()
    keys.write_text(yaml.safe_dump({"keys": [{"name": "anna", "sha256": digest}]}))
    flags = (*FLAGS, "--api-key-file", str(keys), "--api-workers", "2")
    with running_server(tmp_path / "log", *flags, key="sk-root") as server:
        key, server.key = server.key, None
        assert server.get("/dashboard").status_code == 200  # it has no data, and asks for a key
        assert server.get(STATE).status_code == 401
        server.key = "sk-quire-test-anna"
        assert server.get(STATE).status_code == 403
        server.key = key
        server.get(STATE)
        with load(server, 4):
            state = watch(server, lambda state: state["totals"]["running"] == 4)
        # Every worker reports all requests.
        assert len(state["requests"]) == 4


# ---------------------------------------------------------------- its colours


def test_phases_can_be_told_apart_by_their_colours() -> None:
    page, style = (
        (ROOT / "server/dashboard" / name).read_text() for name in ("page.html", "page.css")
    )
    kinds = re.findall(r'class="phase (\w+)"', page)
    assert set(kinds) == set(get_args(PhaseKind)), "the legend names them all"
    themes = re.findall(r":root \{(.*?)\}", style, re.DOTALL)
    assert len(themes) == 2, "light and dark"
    for theme in themes:
        colours = dict(re.findall(r"--(\w+): #(\w{6});", theme))
        for one, other in itertools.combinations(kinds, 2):
            apart = math.dist(bytes.fromhex(colours[one]), bytes.fromhex(colours[other]))
            assert apart > 60, f"{one} and {other}"  # of 442 between black and white


# ---------------------------------------------------------------- in a browser


def browse(url: str, profile: Path) -> tuple[str, list[str]]:
    """The page's elements after some seconds of its virtual time, and its console output.

    ``profile`` is a new folder for the browser: two browsers with one profile would become one.
    """
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no Chromium")
    command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    command += [f"--user-data-dir={profile}", "--disable-background-networking"]
    command += ["--virtual-time-budget=2500", "--dump-dom", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def text_of(html: str, id: str) -> str:
    found = re.search(rf'<(\w+)[^>]* id="{id}".*?</\1>|<(\w+) id="{id}".*?</\2>', html, re.DOTALL)
    assert found, html
    return re.sub(r"<[^>]*>", " ", found[0])


def rows_of(html: str) -> list[str]:
    return re.findall(r"<tr[^>]* data-id=.*?</tr>", html, re.DOTALL)


def test_a_browser_draws_the_crowd_without_complaint(server: Server, tmp_path: Path) -> None:
    server.get(STATE)
    with load(server, 6, again=True, max_tokens=400):
        watch(server, lambda state: state["totals"]["running"] == 4)
        html, console = browse(f"{server.url}/dashboard", tmp_path)
    assert console == []
    assert text_of(html, "status").strip() == "serving"
    rows = rows_of(html)
    assert len(rows) >= 6
    assert any("decode" in re.sub(r"<[^>]*>", " ", row) for row in rows)
    assert "of 96 blocks" in text_of(html, "blocks-summary")


@contextmanager
def watched(server: Server, engines: int) -> Iterator[None]:
    """Watch each engine during the block, so that its history is kept."""
    over = threading.Event()

    def look() -> None:
        while not over.is_set():
            for engine in range(engines):
                server.get(f"{STATE}?engine={engine}")
            over.wait(0.5)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        over.set()
        looking.join()


def test_a_browser_shows_the_engine_that_is_chosen(tmp_path: Path) -> None:
    flags = (*FLAGS, "--data-parallel-size", "2")
    shown: list[set[str]] = []
    with running_server(tmp_path / "log", *flags) as server, watched(server, 2):
        with load(server):
            pass
        for number in range(3):
            address = f"{server.url}/dashboard?engine={number}"
            html, console = browse(address, tmp_path / f"profile-{number}")
            assert [line for line in console if "400 (Bad Request)" not in line] == []
            shown.append(set(re.findall(r'data-id="(.*?)"', html)))
            told = server.get(f"{STATE}?engine={number % 2}").json()
            assert shown[number] == {request["id"] for request in told["requests"]}
    assert len(shown[0] | shown[1]) == 8
    assert not shown[0] & shown[1]
    assert shown[2] == shown[0]  # there is no third, so the first is shown in its place
