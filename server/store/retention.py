"""Retention: a background task deletes stored data by age and by total size.

By age, ``--store-days``: responses and chats since creation, conversations and the files of batches
since last use, batches since their end. By size, ``--max-store-bytes``: of all stored data,
including other files, the least recently used goes first. Anything used within the last hour stays,
and so does anything in use: a conversation in which a response is being generated, a batch that has
not ended and its input, a predecessor of a younger response.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time

from server.state import ServerState
from server.store.chats import ChatStore
from server.store.conversations import ConversationStore
from server.store.database import StoreError
from server.store.responses import ResponseStore

_INITIAL_DELAY_S = 60.0  # after startup, when the first requests have been served
_INTERVAL_S = 300.0
_DAY_S = 86_400
_IN_USE_S = 3600  # recently used data stays, whatever the size
_IN_MEMORY_BYTES = 256 * 2**20  # the limit if the directory is not writable
_log = logging.getLogger(__name__)


async def purge_periodically(state: ServerState) -> None:
    """Purge at intervals, until cancelled."""
    delay_s = _INITIAL_DELAY_S
    while True:
        await asyncio.sleep(delay_s)
        delay_s = _INTERVAL_S
        try:
            await purge(state)
        except StoreError:
            pass  # already logged; the next purge retries
        except Exception:
            _log.exception("purging stored data failed")


async def purge(state: ServerState) -> None:
    """Enforce ``--store-days``, then ``--max-store-bytes``. Raises StoreError."""
    if not state.database.exists:  # do not create the database only to purge it
        return
    days = state.settings.store_days
    if days:
        before = int(time.time()) - days * _DAY_S
        removed = await _purge_before(state, before, by_age=True)
        if removed:
            _log.info("forgot %d stored things older than %d days", removed, days)
    await _enforce_max_bytes(state)


async def _enforce_max_bytes(state: ServerState) -> None:
    """Delete the least recently used data until ``--max-store-bytes`` is met."""
    most = state.settings.max_store_bytes
    if not most:
        return
    if state.database.in_memory:
        most = min(most, _IN_MEMORY_BYTES)
    stores = (*_row_stores(state), state.files, state.batches)
    youngest = int(time.time()) - _IN_USE_S
    uses: list[int] | None = None
    total = 0
    while (size := await state.database.num_bytes() + await state.files.num_bytes()) > most:
        if uses is None:
            uses = sorted([at for store in stores for at in await store.last_use_times()])
            uses = uses[: bisect.bisect_left(uses, youngest)]
        if not uses:
            _log.warning("%d bytes are stored, of --max-store-bytes %d, and in use", size, most)
            break
        # Half as many as would suffice if all had the same size, then half of the rest, and so on.
        count = max(1, int(len(uses) * (1 - most / size) / 2))
        total += await _purge_before(state, uses[count - 1] + 1, by_age=False)
        del uses[:count]
    if total:
        _log.info("forgot %d stored things, as more than %d bytes were stored", total, most)


async def _purge_before(state: ServerState, before: int, *, by_age: bool) -> int:
    """Delete everything last used before a Unix time; how many."""
    responses, chats, conversations = _row_stores(state)
    removed = await responses.purge(before)
    removed += await chats.purge(before)
    removed += await conversations.purge(before, await responses.active_conversations())
    removed += await state.batches.purge(before)
    inputs = {batch.input_file_id for batch in await state.batches.list_active()}
    return removed + await state.files.purge(before, inputs, by_age=by_age)


def _row_stores(state: ServerState) -> tuple[ResponseStore, ChatStore, ConversationStore]:
    database = state.database
    return ResponseStore(database), ChatStore(database), ConversationStore(database)
