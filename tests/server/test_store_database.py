"""The database: shared, migrated, persistent, off the event loop, and never blocking."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import stat
import threading
from pathlib import Path

import pytest

from kernels.cpu.native.build import cache_dir
from server.store.database import FILE_NAME, Database, Schema, StoreError, default_data_dir

NOTES = Schema("notes", ("CREATE TABLE notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL);",))
WORDS = Schema("words", ("CREATE TABLE words (word TEXT);",))


def add(text: str | None):
    return lambda db: db.execute("INSERT INTO notes (text) VALUES (?)", (text,))


def texts(db: sqlite3.Connection) -> list[str]:
    return [text for (text,) in db.execute("SELECT text FROM notes ORDER BY id")]


async def test_what_is_written_is_there_after_a_restart(tmp_path: Path) -> None:
    first = Database(tmp_path / "a" / "b")
    await first.tables(NOTES).write(add("kept"))
    await first.close()
    second = Database(tmp_path / "a" / "b")
    assert await second.tables(NOTES).read(texts) == ["kept"]
    await second.close()
    for path in (tmp_path / "a" / "b").iterdir():
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0


async def test_nothing_is_opened_until_it_is_used(tmp_path: Path) -> None:
    database = Database(tmp_path / "data")
    await database.close()
    assert not (tmp_path / "data").exists()


async def test_all_of_a_transaction_or_nothing(tmp_path: Path) -> None:
    database = Database(tmp_path)
    notes = database.tables(NOTES)

    def half(db: sqlite3.Connection) -> None:
        add("half")(db)
        add(None)(db)  # NOT NULL

    with pytest.raises(StoreError) as caught:
        await notes.write(half)
    assert (caught.value.status, caught.value.code) == (503, "storage_unavailable")
    await notes.write(add("whole"))
    assert await notes.read(texts) == ["whole"]
    await database.close()


async def test_users_grow_their_tables_apart(tmp_path: Path) -> None:
    database = Database(tmp_path)
    await database.tables(NOTES).write(add("old"))
    await database.tables(WORDS).write(lambda db: db.execute("INSERT INTO words VALUES ('w')"))
    await database.close()

    grown = Schema(
        "notes",
        (
            *NOTES.steps,
            """
            ALTER TABLE notes ADD COLUMN mark TEXT NOT NULL DEFAULT ';';
            CREATE TRIGGER marked AFTER INSERT ON notes BEGIN
                UPDATE notes SET mark = '!' WHERE id = new.id;
                UPDATE notes SET text = text || ';' WHERE id = new.id;
            END;
            """,
        ),
    )
    database = Database(tmp_path)
    notes = database.tables(grown)
    await notes.write(add("new"))
    rows = await notes.read(lambda db: db.execute("SELECT text, mark FROM notes").fetchall())
    assert rows == [("old", ";"), ("new;", "!")]
    await database.close()

    database = Database(tmp_path)  # an older Quire leaves what it does not know
    with pytest.raises(StoreError, match="newer"):
        await database.tables(NOTES).read(texts)
    assert await database.tables(WORDS).read(
        lambda db: db.execute("SELECT word FROM words").fetchall()
    ) == [("w",)]
    await database.close()


async def test_several_processes_write_at_once(tmp_path: Path) -> None:
    databases = [Database(tmp_path) for _ in range(4)]
    await asyncio.gather(
        *(database.tables(NOTES).write(add("x")) for database in databases for _ in range(25))
    )
    assert len(await databases[0].tables(NOTES).read(texts)) == 100
    for database in databases:
        await database.close()


async def test_the_event_loop_never_waits_for_it(tmp_path: Path) -> None:
    database = Database(tmp_path)
    hold = threading.Event()
    slow = asyncio.create_task(database.tables(NOTES).write(lambda db: hold.wait(30)))
    await asyncio.sleep(0)  # reached at once, although the work has not ended
    assert not slow.done()
    hold.set()
    assert await slow
    await database.close()


async def test_a_place_is_tried_without_a_trace(tmp_path: Path) -> None:
    database = Database(tmp_path / "data")
    assert database.fault() is None
    assert list((tmp_path / "data").iterdir()) == []
    await database.tables(NOTES).write(add("kept"))
    assert Database(tmp_path / "data").fault() is None
    assert await database.tables(NOTES).read(texts) == ["kept"]
    await database.close()


@pytest.mark.parametrize("fault", ["a file", "not a database"])
async def test_a_place_that_cannot_be_written(tmp_path: Path, caplog, fault: str) -> None:
    directory = tmp_path / "data"
    if fault == "a file":
        directory.write_text("in the way")
    else:
        directory.mkdir()
        (directory / FILE_NAME).write_bytes(os.urandom(4096))
    database = Database(directory)
    assert database.fault()
    required = Database(directory, required=True)
    with pytest.raises(StoreError) as refused:
        await required.tables(NOTES).write(add("lost"))
    assert str(tmp_path) not in str(refused.value)
    assert not required.in_memory
    await required.close()
    await database.tables(NOTES).write(add("here"))
    assert await database.tables(NOTES).read(texts) == ["here"]
    assert "stays in memory" in caplog.text
    await database.close()


def test_a_user_without_a_home_has_directories_all_the_same(monkeypatch):
    """As containers have it that run under a number without a name."""
    for name in ("HOME", "XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("pwd.getpwuid", dict[int, object]().__getitem__)
    assert default_data_dir() == Path("/.local/share/quire")
    assert cache_dir() == Path("/.cache/quire")
