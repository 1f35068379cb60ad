"""Each tenant's usage by day (UTC), kept in the database across restarts.

Requests add to a count in memory, which is written every few seconds and at shutdown, so that a
request costs no disk access. Quotas are checked against the database's last written state plus this
process's usage since. So with several API workers a tenant may exceed its quota by its usage on the
others between writes, and a crash loses the last seconds.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import sqlite3
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.store.database import Schema, StoreError, Tables

FLUSH_S = 2.0
_RETRY_S = 30.0

SCHEMA = Schema(
    "usage",
    (
        """
        CREATE TABLE usage (
            tenant TEXT NOT NULL,
            day TEXT NOT NULL,
            requests INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL,
            cached_tokens INTEGER NOT NULL,
            output_tokens INTEGER NOT NULL,
            PRIMARY KEY (tenant, day)
        ) WITHOUT ROWID
        """,
    ),
)
_ADD = """
    INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?) ON CONFLICT (tenant, day) DO UPDATE SET
        requests = requests + excluded.requests,
        prompt_tokens = prompt_tokens + excluded.prompt_tokens,
        cached_tokens = cached_tokens + excluded.cached_tokens,
        output_tokens = output_tokens + excluded.output_tokens
"""
_SELECT_TOKENS = "SELECT tenant, day, prompt_tokens + output_tokens FROM usage WHERE day >= ?"


@dataclass(frozen=True)
class UsageCounts:
    """An amount of work."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt tokens
    output_tokens: int = 0

    @property
    def tokens(self) -> int:
        """The number that limits and quotas count."""
        return self.prompt_tokens + self.output_tokens

    def __add__(self, other: UsageCounts) -> UsageCounts:
        return UsageCounts(
            self.requests + other.requests,
            self.prompt_tokens + other.prompt_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True)
class QuotaUsage:
    """A tenant's tokens in the current day and month, and the time left of both."""

    day: int
    month: int
    day_left_s: float
    month_left_s: float


@dataclass(frozen=True)
class DailyUsage:
    """A tenant's usage on one day."""

    tenant: str
    day: str  # 2026-01-31
    counts: UsageCounts


class UsageTracker:
    """The counts of one process, and the database's as of the last write.

    Args:
        tables: the database's, with ``SCHEMA``.
        clock: Unix seconds.
    """

    def __init__(self, tables: Tables, *, clock: Callable[[], float] = time.time) -> None:
        self._tables = tables
        self._clock = clock
        self._pending: dict[tuple[str, str], UsageCounts] = {}  # by tenant and day; not written yet
        self._writing: dict[tuple[str, str], UsageCounts] = {}
        self._saving: asyncio.Task[None] | None = None  # writes these
        self._written: dict[str, dict[str, int]] = {}  # tokens by tenant and day of this month
        # Of the last ``load``: the month that was read, and the database's version.
        self._month = ""
        self._version: int | None = None

    # ------------------------------------------------------------ while requests are served

    def add(self, tenant: str, used: UsageCounts) -> None:
        """Count a tenant's usage."""
        key = tenant, self._now().strftime("%Y-%m-%d")
        self._pending[key] = self._pending.get(key, UsageCounts()) + used

    def quota_usage(self, tenant: str) -> QuotaUsage:
        """The tokens of a tenant's day and month so far."""
        now = self._now()
        today = now.replace(hour=0, minute=0, second=0, microsecond=0)
        day, month = f"{today:%Y-%m-%d}", f"{today:%Y-%m}"
        by_day = [*self._written.get(tenant, {}).items()]
        for unwritten in (self._pending, self._writing):
            by_day += [(d, used.tokens) for (who, d), used in unwritten.items() if who == tenant]
        next_month = (today.replace(day=1) + dt.timedelta(days=32)).replace(day=1)
        return QuotaUsage(
            day=sum(tokens for d, tokens in by_day if d == day),
            month=sum(tokens for d, tokens in by_day if d.startswith(month)),
            day_left_s=(today + dt.timedelta(days=1) - now).total_seconds(),
            month_left_s=(next_month - now).total_seconds(),
        )

    # ------------------------------------------------------------ the database

    async def load(self) -> None:
        """Read what other processes have written this month, or since the last call.

        A tenant may have used up its quota on other workers before it comes to this one.

        Raises:
            StoreError: the database cannot be read.
        """
        today = self._now().date()
        is_first = f"{today:%Y-%m}" != self._month
        # Rows of earlier days do not change any more.
        days_back = today.day - 1 if is_first else min(1, today.day - 1)
        since = f"{today - dt.timedelta(days=days_back)}"

        def read(db: sqlite3.Connection) -> tuple[int, list[tuple[str, str, int]]]:
            # It changes with the commits of other connections.
            version: int = db.execute("PRAGMA data_version").fetchone()[0]
            is_known = version == self._version and not is_first
            return version, [] if is_known else db.execute(_SELECT_TOKENS, (since,)).fetchall()

        self._version, rows = await self._tables.read(read)
        if is_first:
            self._month = f"{today:%Y-%m}"
            self._written.clear()
        for tenant, day, tokens in rows:
            self._written.setdefault(tenant, {})[day] = tokens

    async def run(self) -> None:
        """Write every few seconds, until cancelled."""
        pause_s = FLUSH_S
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self.flush()
                await self.load()
                pause_s = FLUSH_S
            except StoreError:  # already logged; the counts are kept and written later
                pause_s = _RETRY_S

    async def flush(self) -> None:
        """Write the pending counts. Raises StoreError, and keeps them.

        A write that has begun outlives a caller that is cancelled: the database's thread commits it
        in any case, and counts that were kept all the same would be written twice.
        """
        while self._saving is not None:
            await asyncio.wait([self._saving])
        if self._pending:
            self._saving = asyncio.create_task(self._save())
            await asyncio.shield(self._saving)

    async def _save(self) -> None:
        self._writing, self._pending = self._pending, {}
        rows = [
            (*key, used.requests, used.prompt_tokens, used.cached_tokens, used.output_tokens)
            for key, used in self._writing.items()
        ]
        tenants = {tenant for tenant, _ in self._writing}
        first = f"{self._now():%Y-%m}-01"

        def write(db: sqlite3.Connection) -> list[tuple[str, str, int]]:
            db.executemany(_ADD, rows)
            found: list[tuple[str, str, int]] = []
            for tenant in tenants:
                found += db.execute(f"{_SELECT_TOKENS} AND tenant = ?", (first, tenant)).fetchall()
            return found

        try:
            self._set_written(await self._tables.write(write))
        except BaseException:
            for key, used in self._writing.items():
                self._pending[key] = self._pending.get(key, UsageCounts()) + used
            raise
        finally:
            self._writing = {}
            self._saving = None

    async def daily_usage(self, tenant: str | None, first: str, last: str) -> list[DailyUsage]:
        """The usage from one day to another, both included, of one tenant or (None) all.

        Raises:
            StoreError: the database cannot be read.
        """
        await self.flush()
        await self.load()
        query = "SELECT * FROM usage WHERE day BETWEEN ? AND ?"
        values = [first, last]
        if tenant is not None:
            query += " AND tenant = ?"
            values.append(tenant)
        query += " ORDER BY day, tenant"
        rows = await self._tables.read(lambda db: db.execute(query, values).fetchall())
        return [DailyUsage(who, day, UsageCounts(*counts)) for who, day, *counts in rows]

    def _set_written(self, rows: Iterable[tuple[str, str, int]]) -> None:
        by_tenant: dict[str, dict[str, int]] = {}
        for tenant, day, tokens in rows:
            by_tenant.setdefault(tenant, {})[day] = tokens
        self._written.update(by_tenant)

    def _now(self) -> dt.datetime:
        return dt.datetime.fromtimestamp(self._clock(), dt.UTC)
