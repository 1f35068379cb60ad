"""Background responses, which are generated without a waiting client.

    POST ──► store: queued ──► Job (a task of this process) ──► store: completed, failed ...
                                  │ every half second: status and events ──► store
    GET, from any process ◄── store          GET ?stream=true ◄── the job here, or the store

The store is the source of truth for all processes. Another process cancels or deletes a response by
changing its row, and its job ends when it next reads the row. A response whose process has died is
marked as failed by the next process that looks it up.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from engine.errors import EngineAsleep, EngineDead
from server.errors import ApiError, overloaded, unavailable
from server.openai.responses.call import ResponseCall, from_stored, to_stored
from server.openai.responses.events import (
    Completed,
    Event,
    Failed,
    Incomplete,
    Numbering,
    to_sse,
)
from server.openai.responses.outputs import Response, ResponseError
from server.state import ServerState
from server.store.database import StoreError
from server.store.responses import ResponseStore, StoredEvent, StoredResponse
from server.store.retention import purge_periodically

_SAVE_INTERVAL_S = 0.5  # between polls of the store, while there are jobs
_POLL_INTERVAL_S = 0.25  # between polls for another process's events
_RETRY_DELAY_S = 0.5  # between retries: the queue is full, or the engine sleeps or restarts
_TRANSIENT_CODES = ("server_is_overloaded", "engine_asleep")
_MAX_STORE_TRIES = 60  # to store the final state, a second apart
_FINAL_EVENTS = (
    b"event: response.completed",
    b"event: response.incomplete",
    b"event: response.failed",
)
_ORPHANED_MESSAGE = "The server ended before this response was complete."
_log = logging.getLogger(__name__)


class BackgroundJob:
    """One response being generated. Belongs to the event loop."""

    def __init__(self, call: ResponseCall, tenant: str) -> None:
        self.call = call
        self.tenant = tenant
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self._events: list[bytes] = []  # by number
        self._num_saved = 0
        self._updated = asyncio.Event()
        self._is_cancelled = False

    @property
    def id(self) -> str:
        """The response's id."""
        return self.call.response.id

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self.task is not None and not self.ended

    def publish(self, events: Sequence[Event], *, last: bool = False) -> None:
        """Add events for followers."""
        self._events += map(to_sse, events)
        self.ended = last
        news, self._updated = self._updated, asyncio.Event()
        news.set()

    def take_unsaved(self) -> list[StoredEvent]:
        """Return the events that are not stored yet, and mark them as stored."""
        start, self._num_saved = self._num_saved, len(self._events)
        return [StoredEvent(start + i, event) for i, event in enumerate(self._events[start:])]

    def mark_unsaved(self, events: Sequence[StoredEvent]) -> None:
        """Mark events as not stored after a failed write."""
        if events:
            self._num_saved = min(self._num_saved, events[0].number)

    async def follow(self, after: int, numbering: Numbering) -> AsyncGenerator[bytes]:
        """The events numbered above ``after``, as they are made; ``numbering`` follows them."""
        place = after + 1
        while True:
            news = self._updated
            if place < len(self._events):
                events = self._events[place:]
                place = numbering.next_number = len(self._events)
                yield b"".join(events)
            elif self.ended:
                return
            else:
                await news.wait()

    def cancel(self) -> None:
        """Stop generating; once that has ended the task only stores the final state."""
        self._is_cancelled = True
        if self.task is not None and not self.ended:
            self.task.cancel()

    async def run(self, store: ResponseStore) -> None:
        """Generate, and store the final state."""
        call = self.call
        try:
            await self._generate()
            last = call.finish()
        except asyncio.CancelledError:
            if self._is_cancelled:
                last = call.cancel()
            else:
                last = call.fail(unavailable("The server ended before the response did."))
        except Exception as error:
            last = call.fail(error)
        self.publish(last, last=True)
        await self._store_final_state(store)

    async def _generate(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self.call.steps()) as steps:
                    async for events in steps:
                        self.publish(events)
                return
            except (ApiError, EngineDead, EngineAsleep) as error:
                if not self._should_retry(error):
                    raise
                await asyncio.sleep(_RETRY_DELAY_S)

    def _should_retry(self, error: ApiError | EngineDead | EngineAsleep) -> bool:
        """Whether to retry later, because nothing has been generated so far."""
        if isinstance(error, EngineAsleep):  # it fell asleep after it got the request
            return self.call.requeue()
        # An engine that is gone for good raises an ApiError.
        passes = isinstance(error, EngineDead) or error.code in _TRANSIENT_CODES
        return passes and self.call.response.status == "queued"

    async def _store_final_state(self, store: ResponseStore) -> None:
        stored, events = self.call.stored(), self.take_unsaved()
        for _ in range(_MAX_STORE_TRIES):
            try:
                await store.record_end(stored, events)
                return
            except StoreError:
                await asyncio.sleep(1)
        _log.error("response %s has ended and could not be stored", self.id)


class BackgroundResponses:
    """This process's jobs, and access to those of other processes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._store = ResponseStore(state.database)
        self._jobs: dict[str, BackgroundJob] = {}
        self._saver: asyncio.Task[None] | None = None

    async def start(self, call: ResponseCall, tenant: str) -> BackgroundJob:
        """Start generating a response.

        Raises ApiError (503) if too many are being generated, or the store fails.
        """
        most = self._state.admission.max_sequences
        if len(self._jobs) >= most:
            raise overloaded(f"{most} responses that are being made")
        job = BackgroundJob(call, tenant)
        job.publish(call.queued())
        self._jobs[job.id] = job
        try:
            await call.save_queued()
        except BaseException:
            del self._jobs[job.id]
            raise
        self._state.requests_in_flight += 1  # a graceful shutdown waits for it
        job.task = asyncio.create_task(job.run(self._store))
        job.task.add_done_callback(lambda task: self._on_job_done(job, task))
        if self._saver is None:
            self._saver = asyncio.create_task(self._save_loop())
        return job

    async def find(self, id: str, tenant: str) -> Response | None:
        """A stored response; if its process has died, it is marked as failed."""
        stored = await self._store.find(id, tenant)
        return None if stored is None else await self._resolve_orphan(stored)

    async def cancel(self, id: str, tenant: str) -> Response | None:
        """Cancel a background response and return its current state.

        Raises ApiError (400) if it is not a background response.
        """
        stored = await self._store.find(id, tenant)
        if stored is None:
            return None
        if not stored.background:
            message = "Only responses that were made with 'background' can be cancelled."
            raise ApiError(400, message, param="response_id")
        response = await self._resolve_orphan(stored)
        if response.ended:
            return response
        job = self._jobs.get(id)
        if job is not None and job.task is not None:
            job.cancel()
            await asyncio.wait([job.task])
        else:
            response.status = "cancelled"
            await self._store.record_end(to_stored(response, tenant), [])
        return await self.find(id, tenant)

    async def delete(self, id: str, tenant: str) -> bool:
        """Delete a response and stop generating it. Whether it existed."""
        found = await self._store.delete(id, tenant)
        job = self._jobs.get(id)
        if found and job is not None:
            job.cancel()
        return found

    async def follow(
        self, id: str, tenant: str, after: int, numbering: Numbering
    ) -> AsyncGenerator[bytes]:
        """The events of a background response numbered above ``after``, until it ends.

        ``numbering`` follows them, so that an error after them gets the next number. Raises
        ApiError (404) if the response is deleted meanwhile, and its job is another process's.
        """
        job = self._jobs.get(id)
        if job is not None and job.tenant == tenant:
            async with contextlib.aclosing(job.follow(after, numbering)) as events:
                async for event in events:
                    yield event
            return
        while True:
            response = await self.find(id, tenant)  # before its events, which are then complete
            events = await self._store.events(id, after)
            if events:
                after = events[-1].number
                numbering.next_number = after + 1
                yield b"".join(event for _, event in events)
            if response is None:
                raise ApiError(404, "The response was deleted.", param="response_id")
            if response.ended:
                events = events or await self._store.events(id, -1)
                last = events[-1] if events else StoredEvent(-1, b"")
                # A client that already knows more than is stored has had the event made here.
                if not last.event.startswith(_FINAL_EVENTS) and after <= last.number:
                    yield to_sse(_last_event(response, last.number + 1))
                return
            await asyncio.sleep(_POLL_INTERVAL_S)

    @contextlib.asynccontextmanager
    async def lifespan(self) -> AsyncIterator[None]:
        """While the block runs, purge old responses; at its end, stop the jobs as failed."""
        purging = asyncio.create_task(purge_periodically(self._state))
        try:
            yield
        finally:
            tasks = [job.task for job in self._jobs.values() if job.task is not None]
            tasks += [purging, *([self._saver] if self._saver is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _on_job_done(self, job: BackgroundJob, task: asyncio.Task[None]) -> None:
        del self._jobs[job.id]
        self._state.requests_in_flight -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("response %s failed in the background", job.id, exc_info=error)

    async def _save_loop(self) -> None:
        """While there are jobs, store their progress and end those that were cancelled."""
        try:
            while self._jobs:
                await asyncio.sleep(_SAVE_INTERVAL_S)
                for job in [job for job in self._jobs.values() if job.is_running]:
                    await self._save_one(job)
        finally:
            self._saver = None

    async def _save_one(self, job: BackgroundJob) -> None:
        events = job.take_unsaved()
        try:
            wanted = await self._store.record_progress(job.id, job.call.response.status, events)
        except StoreError:
            job.mark_unsaved(events)
            return
        if not wanted and not job.ended:
            job.cancel()

    async def _resolve_orphan(self, stored: StoredResponse) -> Response:
        response = from_stored(stored)
        if stored.is_orphaned:
            response.status = "failed"
            response.error = ResponseError("server_error", _ORPHANED_MESSAGE)
            await self._store.record_end(to_stored(response, stored.tenant), [])
        return response


def _last_event(response: Response, number: int) -> Event:
    kind = {"completed": Completed, "failed": Failed}.get(response.status, Incomplete)
    return kind(sequence_number=number, response=response)
