"""Stored responses and chat completions are forgotten after a while, in the background."""

from __future__ import annotations

import asyncio
import logging
import time

from server.state import ServerState
from server.store.chats import ChatStore
from server.store.database import StoreError
from server.store.responses import ResponseStore

_FIRST_S = 60.0  # after the start, when the first requests have been served
_EVERY_S = 3600.0
_DAY_S = 86_400
_log = logging.getLogger(__name__)


async def purge_regularly(state: ServerState) -> None:
    """Purge now and then, until cancelled."""
    delay_s = _FIRST_S
    while True:
        await asyncio.sleep(delay_s)
        delay_s = _EVERY_S
        try:
            await purge(state)
        except StoreError:
            continue  # it has been logged, and another hour comes


async def purge(state: ServerState) -> None:
    """Forget what is older than ``--store-days``. Raises StoreError."""
    days = state.settings.store_days
    if days == 0 or not state.database.exists:  # nothing is opened for the sake of it
        return
    before = int(time.time()) - days * _DAY_S
    removed = await ResponseStore(state.database).purge(before)
    removed += await ChatStore(state.database).purge(before)
    if removed:
        _log.info("forgot %d stored answers older than %d days", removed, days)
