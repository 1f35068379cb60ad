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
from server.openai.responses.events import Completed, Event, Failed, Incomplete, to_sse
from server.openai.responses.outputs import Response, ResponseFault
from server.state import ServerState
from server.store.database import StoreError
from server.store.responses import ResponseStore, StoredEvent, StoredResponse
from server.store.retention import purge_regularly

_SAVE_S = 0.5  # between polls of the store, while there are jobs
_POLL_S = 0.25  # between polls for another process's events
_RETRY_S = 0.5  # between retries: the queue is full, or the engine sleeps or restarts
_PASSING = ("server_is_overloaded", "engine_asleep")
_END_TRIES = 60  # to store the final state, a second apart
_LAST = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_LOST = "The server ended before this response was complete."
_log = logging.getLogger(__name__)


class Job:
    """One response being generated. Belongs to the event loop."""

    def __init__(self, call: ResponseCall, tenant: str) -> None:
        self.call = call
        self.tenant = tenant
        self.task: asyncio.Task[None] | None = None
        self.ended = False
        self._events: list[bytes] = []  # by number
        self._num_saved = 0
        self._news = asyncio.Event()
        self._unwanted = False

    @property
    def id(self) -> str:
        """The response's id."""
        return self.call.response.id

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self.task is not None and not self.ended

    def tell(self, events: Sequence[Event], *, last: bool = False) -> None:
        """Add events for followers."""
        self._events += map(to_sse, events)
        self.ended = last
        news, self._news = self._news, asyncio.Event()
        news.set()

    def unsaved(self) -> list[StoredEvent]:
        """Return the events that are not stored yet, and mark them as stored."""
        start, self._num_saved = self._num_saved, len(self._events)
        return [StoredEvent(start + i, event) for i, event in enumerate(self._events[start:])]

    def not_saved(self, events: Sequence[StoredEvent]) -> None:
        """Mark events as not stored after a failed write."""
        if events:
            self._num_saved = min(self._num_saved, events[0].number)

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The events numbered above ``after``, as they are made."""
        place = after + 1
        while True:
            news = self._news
            if place < len(self._events):
                events, place = self._events[place:], len(self._events)
                yield b"".join(events)
            elif self.ended:
                return
            else:
                await news.wait()

    def cancel(self) -> None:
        """Stop generating."""
        self._unwanted = True
        if self.task is not None:
            self.task.cancel()

    async def run(self, store: ResponseStore) -> None:
        """Generate, and store the final state."""
        call = self.call
        try:
            await self._generate()
            last = call.finish()
        except asyncio.CancelledError:
            if self._unwanted:
                last = call.cancel()
            else:
                last = call.fail(unavailable("The server ended before the response did."))
        except Exception as error:
            last = call.fail(error)
        self.tell(last, last=True)
        await self._keep_end(store)

    async def _generate(self) -> None:
        while True:
            try:
                async with contextlib.aclosing(self.call.steps()) as steps:
                    async for events in steps:
                        self.tell(events)
                return
            except (ApiError, EngineDead, EngineAsleep) as error:
                if not self._waits_after(error):
                    raise
                await asyncio.sleep(_RETRY_S)

    def _waits_after(self, error: ApiError | EngineDead | EngineAsleep) -> bool:
        """Whether to retry later, because nothing has been generated so far."""
        if isinstance(error, EngineAsleep):  # it fell asleep after it got the request
            return self.call.requeue()
        # An engine that is gone for good raises an ApiError.
        passes = isinstance(error, EngineDead) or error.code in _PASSING
        return passes and self.call.response.status == "queued"

    async def _keep_end(self, store: ResponseStore) -> None:
        stored, events = self.call.stored(), self.unsaved()
        for _ in range(_END_TRIES):
            try:
                await store.end(stored, events)
                return
            except StoreError:
                await asyncio.sleep(1)
        _log.error("response %s has ended and could not be stored", self.id)


class BackgroundResponses:
    """This process's jobs, and access to those of other processes."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._store = ResponseStore(state.database)
        self._jobs: dict[str, Job] = {}
        self._saver: asyncio.Task[None] | None = None

    async def start(self, call: ResponseCall, tenant: str) -> Job:
        """Start generating a response.

        Raises ApiError (503) if too many are being generated, or the store fails.
        """
        most = self._state.admission.most
        if len(self._jobs) >= most:
            raise overloaded(f"{most} responses that are being made")
        job = Job(call, tenant)
        job.tell(call.queued())
        self._jobs[job.id] = job
        try:
            await call.keep_queued()
        except BaseException:
            del self._jobs[job.id]
            raise
        self._state.requests_in_flight += 1  # a graceful shutdown waits for it
        job.task = asyncio.create_task(job.run(self._store))
        job.task.add_done_callback(lambda task: self._forget(job, task))
        if self._saver is None:
            self._saver = asyncio.create_task(self._save())
        return job

    async def find(self, id: str, tenant: str) -> Response | None:
        """A stored response; if its process has died, it is marked as failed."""
        stored = await self._store.find(id, tenant)
        return None if stored is None else await self._settled(stored)

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
        response = await self._settled(stored)
        if response.ended:
            return response
        job = self._jobs.get(id)
        if job is not None and job.task is not None:
            job.cancel()
            await asyncio.wait([job.task])
        else:
            response.status = "cancelled"
            await self._store.end(to_stored(response, tenant), [])
        return await self.find(id, tenant)

    async def delete(self, id: str, tenant: str) -> bool:
        """Delete a response and stop generating it. Whether it existed."""
        found = await self._store.delete(id, tenant)
        job = self._jobs.get(id)
        if found and job is not None:
            job.cancel()
        return found

    async def follow(self, id: str, tenant: str, after: int) -> AsyncGenerator[bytes]:
        """The events of a background response numbered above ``after``, until it ends."""
        job = self._jobs.get(id)
        if job is not None and job.tenant == tenant:
            async with contextlib.aclosing(job.follow(after)) as events:
                async for event in events:
                    yield event
            return
        while True:
            response = await self.find(id, tenant)  # before its events, which are then complete
            events = await self._store.events(id, after)
            if events:
                after = events[-1].number
                yield b"".join(event for _, event in events)
            if response is None:  # deleted meanwhile
                return
            if response.ended:
                if not (events and events[-1].event.startswith(_LAST)):
                    last = await self._store.events(id, after - 1)
                    if not (last and last[-1].event.startswith(_LAST)):
                        yield to_sse(_last_event(response, after + 1))
                return
            await asyncio.sleep(_POLL_S)

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """While the block runs, purge old responses; at its end, stop the jobs as failed."""
        purging = asyncio.create_task(purge_regularly(self._state))
        try:
            yield
        finally:
            tasks = [job.task for job in self._jobs.values() if job.task is not None]
            tasks += [purging, *([self._saver] if self._saver is not None else [])]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _forget(self, job: Job, task: asyncio.Task[None]) -> None:
        del self._jobs[job.id]
        self._state.requests_in_flight -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error("response %s failed in the background", job.id, exc_info=error)

    async def _save(self) -> None:
        """While there are jobs, store their progress and end those that were cancelled."""
        try:
            while self._jobs:
                await asyncio.sleep(_SAVE_S)
                for job in [job for job in self._jobs.values() if job.is_running]:
                    await self._save_one(job)
        finally:
            self._saver = None

    async def _save_one(self, job: Job) -> None:
        events = job.unsaved()
        try:
            wanted = await self._store.progress(job.id, job.call.response.status, events)
        except StoreError:
            job.not_saved(events)
            return
        if not wanted and not job.ended:
            job.cancel()

    async def _settled(self, stored: StoredResponse) -> Response:
        response = from_stored(stored)
        if stored.lost:
            response.status = "failed"
            response.error = ResponseFault("server_error", _LOST)
            await self._store.end(to_stored(response, stored.tenant), [])
        return response


def _last_event(response: Response, number: int) -> Event:
    kind = {"completed": Completed, "failed": Failed}.get(response.status, Incomplete)
    return kind(sequence_number=number, response=response)
