"""The batch runner without a server: the effects of disks, clocks, faults and rivals."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import errno
import json
import os
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from engine.errors import EngineAsleep, EngineDead, OutOfMemory
from server.batches import line_execution, runner
from server.batches.environment import BatchEnvironment, SharedSlots
from server.batches.lock import BatchLock
from server.batches.offline import run_file, validate_file
from server.batches.runner import BatchRunner
from server.errors import ApiError
from server.settings import Settings
from server.store.batches import ACTIVE_STATUSES, BatchStore, LineResult, StoredBatch
from server.store.database import Database, StoreError
from server.store.files import FileStore, StoredFile, new_file_id
from tests.server.asgi import FakeEngine
from tests.servers import MODEL

ENDPOINT = "/v1/completions"
Answer = Callable[[dict[str, Any]], Any]


class Place:
    """A data directory with a runner, as a server has."""

    def __init__(self, directory: Path, answer: Answer, *, limit: int = 4) -> None:
        self.database = Database(directory)
        self.files = FileStore(self.database)
        self.batches = BatchStore(self.database)
        self.asked: list[int] = []
        self.is_busy = False
        self.most = 0
        self._now = 0

        async def counted(body: dict[str, Any]) -> Any:
            self.asked.append(body["n"])
            self._now += 1
            self.most = max(self.most, self._now)
            try:
                return await answer(body)
            finally:
                self._now -= 1

        self.bench = BatchEnvironment(
            files=self.files,
            batches=self.batches,
            slots=SharedSlots(limit, lambda: self.is_busy),
            handler_for=lambda batch: counted,
            has_model=lambda name: name == "m",
            max_line_bytes=2**20,
        )

    @contextlib.asynccontextmanager
    async def running(self, may_run: Callable[[], bool] = lambda: True) -> AsyncIterator[None]:
        task = asyncio.create_task(BatchRunner(self.bench, may_run).run())
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await self.database.close()

    async def start(self, num_lines: int) -> StoredBatch:
        lines = [
            {"custom_id": f"{n}", "method": "POST", "url": ENDPOINT, "body": {"model": "m", "n": n}}
            for n in range(num_lines)
        ]
        text = b"".join(msgspec.json.encode(line) + b"\n" for line in lines)
        partial = await self.files.new_partial()
        partial.write_bytes(text)
        file = StoredFile(
            id=new_file_id(),
            tenant="t",
            filename="in",
            purpose="batch",
            num_bytes=len(text),
            created_at=0,
        )
        await self.files.add(file, partial)
        now = int(time.time())
        batch = StoredBatch(
            id=f"batch_{num_lines}_{file.id}",
            tenant="t",
            endpoint=ENDPOINT,
            input_file_id=file.id,
            completion_window="24h",
            created_at=now,
            expires_at=now + 3600,
        )
        await self.batches.create(batch)
        return batch

    async def has_asked(self, number: int) -> None:
        while len(self.asked) < number:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)

    async def end_of(self, batch: StoredBatch, limit_s: float = 30) -> StoredBatch:
        async with asyncio.timeout(limit_s):
            while True:
                found = await self.batches.get(batch.tenant, batch.id)
                assert found is not None
                if found.status not in ACTIVE_STATUSES:
                    return found
                await asyncio.sleep(0.01)

    async def lines(self, file_id: str | None) -> list[dict[str, Any]]:
        file = await self.files.get("t", file_id or "")
        assert file is not None
        text = self.files.path(file).read_text()
        assert len(text) == file.num_bytes
        return [json.loads(line) for line in text.splitlines()]


async def echo(body: dict[str, Any]) -> Any:
    await asyncio.sleep(0.001)
    return {"n": body["n"], "usage": {"prompt_tokens": 2, "completion_tokens": 3}}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_execution, "_INITIAL_BACKOFF_S", 0.001)
    monkeypatch.setattr(line_execution, "_MAX_BACKOFF_S", 0.01)


async def test_faults_that_pass_are_waited_for(tmp_path: Path) -> None:
    tries: dict[int, int] = {}

    async def answer(body: dict[str, Any]) -> Any:
        n = body["n"]
        tries[n] = tries.get(n, 0) + 1
        if n == 1 and tries[n] < 20:
            raise EngineDead("restarting")
        if n == 2 and tries[n] < 3:
            raise OutOfMemory("full")
        if n == 5 and tries[n] < 20:
            raise EngineAsleep("asleep")
        if n == 3:
            raise RuntimeError("a secret of ours")
        if n == 4:
            raise ApiError(400, "no", param="n")
        return await echo(body)

    place = Place(tmp_path, answer)
    async with place.running():
        batch = await place.end_of(await place.start(6))
        assert (batch.status, batch.num_completed, batch.num_failed) == ("completed", 4, 2)
        assert (batch.input_tokens, batch.output_tokens) == (8, 12)
        answers = await place.lines(batch.output_file_id)
        assert [line["response"]["body"]["n"] for line in answers] == [0, 1, 2, 5]
        failed = {line["custom_id"]: line for line in await place.lines(batch.error_file_id)}
        assert {key: line["response"]["status_code"] for key, line in failed.items()} == {
            "3": 500, "4": 400,
        }  # fmt: skip
        assert "secret" not in json.dumps(failed)
        assert tries[3] == 5


async def test_two_servers_on_one_directory_share_the_work_and_no_line(tmp_path: Path) -> None:
    places = [Place(tmp_path, echo), Place(tmp_path, echo)]
    async with places[0].running(), places[1].running():
        batches = [await place.start(40) for place in places for _ in range(3)]
        for batch in batches:
            ended = await places[0].end_of(batch)
            assert (ended.status, ended.num_completed) == ("completed", 40)
            answers = await places[1].lines(ended.output_file_id)
            assert [line["custom_id"] for line in answers] == [str(n) for n in range(40)]
        assert len(places[0].asked) + len(places[1].asked) == 6 * 40, "a line was run twice"


async def test_an_interrupted_runner_is_gone_on_with(tmp_path: Path) -> None:
    first = Place(tmp_path, echo)
    async with first.running():
        batch = await first.start(200)
        await asyncio.wait_for(first.has_asked(50), 30)
    second = Place(tmp_path, echo)
    kept = await second.batches.finished_lines(batch.id)
    assert 40 <= len(kept) < 200
    async with second.running():
        ended = await second.end_of(batch)
        assert (ended.status, ended.num_completed, ended.num_failed) == ("completed", 200, 0)
        assert len(await second.lines(ended.output_file_id)) == 200
    # Line numbers start from one.
    assert sorted(second.asked) == [n for n in range(200) if n + 1 not in kept]


async def test_so_many_at_once_and_fewer_while_others_are_served(tmp_path: Path) -> None:
    place = Place(tmp_path, echo, limit=8)
    async with place.running():
        await place.end_of(await place.start(100))
        assert place.most == 8
        place.is_busy, place.most = True, 0
        await place.end_of(await place.start(20))
        assert place.most == 2


async def test_batches_take_turns(tmp_path: Path) -> None:
    place = Place(tmp_path, echo, limit=1)
    async with place.running():
        long = await place.start(2000)
        short = await place.end_of(await place.start(5))
        assert short.status == "completed"
        now = await place.batches.get("t", long.id)
        assert now is not None
        assert now.status == "in_progress"


async def test_an_input_that_is_gone_fails_its_batch(tmp_path: Path) -> None:
    place = Place(tmp_path, echo)
    batch = await place.start(3)
    file = await place.files.get("t", batch.input_file_id)
    assert file is not None
    await place.files.delete(file)
    async with place.running():
        ended = await place.end_of(batch)
        assert ended.status == "failed"
        assert "file_not_found" in (ended.errors or "")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of two megabytes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("file systems cannot be mounted here")
    try:
        yield disk
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)


async def test_a_full_disk_fails_the_batch_and_leaves_no_half_file(
    small_disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The results do not fit: the batch fails as soon as that itself can be written."""

    async def long(body: dict[str, Any]) -> Any:
        return {"n": body["n"], "text": "x" * 40_000}

    place = Place(small_disk, long)
    async with place.running():
        begun = await place.start(200)
        async with asyncio.timeout(60):
            while "storage failed" not in caplog.text:  # noqa: ASYNC110 - nothing tells of it
                await asyncio.sleep(0.01)
        remount = ["mount", "-o", "remount,size=64m", str(small_disk)]
        await asyncio.to_thread(subprocess.run, remount, check=True)
        batch = await place.end_of(begun)
        assert batch.status == "failed"
        assert "storage_failed" in (batch.errors or "")
        assert (batch.output_file_id, batch.error_file_id) == (None, None)
        left = {path.name for path in (small_disk / "files").iterdir()}
        assert left == {batch.input_file_id}


async def test_an_output_that_cannot_be_kept_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(file: StoredFile, partial: Path) -> None:
        raise StoreError("database or disk is full")

    place = Place(tmp_path, echo)
    async with place.running():
        batch = await place.start(3)
        monkeypatch.setattr(place.files, "add", full)
        ended = await place.end_of(batch)
        assert ended.status == "failed"
        assert "disk is full" in (ended.errors or "")
        left = {path.name for path in (tmp_path / "files").iterdir()}
        assert left == {batch.input_file_id}


async def test_lines_of_a_file_that_is_answered_offline_may_name_adapters(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    lines = [
        {
            "custom_id": name,
            "method": "POST",
            "url": ENDPOINT,
            "body": {"model": name, "prompt": "a"},
        }
        for name in ("one", "two")
    ]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = await validate_file(source, Settings.load({"loras": ["one=/adapters/one"]}))
    (error,) = found.errors
    assert (error.line, error.code) == (2, "model_not_found")


async def test_answers_of_a_run_without_a_server_may_go_to_a_pipe(tmp_path: Path) -> None:
    source, pipe = tmp_path / "in.jsonl", tmp_path / "pipe"
    body = {"model": MODEL, "prompt": "a", "max_tokens": 1}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    source.write_text(json.dumps(line))
    os.mkfifo(pipe)
    engine: Any = FakeEngine()
    results: list[LineResult] = []
    engine.loaded.set()
    reading = asyncio.create_task(asyncio.to_thread(pipe.read_bytes))
    running = asyncio.create_task(run_file(Settings(), engine, source, pipe, set(), results.append))
    (await engine.next_stream()).put(300, end="length")
    await running
    assert json.loads(await reading)["custom_id"] == "a"
    assert [result.ok for result in results] == [True]


async def test_a_batch_made_while_none_may_run_waits_without_blocking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example while the model loads, or the engine sleeps: nothing else would run either."""
    place, may_run = Place(tmp_path, echo), False
    wait, num_waits = asyncio.Event.wait, 0

    async def counted(event: asyncio.Event) -> bool:
        nonlocal num_waits
        num_waits += event is place.batches.updated
        assert num_waits < 10, "it does not wait"
        return await wait(event)

    async with place.running(lambda: may_run):
        monkeypatch.setattr(asyncio.Event, "wait", counted)
        batch = await place.start(2)
        await asyncio.sleep(0.01)
        assert not place.asked
        monkeypatch.undo()
        may_run = True
        place.batches.updated.set()
        assert (await place.end_of(batch)).status == "completed"


async def test_a_line_that_has_become_too_long_fails_its_batch(tmp_path: Path) -> None:
    """A restart may lower the limit under which a batch was accepted."""
    place = Place(tmp_path, echo)
    batch = await place.start(2)
    changes = {"num_lines": 2, "in_progress_at": batch.created_at}
    await place.batches.transition(batch.id, ["validating"], "in_progress", **changes)
    place.bench = dataclasses.replace(place.bench, max_line_bytes=20)
    async with place.running():
        ended = await place.end_of(batch)
    assert ended.status == "failed"
    (told,) = json.loads(ended.errors or "")
    assert (told["code"], told["line"]) == ("line_too_long", 1)


async def test_a_batch_that_cannot_be_run_is_tried_again_at_the_next_poll(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_POLL_S", 3600.0)
    place = Place(tmp_path, echo)
    num_tries = 0

    def fail(batch: StoredBatch) -> Any:
        nonlocal num_tries
        num_tries += 1
        raise RuntimeError("no handler")

    place.bench = dataclasses.replace(place.bench, handler_for=fail)
    await place.start(1)
    async with place.running():
        while "could not be run" not in caplog.text:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.05)
        # Once more if its own step to "in_progress" is noticed only after it has failed.
        assert num_tries <= 2


async def test_a_poll_that_fails_is_not_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(runner, "_POLL_S", 0.001)
    place = Place(tmp_path, echo)
    sweep, has_failed = place.files.sweep, False

    async def fail_once() -> None:
        nonlocal has_failed
        if not has_failed:
            has_failed = True
            raise OSError("no more files can be opened")
        await sweep()

    monkeypatch.setattr(place.files, "sweep", fail_once)
    batch = await place.start(2)
    async with place.running():
        assert (await place.end_of(batch)).status == "completed"
    assert "no more files can be opened" in caplog.text


@pytest.mark.parametrize(
    ("call", "number", "is_held"),
    [
        ("os.open", errno.EROFS, True),
        ("os.open", errno.EMFILE, False),
        ("fcntl.flock", errno.EWOULDBLOCK, False),
        ("fcntl.flock", errno.ENOTSUP, True),
    ],
)
def test_who_may_work_on_a_batch_where_there_is_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int, is_held: bool
) -> None:
    """On one's own directory everyone; but nobody because of a fault that passes."""

    def fail(*_: Any) -> Any:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"server.batches.lock.{call}", fail)
    assert (BatchLock.acquire(tmp_path, "batch_1") is not None) == is_held
