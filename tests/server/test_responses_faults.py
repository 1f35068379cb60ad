"""Responses when something fails: with a fake engine that fails on demand."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.errors import EngineAsleep, EngineDead, RequestFailed
from server.openai.responses.background import BackgroundJob
from server.store.database import FILE_NAME
from server.store.responses import ResponseStore, StoredEvent, StoredResponse
from tests.server.asgi import Application, Exchange, running_app

PATH = "/v1/responses"
LIMITS = {"max_num_seqs": 1, "max_queued_requests": 0}


@pytest.fixture
async def application(tmp_path: Path) -> AsyncIterator[Application]:
    async with running_app(data_dir=tmp_path, **LIMITS) as application:
        yield application


def ask(application: Application, **fields: Any) -> Exchange:
    return application.post(PATH, input="Hi", **fields)


def events_of(exchange: Exchange) -> list[dict[str, Any]]:
    blocks = exchange.body.decode().strip().split("\n\n")
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def stored(application: Application, id: str) -> dict[str, Any]:
    return json.loads((await application.get(f"{PATH}/{id}")).body)


async def ended(application: Application, id: str) -> dict[str, Any]:
    while True:
        response = await stored(application, id)
        if response["status"] not in ("queued", "in_progress"):
            return response
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("error", [RequestFailed("NaN"), EngineDead("gone")])
async def test_a_stream_that_fails_says_so_and_is_kept_as_failed(
    application: Application, error: Any
) -> None:
    exchange = ask(application, stream=True)
    stream = await application.engine.next_stream()
    stream.put(300)
    await exchange.until(b"response.output_text.delta")
    stream.fail(error)
    await exchange.done()
    last = events_of(exchange)[-1]
    assert last["type"] == "response.failed"
    response = last["response"]
    assert response["error"]["code"] == "server_error"
    assert "NaN" not in response["error"]["message"]
    assert response["output"][0]["status"] == "incomplete"
    assert await stored(application, response["id"]) == response


async def test_an_answer_that_fails_has_a_status_of_its_own(application: Application) -> None:
    exchange = ask(application)
    (await application.engine.next_stream()).fail(RequestFailed("NaN"))
    assert (await exchange.done()).status == 500


async def test_what_cannot_begin_has_a_status_of_its_own(application: Application) -> None:
    first = ask(application)
    await application.engine.next_stream()
    refused = await ask(application, stream=True).done()
    assert (refused.status, refused.error["code"]) == (503, "server_is_overloaded")
    first.hang_up()
    await first.done()


@pytest.mark.parametrize("streams", [False, True])
async def test_a_client_that_leaves_takes_its_response_along(
    application: Application, streams: bool
) -> None:
    exchange = ask(application, stream=streams)
    stream = await application.engine.next_stream()
    stream.put(300)
    if streams:
        await exchange.until(b"response.output_text.delta")
    exchange.hang_up()
    await exchange.done()
    assert stream.aborted
    assert application.state.admission.num_live == 0


async def test_the_end_of_the_server_is_told(application: Application) -> None:
    exchange = ask(application, stream=True)
    stream = await application.engine.next_stream()
    stream.put(300)
    await exchange.until(b"response.output_text.delta")
    exchange.task.cancel()
    await exchange.done()
    last = events_of(exchange)[-1]
    assert (last["type"], last["code"]) == ("error", "engine_unavailable")


@pytest.mark.parametrize("by_request", [False, True])
async def test_who_follows_a_response_is_told_the_end_of_the_server(
    application: Application, by_request: bool
) -> None:
    exchange = ask(application, background=True, stream=by_request)
    stream = await application.engine.next_stream()
    stream.put(300)
    if not by_request:
        id = json.loads((await exchange.done()).body)["id"]
        exchange = application.request("GET", f"{PATH}/{id}?stream=true")
    await exchange.until(b"response.output_text.delta")
    exchange.task.cancel()
    await exchange.done()
    told = [event["type"] for event in events_of(exchange)]  # which are numbered in order
    assert told[-2:] == ["response.output_text.delta", "error"]


async def test_who_follows_a_response_is_told_that_another_worker_has_deleted_it(
    application: Application,
) -> None:
    queued = json.loads((await ask(application, background=True).done()).body)
    store = ResponseStore(application.state.database)
    body = json.dumps(queued | {"id": "resp_other"}).encode()  # no job of this process
    await store.add(StoredResponse("resp_other", "", 1, "in_progress", True, None, body), [])
    created = b'event: response.created\ndata: {"type":"response.created","sequence_number":0}\n\n'
    await store.record_progress("resp_other", "in_progress", [StoredEvent(0, created)])
    exchange = application.request("GET", f"{PATH}/resp_other?stream=true")
    await exchange.until(b"response.created")
    assert await store.delete("resp_other", "")
    last = events_of(await exchange.done())[-1]
    assert (last["type"], last["code"]) == ("error", "not_found")


async def test_a_background_response_waits_for_its_place(application: Application) -> None:
    first = ask(application)
    stream = await application.engine.next_stream()
    queued = json.loads((await ask(application, background=True).done()).body)
    assert queued["status"] == "queued"
    assert len(application.engine.streams) == 1
    stream.put(300, end="stop")
    await first.done()
    second = await application.engine.next_stream()
    second.put(301, end="stop")
    assert (await ended(application, queued["id"]))["status"] == "completed"
    crowd = [ask(application, background=True) for _ in range(2)]
    statuses = sorted([(await exchange.done()).status for exchange in crowd])
    assert statuses == [200, 503]  # how many wait is bounded


async def test_a_background_response_waits_for_an_engine_that_sleeps(
    application: Application,
) -> None:
    application.engine.activity = "asleep"
    queued = json.loads((await ask(application, background=True).done()).body)
    await asyncio.sleep(0.05)
    assert (await stored(application, queued["id"]))["status"] == "queued"
    application.engine.activity = "serving"
    (await application.engine.next_stream()).put(300, end="stop")
    assert (await ended(application, queued["id"]))["status"] == "completed"


@pytest.mark.parametrize("has_begun", [False, True])
async def test_a_background_response_whose_engine_falls_asleep_waits_if_nothing_was_told(
    application: Application, has_begun: bool
) -> None:
    queued = json.loads((await ask(application, background=True).done()).body)
    stream = await application.engine.next_stream()
    if has_begun:
        stream.put(300)
    stream.fail(EngineAsleep("The server is being put to sleep; it must be woken."))
    if has_begun:
        assert (await ended(application, queued["id"]))["status"] == "failed"
        return
    (await application.engine.next_stream()).put(301, end="stop")
    response = await ended(application, queued["id"])
    assert response["status"] == "completed"
    assert response["output"]


async def test_a_background_response_waits_for_an_engine_that_is_restarted(
    application: Application,
) -> None:
    application.engine.alive = False
    queued = json.loads((await ask(application, background=True).done()).body)
    await asyncio.sleep(0.05)
    assert (await stored(application, queued["id"]))["status"] == "queued"
    application.engine.alive = True
    (await application.engine.next_stream()).put(300, end="stop")
    assert (await ended(application, queued["id"]))["status"] == "completed"


async def test_a_background_response_does_not_wait_for_an_engine_that_was_given_up(
    application: Application,
) -> None:
    application.engine.alive = False
    queued = json.loads((await ask(application, background=True).done()).body)
    application.engine.dead = True
    response = await ended(application, queued["id"])
    assert response["status"] == "failed"


async def test_a_background_response_that_fails(application: Application) -> None:
    queued = json.loads((await ask(application, background=True).done()).body)
    (await application.engine.next_stream()).fail(EngineDead("gone"))
    response = await ended(application, queued["id"])
    assert response["status"] == "failed"
    assert response["error"]["code"] == "server_error"
    assert application.state.requests_in_flight == 0


async def test_a_background_response_that_is_deleted_ends(application: Application) -> None:
    queued = json.loads((await ask(application, background=True).done()).body)
    stream = await application.engine.next_stream()
    path = f"{PATH}/{queued['id']}"
    assert (await application.request("DELETE", path).done()).status == 200
    for _ in range(1000):
        if not application.state.requests_in_flight:
            break
        await asyncio.sleep(0.01)
    assert stream.aborted
    assert (await application.get(path)).status == 404


async def test_an_answer_is_not_lost_because_it_cannot_be_kept(
    application: Application, tmp_path: Path
) -> None:
    first = ask(application)
    (await application.engine.next_stream()).put(300, end="stop")
    assert json.loads((await first.done()).body)["store"] is True
    with sqlite3.connect(tmp_path / FILE_NAME) as db:
        db.execute("DROP TABLE response_items")
    db.close()
    for streams in (False, True):
        exchange = ask(application, stream=streams)
        (await application.engine.next_stream()).put(300, end="stop")
        await exchange.done()
        assert exchange.status == 200
        response = events_of(exchange)[-1]["response"] if streams else json.loads(exchange.body)
        assert (response["status"], response["store"]) == ("completed", False)
    refused = await ask(application, background=True).done()
    assert (refused.status, refused.error["code"]) == (503, "storage_unavailable")


async def test_an_end_that_is_being_kept_cannot_be_cancelled(
    application: Application, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a client that cancels once more, as the first time takes long."""
    exchange = await ask(application, background=True).done()
    id = json.loads(exchange.body)["id"]
    stream = await application.engine.next_stream()
    record_end, cancel = ResponseStore.record_end, BackgroundJob.cancel
    is_asked, is_cancelled, may_go_on = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def noted(job: BackgroundJob) -> None:
        cancel(job)
        is_cancelled.set()

    async def slow(*arguments: Any) -> None:
        is_asked.set()
        await may_go_on.wait()
        await record_end(*arguments)

    monkeypatch.setattr(ResponseStore, "record_end", slow)
    monkeypatch.setattr(BackgroundJob, "cancel", noted)
    stream.put(300, end="stop")
    await is_asked.wait()
    cancelling = application.request("POST", f"{PATH}/{id}/cancel")
    await is_cancelled.wait()
    may_go_on.set()
    await cancelling.done()
    assert json.loads(cancelling.body)["status"] == "completed"
