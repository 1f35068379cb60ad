"""--profile on a real server: traces of its steps, and clear errors if there are none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.traces import are_whole, read_trace, steps
from tests.servers import Server, running_server


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profile") / "made" / "at start"


@pytest.fixture(scope="module")
def profiled(directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("profiled") / "server.log"
    flags = ("--profile", str(directory), "--profile-steps", "5")
    with running_server(log, *flags, key="a-key") as server:
        assert directory.is_dir()
        yield server


def test_a_trace_holds_so_many_steps_with_their_parts(profiled: Server, directory: Path) -> None:
    started = profiled.post("/start_profile", {"num_steps": 7})
    assert (started.status_code, started.json()) == (200, {"num_steps": 7})
    twice = profiled.post("/start_profile", {})
    assert (twice.status_code, twice.json()["error"]["code"]) == (409, "profile_running")
    for _ in range(2):
        assert profiled.complete(max_tokens=40, ignore_eos=True).status_code == 200
    stopped = profiled.post("/stop_profile", None)
    assert stopped.status_code == 200, stopped.text
    answer = stopped.json()
    assert answer["num_steps"] == 7
    trace = directory / answer["file"]
    found = steps(trace)
    assert are_whole(found)
    assert len(found) == 7
    names = {event["name"] for event in read_trace(trace)}
    assert any(name.startswith("aten::") for name in names), "the operations are not in it"
    assert f"wrote a profile of 7 steps to {trace}" in profiled.log.read_text()
    again = profiled.post("/stop_profile", None)
    assert (again.status_code, again.json()["error"]["code"]) == (409, "profile_not_running")


def test_the_setting_decides_where_the_request_does_not(profiled: Server, directory: Path) -> None:
    before = set(directory.iterdir())
    answer = profiled._client.post(f"{profiled.url}/start_profile", headers=profiled.headers)
    assert (answer.status_code, answer.json()) == (200, {"num_steps": 5})
    profiled.complete(max_tokens=40, ignore_eos=True)
    (trace,) = set(directory.iterdir()) - before
    assert len(steps(trace)) == 5
    profiled.post("/start_profile", {"num_steps": 5000})
    profiled.complete(max_tokens=2, ignore_eos=True)
    assert profiled.post("/stop_profile", None).json()["num_steps"] == 2


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 2**70}, "num_steps"),
        ({"num_steps": "5"}, "num_steps"),
        ([], None),
    ],
    ids=str,
)
def test_bad_bodies_are_refused_by_name(profiled: Server, body: object, param: str) -> None:
    answer = profiled.post("/start_profile", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert profiled.post("/stop_profile", None).status_code == 409


def test_without_the_flag_there_is_nothing_to_start(server: Server) -> None:
    for path in ("/start_profile", "/stop_profile"):
        answer = server.post(path, {})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "not_found"
        assert "--profile" in answer.json()["error"]["message"]
