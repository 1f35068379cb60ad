"""Stored responses: their bodies, input and output items, and background events.

A response is visible only to its tenant. Bodies, items and events are JSON written by the endpoint;
what is searched or updated has a column of its own. A response that has not ended is ``made_by`` a
process; if that process is dead, the response will never end.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from server.store.conversations import Page, StoredItem, add_turn
from server.store.database import Database, Schema

MAX_CHAIN = 1000  # responses in a chain of previous ones

_SCHEMA = Schema(
    "responses",
    (
        """
        CREATE TABLE responses (
            id TEXT PRIMARY KEY,
            tenant TEXT NOT NULL,
            created_at INTEGER NOT NULL,
            status TEXT NOT NULL,
            background INTEGER NOT NULL,
            previous_id TEXT,
            made_by TEXT NOT NULL,
            body BLOB NOT NULL
        );
        CREATE INDEX responses_by_previous ON responses (previous_id);
        CREATE INDEX responses_by_age ON responses (created_at);
        CREATE TABLE response_items (
            response_id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
            is_output INTEGER NOT NULL,
            position INTEGER NOT NULL,
            id TEXT NOT NULL,
            body BLOB NOT NULL,
            PRIMARY KEY (response_id, is_output, position)
        ) WITHOUT ROWID;
        CREATE INDEX response_items_by_id ON response_items (id);
        CREATE TABLE response_events (
            response_id TEXT NOT NULL REFERENCES responses ON DELETE CASCADE,
            number INTEGER NOT NULL,
            event BLOB NOT NULL,
            PRIMARY KEY (response_id, number)
        ) WITHOUT ROWID;
        """,
        """
        ALTER TABLE responses ADD COLUMN conversation_id TEXT;
        CREATE INDEX responses_by_conversation ON responses (conversation_id)
            WHERE conversation_id IS NOT NULL;
        """,
    ),
)
_ACTIVE_SQL = "status IN ('queued', 'in_progress')"


class StoredEvent(NamedTuple):
    """An event of a background response and its number."""

    number: int
    event: bytes


@dataclass(frozen=True)
class StoredResponse:
    """A stored response."""

    id: str
    tenant: str
    created_at: int  # Unix time, s
    status: str
    background: bool
    previous_id: str | None
    body: bytes  # without its output, and with the status at the time of writing
    output: Sequence[StoredItem] = ()
    conversation_id: str | None = None  # the conversation it extends; only set on writing
    is_orphaned: bool = field(default=False, compare=False)  # not ended, and its process is dead


class ResponseStore:
    """All stored responses. Every method raises StoreError if the database fails."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._tables = database.tables(_SCHEMA)

    async def add(self, response: StoredResponse, input_items: Sequence[StoredItem]) -> None:
        """Store a response and its input items ``given``."""

        def work(db: sqlite3.Connection) -> None:
            r = response
            db.execute(
                "INSERT INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    *(r.id, r.tenant, r.created_at, r.status, r.background, r.previous_id),
                    *(self._database.presence.name, r.body, r.conversation_id),
                ),
            )
            _add_items(db, r.id, input_items, is_output=False)
            _add_items(db, r.id, r.output, is_output=True)
            _add_turn(db, r, input_items)

        await self._tables.write(work)

    async def add_turn(self, response: StoredResponse, input_items: Sequence[StoredItem]) -> None:
        """Extend the conversation of a response that is not stored itself."""
        await self._tables.write(lambda db: _add_turn(db, response, input_items))

    async def find(self, id: str, tenant: str) -> StoredResponse | None:
        """A tenant's response by id."""

        def work(db: sqlite3.Connection) -> StoredResponse | None:
            row = db.execute(
                "SELECT id, tenant, created_at, status, background, previous_id, made_by, body"
                " FROM responses WHERE id = ? AND tenant = ?",
                (id, tenant),
            ).fetchone()
            if row is None:
                return None
            *head, background, previous_id, made_by, body = row
            ended = head[3] not in ("queued", "in_progress")
            return StoredResponse(
                *head,
                background=bool(background),
                previous_id=previous_id,
                body=body,
                output=_items(db, id, is_output=True),
                is_orphaned=not ended and not self._database.presence.is_alive(made_by),
            )

        return await self._tables.read(work)

    async def delete(self, id: str, tenant: str) -> bool:
        """Delete a response. Whether it existed."""
        statement = "DELETE FROM responses WHERE id = ? AND tenant = ?"
        return await self._tables.write(lambda db: db.execute(statement, (id, tenant)).rowcount > 0)

    async def last_use_times(self) -> list[int]:
        """The creation times, in Unix seconds."""
        query = "SELECT created_at FROM responses"
        return await self._tables.read(lambda db: [at for (at,) in db.execute(query)])

    async def purge(self, before: int) -> int:
        """Delete responses created before a Unix time, except younger ones' predecessors; how many.

        Responses being generated are kept, unless their process is dead: those will never end.
        """

        def work(db: sqlite3.Connection) -> int:
            query = f"SELECT DISTINCT made_by FROM responses WHERE created_at < ? AND {_ACTIVE_SQL}"
            makers = [name for (name,) in db.execute(query, (before,))]
            gone = [name for name in makers if not self._database.presence.is_alive(name)]
            has_ended = f"(NOT {_ACTIVE_SQL} OR made_by IN ({', '.join('?' * len(gone))}))"
            total = 0
            while removed := db.execute(
                f"DELETE FROM responses WHERE created_at < ? AND {has_ended} AND NOT EXISTS"
                " (SELECT 1 FROM responses AS next WHERE next.previous_id = responses.id)",
                (before, *gone),
            ).rowcount:
                total += removed
            return total

        return await self._tables.write(work)

    # ------------------------------------------------------------ conversations

    async def active_conversations(self) -> set[str]:
        """The conversations in which responses are being generated."""
        query = (
            "SELECT DISTINCT conversation_id FROM responses WHERE conversation_id IS NOT NULL"
            f" AND {_ACTIVE_SQL}"
        )
        return await self._tables.read(lambda db: {id for (id,) in db.execute(query)})

    async def chain(self, id: str, tenant: str) -> list[StoredResponse] | None:
        """A response and its predecessors, oldest first; bodies are left empty.

        Returns None if one of them does not exist (any more).
        """

        def work(db: sqlite3.Connection) -> list[StoredResponse] | None:
            rows = db.execute(
                "WITH RECURSIVE chain (id, depth) AS ("
                "   SELECT ?, 0 UNION ALL"
                "   SELECT r.previous_id, depth + 1 FROM responses AS r JOIN chain USING (id)"
                "   WHERE r.previous_id IS NOT NULL AND depth < ?)"
                " SELECT r.id, r.tenant, r.created_at, r.status, r.background, r.previous_id"
                " FROM chain LEFT JOIN responses AS r ON r.id = chain.id AND r.tenant = ?"
                " ORDER BY depth DESC",
                (id, MAX_CHAIN, tenant),
            ).fetchall()
            if any(row[0] is None for row in rows):
                return None
            return [StoredResponse(*row, body=b"") for row in rows]

        return await self._tables.read(work)

    async def items(self, ids: Sequence[str], *, max_bytes: int) -> list[bytes] | None:
        """Input and output items of responses, in the order of ``ids``; None if too large."""

        def work(db: sqlite3.Connection) -> list[bytes] | None:
            bodies: list[bytes] = []
            size = 0
            for id in ids:
                rows = db.execute(
                    "SELECT body FROM response_items WHERE response_id = ?"
                    " ORDER BY is_output, position",
                    (id,),
                )
                for (body,) in rows:
                    size += len(body)
                    if size > max_bytes:
                        return None
                    bodies.append(body)
            return bodies

        return await self._tables.read(work)

    async def find_item(self, id: str, tenant: str) -> bytes | None:
        """The latest item of that id in any of the tenant's responses."""
        statement = (
            "SELECT i.body FROM response_items AS i JOIN responses AS r ON r.id = i.response_id"
            " WHERE i.id = ? AND r.tenant = ? ORDER BY r.created_at DESC, r.rowid DESC LIMIT 1"
        )
        row = await self._tables.read(lambda db: db.execute(statement, (id, tenant)).fetchone())
        return None if row is None else row[0]

    async def input_items(
        self, response_id: str, *, after: str | None, limit: int, ascending: bool
    ) -> Page | None:
        """A page of a response's input items; None if ``after`` is not one of them."""

        def work(db: sqlite3.Connection) -> Page | None:
            items = _items(db, response_id, is_output=False)
            if not ascending:
                items.reverse()
            start = 0
            if after is not None:
                places = [place for place, item in enumerate(items) if item.id == after]
                if not places:
                    return None
                start = places[0] + 1
            return Page(items[start : start + limit], len(items) > start + limit)

        return await self._tables.read(work)

    # ------------------------------------------------------------ in the background

    async def record_progress(self, id: str, status: str, events: Sequence[StoredEvent]) -> bool:
        """Store a response's progress. False if it was cancelled, ended or deleted."""

        def work(db: sqlite3.Connection) -> bool:
            changed = db.execute(
                f"UPDATE responses SET status = ? WHERE id = ? AND {_ACTIVE_SQL}", (status, id)
            ).rowcount
            if changed:
                _add_events(db, id, events)
            return bool(changed)

        return await self._tables.write(work)

    async def record_end(self, response: StoredResponse, events: Sequence[StoredEvent]) -> bool:
        """Store a response's final state. False if it had already ended, or was deleted."""

        def work(db: sqlite3.Connection) -> bool:
            changed = db.execute(
                f"UPDATE responses SET status = ?, body = ? WHERE id = ? AND {_ACTIVE_SQL}",
                (response.status, response.body, response.id),
            ).rowcount
            if changed:
                _add_items(db, response.id, response.output, is_output=True)
                _add_events(db, response.id, events)
                _add_turn(db, response, _items(db, response.id, is_output=False))
            return bool(changed)

        return await self._tables.write(work)

    async def events(self, id: str, after: int) -> list[StoredEvent]:
        """The events of a background response numbered above ``after``."""
        statement = (
            "SELECT number, event FROM response_events WHERE response_id = ? AND number > ?"
            " ORDER BY number"
        )
        return await self._tables.read(
            lambda db: [StoredEvent(*row) for row in db.execute(statement, (id, after))]
        )


def _add_items(
    db: sqlite3.Connection, id: str, items: Sequence[StoredItem], *, is_output: bool
) -> None:
    db.executemany(
        "INSERT INTO response_items VALUES (?, ?, ?, ?, ?)",
        [(id, is_output, place, item.id, item.body) for place, item in enumerate(items)],
    )


def _add_turn(
    db: sqlite3.Connection, response: StoredResponse, given: Sequence[StoredItem]
) -> None:
    """Extend the response's conversation, if the response has an answer."""
    if response.conversation_id is not None and response.status in ("completed", "incomplete"):
        add_turn(db, response.conversation_id, [*given, *response.output])


def _add_events(db: sqlite3.Connection, id: str, events: Sequence[StoredEvent]) -> None:
    db.executemany(
        "INSERT OR IGNORE INTO response_events VALUES (?, ?, ?)", [(id, *event) for event in events]
    )


def _items(db: sqlite3.Connection, id: str, *, is_output: bool) -> list[StoredItem]:
    rows = db.execute(
        "SELECT id, body FROM response_items WHERE response_id = ? AND is_output = ?"
        " ORDER BY position",
        (id, is_output),
    )
    return [StoredItem(*row) for row in rows]
