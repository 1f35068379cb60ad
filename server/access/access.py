"""The access control of one server process."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from server.access.account import Account
from server.access.caller import Caller
from server.access.key_file import KeyEntry
from server.access.keyring import KeyRing, limits_of
from server.access.rate_limits import RateLimitStore
from server.access.usage import SCHEMA, UsageCounts, UsageTracker
from server.metrics import Metrics
from server.settings import Settings
from server.store.database import Database, StoreError


class Access:
    """A server's keys, and the accounts of their owners.

    Args:
        settings: name the keys.
        database: stores the usage, if there is a key file.
        metrics: count the usage too.
        rate_limits: the state of limits; by default one of this process's own.

    Raises:
        InvalidSettings: the key file cannot be used.
    """

    def __init__(
        self,
        settings: Settings,
        database: Database,
        metrics: Metrics,
        rate_limits: RateLimitStore | None = None,
    ) -> None:
        self._metrics = metrics
        self._rate_limits = rate_limits
        path = settings.api_key_file
        self.usage = UsageTracker(database.tables(SCHEMA)) if path is not None else None
        if self._rate_limits is None and path is not None:
            self._rate_limits = RateLimitStore()
        self.keys = KeyRing(settings.api_keys, path, self._open_account)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Watch the key file and write usage to the database while the block runs."""
        if self.usage is None:
            yield
            return
        with contextlib.suppress(StoreError):  # already logged; counting begins at zero
            await self.usage.load()
        tasks = [asyncio.create_task(work) for work in (self.usage.run(), self.keys.watch())]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            with contextlib.suppress(StoreError):
                await self.usage.flush()

    def _open_account(self, entry: KeyEntry) -> Caller:
        assert self.usage is not None
        account = Account(
            entry.name,
            limits_of(entry),
            self._rate_limits,
            get_quota_usage=self.usage.quota_usage,
            on_usage=self._record_usage,
            on_rejected=self._metrics.record_rejected,
        )
        return Caller(entry.name, frozenset(entry.scopes), entry.weight, account)

    def _record_usage(self, tenant: str, used: UsageCounts) -> None:
        assert self.usage is not None
        self.usage.add(tenant, used)
        self._metrics.record_tenant_usage(
            tenant,
            requests=used.requests,
            prompt_tokens=used.prompt_tokens,
            output_tokens=used.output_tokens,
        )
