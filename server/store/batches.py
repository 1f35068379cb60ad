"""Batches and the results of their lines.

A line's result is a row that is written once. A process that resumes a batch, this one or another,
runs the lines without a row. When a batch ends, its rows are written to files.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from server.store.database import FILE_NAME, Database, Schema

Status = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
ACTIVE_STATUSES: tuple[Status, ...] = ("validating", "in_progress", "finalizing", "cancelling")

_SCHEMA = Schema(
    "batches",
    (
        """
        CREATE TABLE batches (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            endpoint TEXT NOT NULL,
            input_file_id TEXT NOT NULL,
            completion_window TEXT NOT NULL,
            metadata TEXT,
            output_life_s INTEGER,
            status TEXT NOT NULL,
            model TEXT,
            errors TEXT,
            output_file_id TEXT,
            error_file_id TEXT,
            created_at INTEGER NOT NULL,
            in_progress_at INTEGER,
            expires_at INTEGER NOT NULL,
            finalizing_at INTEGER,
            completed_at INTEGER,
            failed_at INTEGER,
            expired_at INTEGER,
            cancelling_at INTEGER,
            cancelled_at INTEGER,
            num_lines INTEGER NOT NULL DEFAULT 0,
            num_completed INTEGER NOT NULL DEFAULT 0,
            num_failed INTEGER NOT NULL DEFAULT 0,
            input_tokens INTEGER NOT NULL DEFAULT 0,
            cached_tokens INTEGER NOT NULL DEFAULT 0,
            output_tokens INTEGER NOT NULL DEFAULT 0,
            reasoning_tokens INTEGER NOT NULL DEFAULT 0
        );
        CREATE INDEX batches_by_tenant ON batches (tenant, number);
        CREATE INDEX batches_by_status ON batches (status);
        CREATE TABLE batch_lines (
            batch_id TEXT NOT NULL,
            line INTEGER NOT NULL,
            ok INTEGER NOT NULL,
            result BLOB NOT NULL,
            PRIMARY KEY (batch_id, line)
        );
        """,
    ),
)


class StoredBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Times are Unix seconds; see OpenAI's reference for the statuses."""

    id: str
    tenant: str  # the owner
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: str | None = None  # JSON
    output_life_s: int | None = None  # how long its output files are kept, in seconds
    status: Status = "validating"
    model: str | None = None  # of its first line
    errors: str | None = None  # JSON; the reasons of a failure
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    num_lines: int = 0
    num_completed: int = 0
    num_failed: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


class LineResult(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a line of the input."""

    line: int  # line number, from 1
    ok: bool  # answered successfully
    text: bytes  # a line of the output file, or of the error file
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    reasoning_tokens: int = 0


_COLUMNS = ", ".join(StoredBatch.__struct_fields__)
_ACTIVE_SQL = "status IN (" + ", ".join(f"'{status}'" for status in ACTIVE_STATUSES) + ")"

_ENDED_AT = "coalesce(completed_at, failed_at, expired_at, cancelled_at, created_at)"


class BatchStore:
    """The batches of all tenants."""

    def __init__(self, database: Database) -> None:
        self._tables = database.tables(_SCHEMA)
        self._file = database.directory / FILE_NAME
        self.locks: Path = database.directory / "batches"  # one file for each running batch
        self._has_created = False
        self.updated = asyncio.Event()  # set when this process has created or cancelled a batch

    def may_have_batches(self) -> bool:
        """Whether there may be batches: some process has created the database."""
        return self._has_created or self._file.exists()

    async def create(self, batch: StoredBatch) -> None:
        """Store a new batch. Raises StoreError."""
        marks = ", ".join("?" * len(StoredBatch.__struct_fields__))
        values = msgspec.structs.astuple(batch)
        self._has_created = True
        insert = f"INSERT INTO batches ({_COLUMNS}) VALUES ({marks})"
        await self._tables.write(lambda db: db.execute(insert, values))
        self.updated.set()

    async def get(self, tenant: str, id: str) -> StoredBatch | None:
        """A tenant's batch by id, if it exists. Raises StoreError."""
        found = await self._find("tenant = ? AND id = ?", (tenant, id))
        return found[0] if found else None

    async def list(
        self,
        tenant: str,
        endpoints: Collection[str],
        *,
        after: str | None = None,
        before: str | None = None,
        limit: int,
    ) -> list[StoredBatch] | None:
        """A tenant's batches, newest first.

        Args:
            tenant: the owner.
            endpoints: include only batches of these.
            after: the batch before the page; None begins with the newest.
            before: the batch after the page, which then holds those next to it; excludes ``after``.
            limit: of the page.

        Returns None if there is no batch ``after`` or ``before``. Raises StoreError.
        """
        where = f"tenant = ? AND endpoint IN ({', '.join('?' * len(endpoints))})"
        values: tuple[Any, ...] = (tenant, *endpoints)
        other = after or before
        if other is not None:
            if await self.get(tenant, other) is None:
                return None
            sign = "<" if after else ">"
            where += f" AND number {sign} (SELECT number FROM batches WHERE id = ?)"
            values += (other,)
        order = "ASC" if before else "DESC"
        found = await self._find(f"{where} ORDER BY number {order} LIMIT ?", (*values, limit))
        return found[::-1] if before else found

    async def delete(self, id: str) -> None:
        """Delete a batch that has ended. Raises StoreError."""
        await self._tables.write(lambda db: db.execute("DELETE FROM batches WHERE id = ?", (id,)))

    async def last_use_times(self) -> list[int]:
        """The times at which ended batches did so, in Unix seconds. Raises StoreError."""
        query = f"SELECT {_ENDED_AT} FROM batches WHERE NOT {_ACTIVE_SQL}"
        return await self._tables.read(lambda db: [at for (at,) in db.execute(query)])

    async def purge(self, before: int) -> int:
        """Delete batches that ended before a Unix time; how many. Raises StoreError."""
        statement = f"DELETE FROM batches WHERE NOT {_ACTIVE_SQL} AND {_ENDED_AT} < ?"
        return await self._tables.write(lambda db: db.execute(statement, (before,)).rowcount)

    async def list_active(self) -> Sequence[StoredBatch]:
        """The batches that have not ended, oldest first. Raises StoreError."""
        return await self._find(f"{_ACTIVE_SQL} ORDER BY number", ())

    async def find_batch_using(self, file_id: str) -> str | None:
        """The id of a batch that has not ended with the input ``file_id``."""
        found = await self._find(f"input_file_id = ? AND {_ACTIVE_SQL} LIMIT 1", (file_id,))
        return found[0].id if found else None

    async def transition(
        self, id: str, from_statuses: Sequence[Status], status: Status, **changes: Any
    ) -> StoredBatch | None:
        """Change the status and other columns of a batch, if its status is one of
        ``from_statuses``.

        Returns the updated batch, or None if its status was another. Raises StoreError.
        """
        values = {"status": status, **changes}
        sets = ", ".join(f"{column} = ?" for column in values)
        marks = ", ".join("?" * len(from_statuses))
        update = f"UPDATE batches SET {sets} WHERE id = ? AND status IN ({marks})"

        def write(db: sqlite3.Connection) -> StoredBatch | None:
            done = db.execute(
                f"{update} RETURNING {_COLUMNS}", (*values.values(), id, *from_statuses)
            )
            row = done.fetchone()
            if row is not None and status not in ACTIVE_STATUSES:
                db.execute("DELETE FROM batch_lines WHERE batch_id = ?", (id,))
            return None if row is None else _batch_of(row)

        batch = await self._tables.write(write)
        self.updated.set()
        return batch

    # ------------------------------------------------------------ lines

    async def finished_lines(self, id: str) -> set[int]:
        """The numbers of the lines with results. Raises StoreError."""
        query = "SELECT line FROM batch_lines WHERE batch_id = ?"
        return await self._tables.read(lambda db: {line for (line,) in db.execute(query, (id,))})

    async def record(self, id: str, results: Iterable[LineResult]) -> None:
        """Store and count results; existing ones are not replaced. Raises StoreError."""
        insert = "INSERT OR IGNORE INTO batch_lines VALUES (?, ?, ?, ?)"
        count = (
            "UPDATE batches SET num_completed = num_completed + ?, num_failed = num_failed + ?,"
            " input_tokens = input_tokens + ?, cached_tokens = cached_tokens + ?,"
            " output_tokens = output_tokens + ?, reasoning_tokens = reasoning_tokens + ?"
            " WHERE id = ?"
        )

        def write(db: sqlite3.Connection) -> None:
            for each in results:
                new = db.execute(insert, (id, each.line, each.ok, each.text)).rowcount
                if new:
                    tokens = (each.input_tokens, each.cached_tokens)
                    tokens += (each.output_tokens, each.reasoning_tokens)
                    db.execute(count, (each.ok, not each.ok, *tokens, id))

        await self._tables.write(write)

    async def results(self, id: str, after: int, limit: int) -> list[tuple[int, bool, bytes]]:
        """(line, ok, text) of at most ``limit`` lines after ``after``, in order."""
        query = (
            "SELECT line, ok, result FROM batch_lines WHERE batch_id = ? AND line > ?"
            " ORDER BY line LIMIT ?"
        )
        return await self._tables.read(
            lambda db: [
                (line, bool(ok), text) for line, ok, text in db.execute(query, (id, after, limit))
            ]
        )

    async def _find(self, where: str, values: tuple[Any, ...]) -> list[StoredBatch]:
        query = f"SELECT {_COLUMNS} FROM batches WHERE {where}"
        return await self._tables.read(
            lambda db: [_batch_of(row) for row in db.execute(query, values)]
        )


def _batch_of(row: Sequence[Any]) -> StoredBatch:
    return StoredBatch(**dict(zip(StoredBatch.__struct_fields__, row, strict=True)))
