"""One SQLite file for all persistent state, shared by API workers and kept across restarts.

    event loop ──► Tables.read / write ──► one thread, one connection ──► quire.sqlite3 (WAL)

Every call runs on the database's own thread, so that the event loop never waits for the disk, and
in a transaction of its own. Each store defines its tables in its own module, as a :class:`Schema`
whose steps are applied on first use. The file records the last step applied by the schema's name,
so that modules evolve independently.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from engine.paths import home_dir
from server.errors import ApiError
from server.store.presence import Presence

FILE_NAME = "quire.sqlite3"
_BUSY_TIMEOUT_S = 10.0  # waiting for other processes' writes; each is short
_BUSY_RETRY_S = 0.02
_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class StoreError(ApiError):
    """A 503: the database could not be read or written (a full disk, a lock, a fault)."""

    def __init__(self, reason: str) -> None:
        super().__init__(503, f"The server's storage failed: {reason}.", code="storage_unavailable")


def reason_of(error: Exception) -> str:
    """Why something could not be written or read, for a :class:`StoreError`: it names no path."""
    told = (error.strerror if isinstance(error, OSError) else None) or str(error)
    # What ``tempfile`` says lists directories of the server.
    is_list = told.startswith("No usable temporary directory")
    return "no temporary directory can be written" if is_list else told


@dataclass(frozen=True)
class Schema:
    """A store's tables: SQL scripts, each of which migrates the file to the next version.

    A released step is never changed; a later change is another step.
    """

    name: str
    steps: tuple[str, ...]


_NO_TABLES = Schema("none", ())


class Database:
    """The server's database, opened on first use.

    If ``directory`` is not writable, everything is kept in the memory of this process, and a
    warning is logged. One that is ``required`` has no such fallback: every call fails instead.
    """

    def __init__(self, directory: Path, *, required: bool = False) -> None:
        self.directory = directory
        self._required = required
        # The first call starts the thread. There is only one, because sqlite3's connections are not
        # meant to be shared.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="quire-store")
        self._connection: sqlite3.Connection | None = None
        self._presence: Presence | None = None
        self._ready: set[str] = set()  # names of schemas that are up to date
        self._in_memory = False

    @property
    def exists(self) -> bool:
        """Whether this or another process has stored anything so far."""
        return self._connection is not None or (self.directory / FILE_NAME).exists()

    @property
    def presence(self) -> Presence:
        """This process among those that share the file; for use within ``read`` and ``write``."""
        assert self._presence is not None
        return self._presence

    @property
    def in_memory(self) -> bool:
        """Whether the directory was found not to be writable."""
        return self._in_memory

    async def num_bytes(self) -> int:
        """The size of the stored data, without free pages. Raises StoreError."""

        def work(db: sqlite3.Connection) -> int:
            names = ("page_count", "freelist_count", "page_size")
            pages, free, size = (db.execute(f"PRAGMA {name}").fetchone()[0] for name in names)
            return (pages - free) * size

        return await self.tables(_NO_TABLES).read(work)

    def tables(self, schema: Schema) -> Tables:
        """A store's access to its own tables."""
        return Tables(self, schema)

    def fault(self) -> str | None:
        """Why the directory, which is made if need be, cannot be used; None if it can."""
        path = self.directory / FILE_NAME
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
            if path.exists():
                os.close(os.open(path, os.O_RDWR))
                _connect(str(path)).close()
        except (OSError, sqlite3.Error) as error:
            return None if _is_busy(error) else reason_of(error)
        return None

    async def close(self) -> None:
        """Finish pending calls and close the file."""
        await asyncio.get_running_loop().run_in_executor(self._thread, self._close)
        self._thread.shutdown(wait=False)

    async def run(self, schema: Schema, work: Callable[[sqlite3.Connection], _T], begin: str) -> _T:
        """Run ``work`` in a transaction on the database's thread; see :class:`Tables`."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._thread, self._transact, schema, work, begin)
        except (OSError, sqlite3.Error) as error:
            _log.warning("the database failed: %s", error)
            raise StoreError(reason_of(error)) from error

    # ------------------------------------------------------------ on the thread

    def _transact(self, schema: Schema, work: Callable[[sqlite3.Connection], _T], begin: str) -> _T:
        connection = self._connection
        if connection is None:
            connection = self._connection = self._open()
        if schema.name not in self._ready:
            _in_transaction(connection, "BEGIN IMMEDIATE", lambda db: _migrate(db, schema))
            self._ready.add(schema.name)
        return _in_transaction(connection, begin, work)

    def _open(self) -> sqlite3.Connection:
        path = self.directory / FILE_NAME
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            # Prompts and answers are private. The journal gets the file's mode.
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            connection = _connect(str(path))
            self._presence = Presence(self.directory)
            return connection
        except (OSError, sqlite3.Error) as error:
            if self._required or _is_busy(error):  # busy: others can write it
                raise  # the next call retries
            _log.warning(
                "cannot write %s (%s): what is stored stays in memory and ends with this process; "
                "--data-dir names another place",
                path,
                reason_of(error),
            )
            self._presence = Presence(None)
            self._in_memory = True
            return _connect(":memory:")

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
            self._ready.clear()
        if self._presence is not None:
            self._presence.release()
            self._presence = None


@dataclass(frozen=True)
class Tables:
    """One store's tables. ``work`` gets the connection, and runs on the database's thread."""

    database: Database
    schema: Schema

    async def read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """The result of ``work``, whose queries see one consistent state. Raises StoreError."""
        return await self.database.run(self.schema, work, "BEGIN")

    async def write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        """Run ``work``; its changes are committed all or not at all. Raises StoreError."""
        return await self.database.run(self.schema, work, "BEGIN IMMEDIATE")


def default_data_dir() -> Path:
    """``$XDG_DATA_HOME/quire``, by default ``~/.local/share/quire``."""
    base = os.environ.get("XDG_DATA_HOME")
    return (Path(base) if base else home_dir() / ".local" / "share") / "quire"


def _connect(path: str) -> sqlite3.Connection:
    """A connection without automatic transactions. Raises sqlite3.Error.

    Only one process at a time can switch a file to WAL mode, and SQLite does not wait for that as
    it does for other locks, so concurrent processes retry.
    """
    until_s = time.monotonic() + _BUSY_TIMEOUT_S
    while True:
        try:
            return _connect_once(path)
        except sqlite3.OperationalError as error:
            if not _is_busy(error) or time.monotonic() > until_s:
                raise
            time.sleep(_BUSY_RETRY_S)


def _is_busy(error: Exception) -> bool:
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)


def _connect_once(path: str) -> sqlite3.Connection:
    connection = sqlite3.connect(
        path, timeout=_BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
    )
    try:
        # Readers do not block the writer. A crash of the machine may lose the last writes, a crash
        # of this process does not.
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("PRAGMA synchronous=NORMAL")
        connection.execute("PRAGMA foreign_keys=ON")
        _in_transaction(connection, "BEGIN IMMEDIATE", _create_version_table)
    except BaseException:
        connection.close()
        raise
    return connection


def _in_transaction(
    connection: sqlite3.Connection, begin: str, work: Callable[[sqlite3.Connection], _T]
) -> _T:
    connection.execute(begin)
    try:
        result = work(connection)
    except BaseException:
        if connection.in_transaction:  # some failures, such as a full disk, roll back themselves
            connection.execute("ROLLBACK")
        raise
    connection.execute("COMMIT")
    return result


def _create_version_table(db: sqlite3.Connection) -> None:
    db.execute(
        "CREATE TABLE IF NOT EXISTS schema_versions"
        " (name TEXT PRIMARY KEY, version INTEGER NOT NULL) WITHOUT ROWID"
    )


def _migrate(db: sqlite3.Connection, schema: Schema) -> None:
    """Apply the steps that the file has not had."""
    row = db.execute("SELECT version FROM schema_versions WHERE name = ?", (schema.name,))
    (version,) = row.fetchone() or (0,)
    if version > len(schema.steps):
        raise sqlite3.DatabaseError(f"the '{schema.name}' tables were made by a newer Quire")
    for step in schema.steps[version:]:
        for statement in _statements(step):
            db.execute(statement)
    db.execute(
        "INSERT OR REPLACE INTO schema_versions VALUES (?, ?)", (schema.name, len(schema.steps))
    )


def _statements(script: str) -> list[str]:
    """The statements of a script; ``executescript`` would commit the transaction around them."""
    statements: list[str] = []
    pending = ""
    for piece in script.split(";"):
        pending += piece + ";"
        if sqlite3.complete_statement(pending):
            if pending.strip(" \n;"):
                statements.append(pending)
            pending = ""
    return statements
