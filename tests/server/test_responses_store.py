"""Stored responses across restarts, crashes, workers and keys; and their retention."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from server.settings import Settings
from server.state import ServerState
from server.store.conversations import StoredItem
from server.store.database import Database
from server.store.presence import Presence
from server.store.responses import ResponseStore, StoredEvent, StoredResponse
from server.store.retention import purge
from tests.servers import MODEL, Server, running_server

PATH = "/v1/responses"
KEYS = {"anna": "sk-quire-test-anna", "ben": "sk-quire-test-ben"}
STUB = (
    "--load-format",
    "stub",
    "--stub-step-ms",
    "5",
)  # tokens that cost nothing, but take a while


def entry(name: str, key: str) -> dict[str, Any]:
    digest = hashlib.sha256(key.encode()).hexdigest()
    return {"name": name, "sha256": digest, "scopes": ["inference", "metrics"]}


def make(server: Server, key: str | None = None, **fields: Any) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else server.headers
    body = {"model": MODEL, "input": "Hello", "max_output_tokens": 4, **fields}
    answer = httpx.post(server.url + PATH, json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def endless(server: Server) -> dict[str, Any]:
    fields = {"ignore_eos": True, "max_output_tokens": 3000, "stream": False}
    return make(server, background=True, **fields)


def wait_for(server: Server, id: str, *statuses: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (answer := server.get(f"{PATH}/{id}").json())["status"] not in statuses:
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)
    return answer


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("responses")
    keys = {"keys": [entry(name, key) for name, key in KEYS.items()]}
    (home / "keys.yaml").write_text(yaml.safe_dump(keys))
    return home


async def test_responses_outlive_their_server(home: Path) -> None:
    flags = (*STUB, "--data-dir", str(home / "data"))
    with running_server(home / "log", *flags) as server:
        kept = make(server, metadata={"a": "b"})
        lost = endless(server)
        wait_for(server, lost["id"], "in_progress")
        server.process.kill()
        server.process.wait()
    with running_server(home / "log", *flags, "--shutdown-timeout-s", "0.2") as server:
        assert server.get(f"{PATH}/{kept['id']}").json() == kept
        listed = server.get(f"{PATH}/{kept['id']}/input_items").json()
        assert listed["data"][0]["content"][0]["text"] == "Hello"
        follow = make(server, previous_response_id=kept["id"])
        assert follow["usage"]["input_tokens"] > kept["usage"]["input_tokens"]
        failed = server.get(f"{PATH}/{lost['id']}").json()
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        last = server.get(f"{PATH}/{lost['id']}?stream=true").text.strip().split("\n\n")[-1]
        assert last.startswith("event: response.failed")
        cut = endless(server)
        wait_for(server, cut["id"], "in_progress")
        assert server.stop() == 0  # it was given time to end, and then failed
    database = Database(home / "data")
    stored = await ResponseStore(database).find(cut["id"], "")
    assert stored is not None
    assert (stored.status, b"server_error" in stored.body) == ("failed", True)
    await database.close()


@pytest.fixture(scope="module")
def shared(home: Path) -> Iterator[Server]:
    """Two API workers, and a key for each of two tenants."""
    flags = ("--api-workers", "2", "--api-key-file", str(home / "keys.yaml"))
    data = ("--data-dir", str(home / "shared"))
    with running_server(home / "log2", *STUB, *flags, *data, key=KEYS["anna"]) as server:
        yield server


def each_worker(server: Server, method: str, path: str) -> list[httpx.Response]:
    """The answers over many connections: in all likelihood from every worker."""
    return [
        httpx.request(method, server.url + path, headers=server.headers, timeout=60)
        for _ in range(12)
    ]


def test_every_worker_knows_every_response(shared: Server) -> None:
    kept = make(shared)
    assert all(a.json() == kept for a in each_worker(shared, "GET", f"{PATH}/{kept['id']}"))
    job = endless(shared)
    statuses = {a.json()["status"] for a in each_worker(shared, "GET", f"{PATH}/{job['id']}")}
    assert statuses <= {"queued", "in_progress"}
    # Whichever worker is asked to cancel it, it ends everywhere.
    cancelled = each_worker(shared, "POST", f"{PATH}/{job['id']}/cancel")
    assert {a.json()["status"] for a in cancelled} == {"cancelled"}
    shared.wait_idle()
    done = make(shared, background=True, max_output_tokens=40, ignore_eos=True)
    streams = each_worker(shared, "GET", f"{PATH}/{done['id']}?stream=true")
    assert len({a.text for a in streams}) == 1
    assert "event: response.incomplete" in streams[0].text  # at its token limit


def test_a_response_belongs_to_its_key(shared: Server) -> None:
    mine = make(shared, KEYS["anna"])
    item = mine["output"][0]["id"]
    headers = {"authorization": f"Bearer {KEYS['ben']}"}
    for method, path in (
        ("GET", mine["id"]),
        ("GET", f"{mine['id']}/input_items"),
        ("DELETE", mine["id"]),
        ("POST", f"{mine['id']}/cancel"),
    ):
        answer = httpx.request(method, f"{shared.url}{PATH}/{path}", headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
    for fields, param in (
        ({"previous_response_id": mine["id"]}, "previous_response_id"),
        ({"input": [{"type": "item_reference", "id": item}]}, "input.0.id"),
    ):
        body = {"model": MODEL, "input": "x", **fields}
        answer = httpx.post(shared.url + PATH, json=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert shared.get(f"{PATH}/{mine['id']}").status_code == 200


# ---------------------------------------------------------------- without a server


def stored(id: str, *, created_at: int = 0, previous: str | None = None) -> StoredResponse:
    return StoredResponse(id, "t", created_at, "completed", False, previous, b"{}")


async def test_old_responses_go_unless_a_younger_one_needs_them(tmp_path: Path) -> None:
    day = 86_400
    now = int(time.time())
    state = ServerState(Settings(data_dir=tmp_path), None, None)
    await purge(state)
    assert not os.listdir(tmp_path)  # deleting creates no files
    store = ResponseStore(state.database)
    old = now - 31 * day
    for response in (
        stored("a", created_at=old),
        stored("b", created_at=old, previous="a"),
        stored("c", created_at=now, previous="b"),
        stored("x", created_at=old),
        stored("y", created_at=old, previous="x"),
    ):
        await store.add(response, [StoredItem(f"item-{response.id}", b"1")])
    await purge(state)
    assert [await store.find(id, "t") is not None for id in "abcxy"] == [
        *(True, True, True),
        *(False, False),
    ]
    assert await store.find_item("item-x", "t") is None
    assert [link.id for link in await store.chain("c", "t") or ()] == ["a", "b", "c"]
    await state.database.close()


async def test_an_end_is_kept_once(tmp_path: Path) -> None:
    database = Database(tmp_path)
    store = ResponseStore(database)
    running = StoredResponse("r", "t", 1, "queued", True, None, b"{}")
    await store.add(running, [])
    assert await store.record_progress(
        "r", "in_progress", [StoredEvent(0, b"0"), StoredEvent(1, b"1")]
    )
    ended = StoredResponse("r", "t", 1, "completed", True, None, b"{}", [StoredItem("i", b"2")])
    assert await store.record_end(ended, [StoredEvent(2, b"2")])
    assert not await store.record_end(running, [])
    assert not await store.record_progress("r", "in_progress", [StoredEvent(3, b"3")])
    assert await store.find("r", "t") == ended
    assert await store.events("r", 0) == [StoredEvent(1, b"1"), StoredEvent(2, b"2")]
    assert await store.delete("r", "t")
    assert await store.events("r", -1) == []
    await database.close()


async def test_who_is_gone_is_seen_to_be(tmp_path: Path) -> None:
    first, second = Database(tmp_path), Database(tmp_path)
    await ResponseStore(first).add(StoredResponse("r", "t", 1, "queued", True, None, b"{}"), [])
    found = await ResponseStore(second).find("r", "t")
    assert found is not None
    assert not found.is_orphaned
    await first.close()
    found = await ResponseStore(second).find("r", "t")
    assert found is not None
    assert found.is_orphaned
    await second.close()


def test_the_files_of_the_dead_are_swept(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    (tmp_path / "processes" / "gone").touch()
    first = Presence(tmp_path)
    second = Presence(tmp_path)
    assert sorted(os.listdir(tmp_path / "processes")) == sorted([first.name, second.name])
    assert first.is_alive(second.name)
    second.release()
    assert not first.is_alive(second.name)
    first.release()
    assert os.listdir(tmp_path / "processes") == []
