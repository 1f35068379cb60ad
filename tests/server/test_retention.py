"""Stored data is deleted after a while, or if there is too much of it, but never while in use."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from server.settings import Settings
from server.state import ServerState
from server.store import conversations, files
from server.store.batches import Status, StoredBatch
from server.store.chats import ChatStore, StoredChat
from server.store.conversations import ConversationStore, StoredConversation, StoredItem
from server.store.database import Database, Schema
from server.store.files import StoredFile, new_file_id
from server.store.responses import ResponseStore, StoredResponse
from server.store.retention import purge

DAY, HOUR, KIB = 86_400, 3600, 1024
NOW = int(time.time())
MakeState = Callable[..., ServerState]


@pytest.fixture
async def make_state(tmp_path: Path) -> AsyncIterator[MakeState]:
    states: list[ServerState] = []

    def make(**settings: Any) -> ServerState:
        settings.setdefault("data_dir", tmp_path)
        states.append(ServerState(Settings(**settings), None, None))
        return states[-1]

    yield make
    for state in states:
        await state.database.close()


async def converse(state: ServerState, id: str, age_s: int, num_bytes: int = 10) -> None:
    """A conversation that was last used this long ago."""
    store = ConversationStore(state.database)
    items = [StoredItem(f"item-{id}", b"x" * num_bytes)]
    await store.create(StoredConversation(id, "t", NOW - age_s, b"{}"), items)
    await set_used(state, conversations._SCHEMA, id, age_s)


async def set_used(state: ServerState, schema: Schema, id: str, age_s: int) -> None:
    def work(db: sqlite3.Connection) -> None:
        update = f"UPDATE {schema.name} SET used_at = ? WHERE id = ?"
        assert db.execute(update, (NOW - age_s, id)).rowcount == 1

    await state.database.tables(schema).write(work)


async def upload(state: ServerState, age_s: int, purpose: str = "batch", **more: Any) -> StoredFile:
    partial = await state.files.new_partial()
    partial.write_bytes(more.pop("contents", b"{}"))
    file = StoredFile(
        id=new_file_id(),
        tenant="t",
        filename="in.jsonl",
        purpose=purpose,
        num_bytes=partial.stat().st_size,
        created_at=NOW - age_s,
        **more,
    )
    await state.files.add(file, partial)
    return file


def response(id: str, conversation: str, status: str) -> StoredResponse:
    return StoredResponse(
        id, "t", NOW - 40 * DAY, status, True, None, b"{}", conversation_id=conversation
    )


async def are_there(state: ServerState, ids: str) -> str:
    """Which of these conversations remain, without using them."""
    query = "SELECT id FROM conversations"
    tables = state.database.tables(conversations._SCHEMA)
    left = await tables.read(lambda db: {id for (id,) in db.execute(query)})
    return "".join(id for id in ids if id in left)


async def test_conversations_go_when_they_have_not_been_used_for_long(
    make_state: MakeState,
) -> None:
    state = make_state(store_days=30)
    store = ConversationStore(state.database)
    for id, age_s in (("a", 31), ("b", 29), ("c", 31), ("d", 31), ("e", 31)):
        await converse(state, id, age_s * DAY)
    # Each of these counts as a use.
    assert await store.find("c", "t") is not None
    assert await store.append("d", "t", [StoredItem("more", b"1")])
    assert await store.update_metadata("e", "somebody else", b"{}") is None  # and this does not
    await purge(state)
    assert await are_there(state, "abcde") == "bcd"
    assert await store.find_item("item-a", "t") is None


async def test_a_conversation_in_which_a_response_is_made_stays(make_state: MakeState) -> None:
    state = make_state()
    store = ResponseStore(state.database)
    for id in "abc":
        await converse(state, id, 40 * DAY)
    await store.add(response("r1", "a", "in_progress"), [])
    await store.add(response("r2", "b", "completed"), [])
    await set_used(state, conversations._SCHEMA, "b", 40 * DAY)
    await purge(state)
    assert await are_there(state, "abc") == "a"
    answer = StoredResponse(
        *("r1", "t", NOW, "completed", True, None, b"{}"),
        output=[StoredItem("said", b"1")],
        conversation_id="a",
    )
    assert await store.record_end(answer, [])
    page = await ConversationStore(state.database).page("a", after=None, limit=9, ascending=True)
    assert page is not None
    assert [item.id for item in page.items] == ["item-a", "said"]


async def test_what_nobody_makes_any_more_is_forgotten(
    make_state: MakeState, tmp_path: Path
) -> None:
    dead = ServerState(Settings(data_dir=tmp_path), None, None)
    await converse(dead, "a", 40 * DAY)
    await ResponseStore(dead.database).add(response("r", "a", "in_progress"), [])
    await dead.database.close()
    state = make_state()
    await purge(state)
    assert await ResponseStore(state.database).find("r", "t") is None
    assert await are_there(state, "a") == ""


async def test_files_of_batches_go_and_others_stay(make_state: MakeState) -> None:
    state = make_state()
    old = 31 * DAY
    unused, made = await upload(state, old), await upload(state, old, "batch_output")
    messages = await upload(state, old, "message_batch")
    own = await upload(state, old, "user_data")
    ends = await upload(state, old, expires_at=NOW + DAY)
    running, ended = await upload(state, old), await upload(state, old)
    statuses: tuple[Status, Status] = ("in_progress", "completed")
    for id, input_file, status in zip(("b1", "b2"), (running, ended), statuses, strict=True):
        batch = StoredBatch(
            id=id,
            tenant="t",
            endpoint="/v1/completions",
            input_file_id=input_file.id,
            completion_window="24h",
            status=status,
            created_at=NOW - old,
            completed_at=NOW - old if status == "completed" else None,
            expires_at=NOW,
        )
        await state.batches.create(batch)
    read = await upload(state, old)
    assert await state.files.get("t", read.id) is not None  # a use
    await purge(state)
    left = await state.files.list("t", purpose=None, after=None, limit=99, order="asc")
    assert [file.id for file in left or []] == [own.id, ends.id, running.id, read.id]
    assert not state.files.path(unused).exists()
    assert not state.files.path(made).exists()
    assert not state.files.path(messages).exists()
    assert state.files.path(running).exists()
    assert [await state.batches.get("t", id) is not None for id in ("b1", "b2")] == [True, False]


async def test_what_was_used_longest_ago_goes_when_there_is_too_much(
    make_state: MakeState,
) -> None:
    state = make_state(max_store_bytes=1024 * KIB, store_days=0)
    ages = dict(zip("abcdefgh", (9, 3, 8, 2, 7, 6, 5, 4), strict=True))
    for id, age in ages.items():
        await converse(state, id, age * DAY, 200 * KIB)
    file = await upload(state, 10 * DAY, "user_data", contents=b"x" * 100 * KIB)
    await set_used(state, files._SCHEMA, file.id, 10 * DAY)
    chats = ChatStore(state.database)
    await chats.add(StoredChat("chat", "t", NOW - 11 * DAY, "m", b"x" * 100 * KIB), [])
    await purge(state)
    left = await are_there(state, "abcdefgh")
    assert left == "bdgh"  # a database of a little more than four of them
    assert await chats.find("chat", "t") is None
    assert not state.files.path(file).exists()
    total = await state.database.num_bytes() + await state.files.num_bytes()
    assert total <= 1024 * KIB
    await purge(state)
    assert await are_there(state, "abcdefgh") == left


async def test_what_was_used_within_the_hour_stays_however_much_it_is(
    make_state: MakeState, caplog: pytest.LogCaptureFixture
) -> None:
    state = make_state(max_store_bytes=256 * KIB)
    await converse(state, "a", HOUR // 2, 900 * KIB)
    await converse(state, "b", 2 * HOUR)
    await purge(state)
    assert await are_there(state, "ab") == "a"
    assert "and in use" in caplog.text


async def test_without_limits_everything_stays(make_state: MakeState) -> None:
    state = make_state(max_store_bytes=0, store_days=0)
    await converse(state, "a", 9999 * DAY, 10 * KIB)
    await purge(state)
    assert await are_there(state, "a") == "a"


async def test_what_an_older_server_stored_counts_as_used_when_it_is_first_seen(
    make_state: MakeState, tmp_path: Path
) -> None:
    old = Database(tmp_path)
    first = Schema("conversations", conversations._SCHEMA.steps[:1])
    insert = "INSERT INTO conversations VALUES ('a', 't', 1, '{}')"
    await old.tables(first).write(lambda db: db.execute(insert))
    await old.close()
    state = make_state()
    await purge(state)
    assert await are_there(state, "a") == "a"
