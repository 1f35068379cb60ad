"""Uploaded and generated files: rows in the database, contents next to it, one file each.

DATA_DIR/quire.sqlite3        the metadata of each file
DATA_DIR/files/file-...       its contents, complete and synced before the row exists
DATA_DIR/files/.partial-...   an upload in progress; leftovers of a crash are swept up
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sqlite3
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from server.store.database import Database, Schema, StoreError, reason_of

Order = Literal["asc", "desc"]
_PARTIAL = ".partial-"
_PARTIAL_LIFE_S = 24 * 3600.0  # no upload takes longer
_log = logging.getLogger(__name__)

_SCHEMA = Schema(
    "files",
    (
        """
        CREATE TABLE files (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            filename TEXT NOT NULL,
            purpose TEXT NOT NULL,
            num_bytes INTEGER NOT NULL,
            created_at INTEGER NOT NULL,
            expires_at INTEGER
        );
        CREATE INDEX files_by_tenant ON files (tenant, number);
        CREATE INDEX files_by_end ON files (expires_at) WHERE expires_at IS NOT NULL;
        """,
        # Existing rows count as used at the migration.
        """
        ALTER TABLE files ADD COLUMN used_at INTEGER NOT NULL DEFAULT 0;
        UPDATE files SET used_at = CAST(strftime('%s', 'now') AS INTEGER);
        CREATE INDEX files_by_use ON files (used_at);
        """,
    ),
)
_TOUCH_INTERVAL_S = 900  # a use is recorded if the last recorded one is older than this
_COLUMNS = "id, tenant, filename, purpose, num_bytes, created_at, expires_at"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """The metadata of a file. Times are Unix seconds."""

    id: str
    tenant: str  # the owner
    filename: str  # given by the owner; never part of a path here
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int | None = None


class FileStore:
    """The files of all tenants. An expired file does not exist."""

    def __init__(self, database: Database) -> None:
        self._directory = database.directory / "files"
        self._tables = database.tables(_SCHEMA)
        self._fallback: tempfile.TemporaryDirectory[str] | None = None

    # ------------------------------------------------------------ contents

    async def new_partial(self) -> Path:
        """A new empty file for contents that are being uploaded. Raises StoreError.

        If the caller is cancelled meanwhile no file remains, however far the thread has come.
        """
        making = _PendingFile()
        try:
            with _as_store_errors():
                return await asyncio.to_thread(making.create, self._contents_dir)
        except asyncio.CancelledError:
            making.abandon()
            raise

    async def add(self, file: StoredFile, partial: Path) -> None:
        """Turn the contents in ``partial``, which are synced, into a file.

        A file of the same id is replaced, so that the step can be repeated after a crash. Raises
        StoreError; ``partial`` is removed in any case. If the caller is cancelled meanwhile, the
        file may exist completely, but never contents without a row or a row without contents.
        """
        await asyncio.shield(self._add(file, partial))

    async def _add(self, file: StoredFile, partial: Path) -> None:
        path = self.path(file)
        try:
            with _as_store_errors():
                await asyncio.to_thread(_publish, partial, path)
            await self._tables.write(lambda db: _insert(db, file))
        except BaseException:
            _remove([partial, path])
            raise

    def path(self, file: StoredFile) -> Path:
        """The path of the contents."""
        return self._contents_dir() / file.id

    # ------------------------------------------------------------ rows

    async def get(self, tenant: str, id: str) -> StoredFile | None:
        """A tenant's file by id, if it exists; counts as a use. Raises StoreError."""
        query = f"SELECT used_at, {_COLUMNS} FROM files WHERE id = ? AND tenant = ?"
        row = await self._tables.read(
            lambda db: db.execute(query + _NOT_EXPIRED_SQL, (id, tenant, _now())).fetchone()
        )
        if row is None:
            return None
        if row[0] < _now() - _TOUCH_INTERVAL_S:
            use = "UPDATE files SET used_at = ? WHERE id = ?"
            await self._tables.write(lambda db: db.execute(use, (_now(), id)))
        return _file_of(row[1:])

    async def list(
        self, tenant: str, *, purpose: str | None, after: str | None, limit: int, order: Order
    ) -> list[StoredFile] | None:
        """A tenant's files in the order of creation, those after ``after``; at most ``limit``.

        None if there is no file ``after``. Raises StoreError.
        """

        def find(db: sqlite3.Connection) -> list[StoredFile] | None:
            where, values = "tenant = ?", [tenant]
            if purpose is not None:
                where, values = where + " AND purpose = ?", [*values, purpose]
            if after is not None:
                query = "SELECT number FROM files WHERE id = ? AND tenant = ?"
                found = db.execute(query, (after, tenant)).fetchone()
                if found is None:
                    return None
                where += f" AND number {'>' if order == 'asc' else '<'} ?"
                values = [*values, found[0]]
            query = f"SELECT {_COLUMNS} FROM files WHERE {where}{_NOT_EXPIRED_SQL}"
            query += f" ORDER BY number {order} LIMIT ?"
            rows = db.execute(query, (*values, _now(), limit))
            return [_file_of(row) for row in rows]

        return await self._tables.read(find)

    async def delete(self, file: StoredFile) -> None:
        """Delete a file and its contents. Raises StoreError."""
        await self._tables.write(
            lambda db: db.execute("DELETE FROM files WHERE id = ?", (file.id,))
        )
        with _as_store_errors():
            await asyncio.to_thread(self.path(file).unlink, missing_ok=True)

    async def sweep(self) -> None:
        """Delete expired files, and leftovers of interrupted uploads."""

        def expired(db: sqlite3.Connection) -> list[str]:
            rows = db.execute("DELETE FROM files WHERE expires_at <= ? RETURNING id", (_now(),))
            return [id for (id,) in rows]

        ids = await self._tables.write(expired)
        await asyncio.to_thread(_remove_contents, self._contents_dir(), ids)

    async def num_bytes(self) -> int:
        """The size of all files' contents. Raises StoreError."""
        query = "SELECT coalesce(sum(num_bytes), 0) FROM files"
        return await self._tables.read(lambda db: db.execute(query).fetchone()[0])

    async def last_use_times(self) -> list[int]:
        """The times of last use, in Unix seconds. Raises StoreError."""
        query = "SELECT used_at FROM files"
        return await self._tables.read(lambda db: [at for (at,) in db.execute(query)])

    async def purge(self, before: int, keep: Collection[str] = (), *, by_age: bool) -> int:
        """Delete files last used before a Unix time; how many. Raises StoreError.

        Args:
            before: Unix time, s.
            keep: ids of files to keep.
            by_age: delete only files of batches for which the owner has set no expiry.
        """
        where = f"used_at < ? AND id NOT IN ({', '.join('?' * len(keep))})"
        if by_age:
            where += f" AND purpose IN {_BATCH_PURPOSES} AND expires_at IS NULL"
        statement = f"DELETE FROM files WHERE {where} RETURNING id"
        ids = await self._tables.write(
            lambda db: [id for (id,) in db.execute(statement, (before, *keep))]
        )
        await asyncio.to_thread(_remove_contents, self._contents_dir(), ids)
        return len(ids)

    # ------------------------------------------------------------ helpers

    def _contents_dir(self) -> Path:
        """The directory of the contents; a temporary one if it cannot be created."""
        if self._fallback is not None:
            return Path(self._fallback.name)
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _log.warning(
                "cannot write %s (%s): files end with this process", self._directory, error.strerror
            )
            self._fallback = tempfile.TemporaryDirectory(prefix="quire-files-")
            return Path(self._fallback.name)
        return self._directory


def new_file_id() -> str:
    """An unguessable id."""
    return f"file-{uuid.uuid4().hex}"


_NOT_EXPIRED_SQL = " AND (expires_at IS NULL OR expires_at > ?)"
_BATCH_PURPOSES = "('batch', 'batch_output', 'message_batch')"


class _PendingFile:
    """An empty file created by a thread, which the caller may abandon meanwhile.

    Threads cannot be cancelled, and what they return is lost if their event loop ends.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._path: Path | None = None
        self._is_wanted = True

    def create(self, directory: Callable[[], Path]) -> Path:
        """Create the file; runs in the thread."""
        number, name = tempfile.mkstemp(prefix=_PARTIAL, dir=directory())
        os.close(number)
        path = Path(name)
        with self._lock:
            self._path = path
            if not self._is_wanted:
                path.unlink(missing_ok=True)
        return path

    def abandon(self) -> None:
        """Remove the file, whether it exists already or will."""
        with self._lock:
            self._is_wanted = False
            if self._path is not None:
                self._path.unlink(missing_ok=True)


def _now() -> int:
    return int(time.time())


def _file_of(row: Sequence[object]) -> StoredFile:
    names = StoredFile.__struct_fields__
    return msgspec.convert(dict(zip(names, row, strict=True)), StoredFile)


def _insert(db: sqlite3.Connection, file: StoredFile) -> None:
    values = (*msgspec.structs.astuple(file), file.created_at)
    marks = ", ".join("?" * len(values))
    db.execute(f"INSERT OR REPLACE INTO files ({_COLUMNS}, used_at) VALUES ({marks})", values)


def _publish(partial: Path, path: Path) -> None:
    os.replace(partial, path)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _remove_contents(directory: Path, ids: Sequence[str]) -> None:
    """Remove the contents of files whose rows are gone, and leftovers of interrupted uploads."""
    _remove([directory / id for id in ids])
    oldest_s = time.time() - _PARTIAL_LIFE_S
    for path in directory.glob(_PARTIAL + "*"):
        with contextlib.suppress(OSError):  # another process may have swept it
            if path.stat().st_mtime < oldest_s:
                path.unlink()


def _remove(paths: Iterable[Path]) -> None:
    """Remove what can be removed; nothing refers to the rest any more."""
    for path in paths:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("cannot remove %s: %s", path, error.strerror)


@contextlib.contextmanager
def _as_store_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(reason_of(error)) from error
