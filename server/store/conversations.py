"""Conversations: lists of items that responses continue and extend."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from server.store.database import Database, Schema

_SCHEMA = Schema(
    "conversations",
    (
        """
        CREATE TABLE conversations (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            metadata BLOB NOT NULL
        );
        CREATE TABLE conversation_items (
            conversation_id TEXT NOT NULL REFERENCES conversations ON DELETE CASCADE,
            place INTEGER NOT NULL,
            id TEXT NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (conversation_id, place),
            UNIQUE (conversation_id, id)
        ) WITHOUT ROWID;
        CREATE INDEX conversation_items_by_id ON conversation_items (id);
        """,
        # Existing rows count as used at the migration.
        """
        ALTER TABLE conversations ADD COLUMN used_at INTEGER NOT NULL DEFAULT 0;
        UPDATE conversations SET used_at = CAST(strftime('%s', 'now') AS INTEGER);
        CREATE INDEX conversations_by_use ON conversations (used_at);
        """,
    ),
)
_TOUCH_INTERVAL_S = 900  # a use is recorded if the last recorded one is older than this


class StoredItem(NamedTuple):
    """An item and its id."""

    id: str
    body: bytes


class Page(NamedTuple):
    """A page of a list."""

    items: list[StoredItem]
    has_more: bool


@dataclass(frozen=True)
class StoredConversation:
    """A stored conversation, without its items."""

    id: str
    tenant: str
    created_at: int  # Unix time, s
    metadata: bytes  # JSON


class DuplicateItem(Exception):
    """The conversation already has an item with this id."""

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.id = id


class ConversationStore:
    """All conversations. Every method raises StoreError if the database fails."""

    def __init__(self, database: Database) -> None:
        self._tables = database.tables(_SCHEMA)

    async def create(self, conversation: StoredConversation, items: Sequence[StoredItem]) -> None:
        """Store a new conversation with its first items. Raises DuplicateItem if two share an
        id."""

        def work(db: sqlite3.Connection) -> None:
            c = conversation
            values = (c.id, c.tenant, c.created_at, c.metadata, c.created_at)
            db.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?)", values)
            _append(db, c.id, items)

        await self._tables.write(work)

    async def find(self, id: str, tenant: str) -> StoredConversation | None:
        """A tenant's conversation by id; counts as a use."""

        def work(db: sqlite3.Connection) -> tuple[StoredConversation | None, bool]:
            query = "SELECT used_at FROM conversations WHERE id = ?"
            used_at = db.execute(query, (id,)).fetchone()
            is_fresh = used_at is not None and used_at[0] > time.time() - _TOUCH_INTERVAL_S
            return _find(db, id, tenant), is_fresh

        found, is_fresh = await self._tables.read(work)
        if found is not None and not is_fresh:
            await self._tables.write(lambda db: _touch(db, id))
        return found

    async def update_metadata(
        self, id: str, tenant: str, metadata: bytes
    ) -> StoredConversation | None:
        """Replace a conversation's labels."""

        def work(db: sqlite3.Connection) -> StoredConversation | None:
            statement = "UPDATE conversations SET metadata = ? WHERE id = ? AND tenant = ?"
            if db.execute(statement, (metadata, id, tenant)).rowcount:
                _touch(db, id)
            return _find(db, id, tenant)

        return await self._tables.write(work)

    async def delete(self, id: str, tenant: str) -> bool:
        """Delete a conversation with its items. Whether it existed."""
        statement = "DELETE FROM conversations WHERE id = ? AND tenant = ?"
        return await self._tables.write(lambda db: db.execute(statement, (id, tenant)).rowcount > 0)

    async def last_use_times(self) -> list[int]:
        """The times of last use, in Unix seconds."""
        query = "SELECT used_at FROM conversations"
        return await self._tables.read(lambda db: [at for (at,) in db.execute(query)])

    async def purge(self, before: int, keep: Collection[str] = ()) -> int:
        """Delete those last used before a Unix time, except ``keep``; how many."""
        marks = ", ".join("?" * len(keep))
        statement = f"DELETE FROM conversations WHERE used_at < ? AND id NOT IN ({marks})"
        values = (before, *keep)
        return await self._tables.write(lambda db: db.execute(statement, values).rowcount)

    # ------------------------------------------------------------ items

    async def append(self, id: str, tenant: str, items: Sequence[StoredItem]) -> bool:
        """Append items; false if the tenant has no such conversation. Raises DuplicateItem."""

        def work(db: sqlite3.Connection) -> bool:
            if _find(db, id, tenant) is None:
                return False
            _append(db, id, items)
            return True

        return await self._tables.write(work)

    async def page(self, id: str, *, after: str | None, limit: int, ascending: bool) -> Page | None:
        """A page of a conversation's items; None if ``after`` is not one of them."""

        def work(db: sqlite3.Connection) -> Page | None:
            where, values = "conversation_id = ?", [id]
            if after is not None:
                query = "SELECT place FROM conversation_items WHERE conversation_id = ? AND id = ?"
                found = db.execute(query, (id, after)).fetchone()
                if found is None:
                    return None
                where, values = where + f" AND place {'>' if ascending else '<'} ?", [id, *found]
            rows = db.execute(
                f"SELECT id, body FROM conversation_items WHERE {where}"
                f" ORDER BY place {'ASC' if ascending else 'DESC'} LIMIT ?",
                (*values, limit + 1),
            ).fetchall()
            return Page([StoredItem(*row) for row in rows[:limit]], len(rows) > limit)

        return await self._tables.read(work)

    async def items(self, id: str, *, max_bytes: int) -> list[bytes] | None:
        """All items of a conversation in order; None if they exceed ``max_bytes``."""

        def work(db: sqlite3.Connection) -> list[bytes] | None:
            query = "SELECT body FROM conversation_items WHERE conversation_id = ? ORDER BY place"
            bodies: list[bytes] = []
            size = 0
            for (body,) in db.execute(query, (id,)):
                size += len(body)
                if size > max_bytes:
                    return None
                bodies.append(body)
            return bodies

        return await self._tables.read(work)

    async def find_item(self, item_id: str, tenant: str, id: str | None = None) -> bytes | None:
        """An item of a conversation, or of any of the tenant's."""
        query = (
            "SELECT i.body FROM conversation_items AS i JOIN conversations AS c"
            " ON c.id = i.conversation_id WHERE i.id = ? AND c.tenant = ?"
        )
        values = [item_id, tenant]
        if id is not None:
            query, values = query + " AND c.id = ?", [*values, id]
        row = await self._tables.read(lambda db: db.execute(query + " LIMIT 1", values).fetchone())
        return None if row is None else row[0]

    async def delete_item(self, id: str, item_id: str) -> bool:
        """Delete an item. Whether it existed."""
        statement = "DELETE FROM conversation_items WHERE conversation_id = ? AND id = ?"
        return await self._tables.write(
            lambda db: db.execute(statement, (id, item_id)).rowcount > 0
        )


def add_turn(db: sqlite3.Connection, id: str, items: Sequence[StoredItem]) -> None:
    """Append a response's input and output, in the transaction that stores the response.

    The conversation may have been deleted, and another response may have added an item meanwhile:
    existing items are not replaced.
    """
    if db.execute("SELECT 1 FROM conversations WHERE id = ?", (id,)).fetchone() is None:
        return
    taken = {item.id for item in items if _has_item(db, id, item.id)}
    _append(db, id, [item for item in items if item.id not in taken])


def _touch(db: sqlite3.Connection, id: str) -> None:
    statement = "UPDATE conversations SET used_at = max(used_at, ?) WHERE id = ?"
    db.execute(statement, (int(time.time()), id))


def _find(db: sqlite3.Connection, id: str, tenant: str) -> StoredConversation | None:
    query = "SELECT id, tenant, created_at, metadata FROM conversations WHERE id = ? AND tenant = ?"
    row = db.execute(query, (id, tenant)).fetchone()
    return None if row is None else StoredConversation(*row)


def _has_item(db: sqlite3.Connection, id: str, item_id: str) -> bool:
    query = "SELECT 1 FROM conversation_items WHERE conversation_id = ? AND id = ?"
    return db.execute(query, (id, item_id)).fetchone() is not None


def _append(db: sqlite3.Connection, id: str, items: Sequence[StoredItem]) -> None:
    _touch(db, id)
    query = "SELECT coalesce(max(place), -1) FROM conversation_items WHERE conversation_id = ?"
    (last,) = db.execute(query, (id,)).fetchone()
    for place, item in enumerate(items, last + 1):
        if _has_item(db, id, item.id):
            raise DuplicateItem(item.id)
        row = (id, place, item.id, item.body)
        db.execute("INSERT INTO conversation_items VALUES (?, ?, ?, ?)", row)
