"""Stored chat completions: responses, their requests' messages, and labels."""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from server.store.database import Database, Schema

_SCHEMA = Schema(
    "chats",
    (
        """
        CREATE TABLE chats (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            tenant TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            model TEXT NOT NULL,
            body BLOB NOT NULL
        );
        CREATE INDEX chats_by_tenant ON chats (tenant, number);
        CREATE INDEX chats_by_age ON chats (created_at);
        CREATE TABLE chat_labels (
            chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            name TEXT NOT NULL,
            value TEXT NOT NULL,
            PRIMARY KEY (chat_id, name)
        ) WITHOUT ROWID;
        CREATE TABLE chat_messages (
            chat_id TEXT NOT NULL REFERENCES chats (id) ON DELETE CASCADE,
            position INTEGER NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (chat_id, position)
        ) WITHOUT ROWID;
        """,
    ),
)


@dataclass(frozen=True)
class StoredChat:
    """A stored chat completion."""

    id: str
    tenant: str
    created_at: int  # Unix time, s
    model: str
    body: bytes  # without its labels
    metadata: Mapping[str, str] = field(default_factory=dict)


class ChatStore:
    """All stored chat completions. Every method raises StoreError if the database fails."""

    def __init__(self, database: Database) -> None:
        self._tables = database.tables(_SCHEMA)

    async def add(self, chat: StoredChat, messages: Sequence[bytes]) -> None:
        """Store a completion and the messages of its request."""

        def work(db: sqlite3.Connection) -> None:
            c = chat
            db.execute(
                "INSERT INTO chats (id, tenant, created_at, model, body) VALUES (?, ?, ?, ?, ?)",
                (c.id, c.tenant, c.created_at, c.model, c.body),
            )
            _insert_metadata(db, c.id, c.metadata)
            db.executemany(
                "INSERT INTO chat_messages VALUES (?, ?, ?)",
                [(c.id, place, body) for place, body in enumerate(messages)],
            )

        await self._tables.write(work)

    async def find(self, id: str, tenant: str) -> StoredChat | None:
        """A tenant's completion by id."""
        return await self._tables.read(lambda db: _find(db, id, tenant))

    async def list(
        self,
        tenant: str,
        *,
        model: str | None,
        metadata: Mapping[str, str],
        after: str | None,
        limit: int,
        ascending: bool,
    ) -> list[StoredChat] | None:
        """A tenant's completions in the order of creation, those after ``after``.

        Args:
            tenant: the owner.
            model: include only this model's; None: any.
            metadata: include only those with all of these labels.
            after: the id of the completion before the page.
            limit: of the page.
            ascending: oldest first.

        Returns None if there is no completion ``after``.
        """

        def work(db: sqlite3.Connection) -> list[StoredChat] | None:
            where, values = ["tenant = ?"], [tenant]
            if model is not None:
                where, values = [*where, "model = ?"], [*values, model]
            for name, value in metadata.items():
                where.append(
                    "EXISTS (SELECT 1 FROM chat_labels WHERE chat_id = id AND name = ?"
                    " AND value = ?)"
                )
                values += [name, value]
            if after is not None:
                query = "SELECT number FROM chats WHERE id = ? AND tenant = ?"
                found = db.execute(query, (after, tenant)).fetchone()
                if found is None:
                    return None
                where, values = [*where, f"number {'>' if ascending else '<'} ?"], [*values, *found]
            rows = db.execute(
                f"SELECT {_COLUMNS} FROM chats WHERE {' AND '.join(where)}"
                f" ORDER BY number {'ASC' if ascending else 'DESC'} LIMIT ?",
                (*values, limit),
            ).fetchall()
            return [_chat_of(db, row) for row in rows]

        return await self._tables.read(work)

    async def update_metadata(
        self, id: str, tenant: str, metadata: Mapping[str, str]
    ) -> StoredChat | None:
        """Replace all labels of a completion."""

        def work(db: sqlite3.Connection) -> StoredChat | None:
            if _find(db, id, tenant) is None:
                return None
            db.execute("DELETE FROM chat_labels WHERE chat_id = ?", (id,))
            _insert_metadata(db, id, metadata)
            return _find(db, id, tenant)

        return await self._tables.write(work)

    async def delete(self, id: str, tenant: str) -> bool:
        """Delete a completion. Whether it existed."""
        statement = "DELETE FROM chats WHERE id = ? AND tenant = ?"
        return await self._tables.write(lambda db: db.execute(statement, (id, tenant)).rowcount > 0)

    async def messages(
        self, id: str, *, after: int | None, limit: int, ascending: bool
    ) -> list[tuple[int, bytes]]:
        """(position, message) of a completion's request messages after position ``after``."""
        where, values = "chat_id = ?", [id]
        if after is not None:
            where, values = where + f" AND position {'>' if ascending else '<'} ?", [id, after]
        query = (
            f"SELECT position, body FROM chat_messages WHERE {where}"
            f" ORDER BY position {'ASC' if ascending else 'DESC'} LIMIT ?"
        )
        return await self._tables.read(lambda db: db.execute(query, (*values, limit)).fetchall())

    async def last_use_times(self) -> list[int]:
        """The creation times, in Unix seconds."""
        query = "SELECT created_at FROM chats"
        return await self._tables.read(lambda db: [at for (at,) in db.execute(query)])

    async def purge(self, before: int) -> int:
        """Delete completions created before a Unix time; how many."""
        statement = "DELETE FROM chats WHERE created_at < ?"
        return await self._tables.write(lambda db: db.execute(statement, (before,)).rowcount)


_COLUMNS = "id, tenant, created_at, model, body"


def _find(db: sqlite3.Connection, id: str, tenant: str) -> StoredChat | None:
    query = f"SELECT {_COLUMNS} FROM chats WHERE id = ? AND tenant = ?"
    row = db.execute(query, (id, tenant)).fetchone()
    return None if row is None else _chat_of(db, row)


def _chat_of(db: sqlite3.Connection, row: tuple[Any, ...]) -> StoredChat:
    labels = db.execute("SELECT name, value FROM chat_labels WHERE chat_id = ?", (row[0],))
    return StoredChat(*row, metadata=dict(labels.fetchall()))


def _insert_metadata(db: sqlite3.Connection, id: str, metadata: Mapping[str, str]) -> None:
    db.executemany(
        "INSERT INTO chat_labels VALUES (?, ?, ?)",
        [(id, name, value) for name, value in metadata.items()],
    )
