"""Responses that are made while nobody waits for them.

    POST ──► store: queued ──► Job (a task of this process) ──► store: completed, failed ...
                                  │ every half second: status and events ──► store
    GET, from any process ◄── store          GET ?stream=true ◄── the job here, or the store

The store is the truth that all processes share: who cancels or deletes a response elsewhere changes
its row, and its job ends when it next looks. A response whose process has died is marked as
failed by whoever asks for it next.
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

_SAVE_S = 0.5  # between looks at the store, while there are jobs
_POLL_S = 0.25  # between looks at another process's events
_RETRY_S = 0.5  # between tries: the queue is full, the engine sleeps or is being restarted
_PASSING = ("server_is_overloaded", "engine_asleep")
_END_TRIES = 60  # to keep an end, a second apart
_LAST = (b"event: response.completed", b"event: response.incomplete", b"event: response.failed")
_LOST = "The server ended before this response was complete."
_log = logging.getLogger(__name__)


class Job:
    """One response in the making. Belongs to the event loop."""

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
        """The response's."""
        return self.call.response.id

    @property
    def is_running(self) -> bool:
        """Whether it has begun and not ended."""
        return self.task is not None and not self.ended

    def tell(self, events: Sequence[Event], *, last: bool = False) -> None:
        """Let followers have more events."""
        self._events += map(to_sse, events)
        self.ended = last
        news, self._news = self._news, asyncio.Event()
        news.set()

    def unsaved(self) -> list[StoredEvent]:
        """The events that the store does not have; from now on it is taken to have them."""
        start, self._num_saved = self._num_saved, len(self._events)
        return [StoredEvent(start + i, event) for i, event in enumerate(self._events[start:])]

    def not_saved(self, events: Sequence[StoredEvent]) -> None:
        """The store could not take these."""
        if events:
            self._num_saved = min(self._num_saved, events[0].number)

    async def follow(self, after: int) -> AsyncGenerator[bytes]:
        """The events with numbers above ``after``, as they come."""
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
        """Stop: nobody wants the answer."""
        self._unwanted = True
        if self.task is not None:
            self.task.cancel()

    async def run(self, store: ResponseStore) -> None:
        """Generate, and keep how it ended."""
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
        """Whether to try again in a while, as nothing has been made so far."""
        if isinstance(error, EngineAsleep):  # it fell asleep after it was given the request
            return self.call.requeue()
        # An engine that has been given up is an ApiError.
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
    """This process's jobs, and the way to everybody's responses."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._store = ResponseStore(state.database)
        self._jobs: dict[str, Job] = {}
        self._saver: asyncio.Task[None] | None = None

    async def start(self, call: ResponseCall, tenant: str) -> Job:
        """Begin to make a response.

        Raises ApiError (503) when too many are being made, or it cannot be kept.
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
        self._state.requests_in_flight += 1  # a graceful end waits for it
        job.task = asyncio.create_task(job.run(self._store))
        job.task.add_done_callback(lambda task: self._forget(job, task))
        if self._saver is None:
            self._saver = asyncio.create_task(self._save())
        return job

    async def find(self, id: str, tenant: str) -> Response | None:
        """A stored response; one that nobody makes any more has failed."""
        stored = await self._store.find(id, tenant)
        return None if stored is None else await self._settled(stored)

    async def cancel(self, id: str, tenant: str) -> Response | None:
        """Cancel a background response, and give it as it is then.

        Raises ApiError (400) when it is not a background one.
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
        """Forget a response, and stop making it. Whether there was one."""
        found = await self._store.delete(id, tenant)
        job = self._jobs.get(id)
        if found and job is not None:
            job.cancel()
        return found

    async def follow(self, id: str, tenant: str, after: int) -> AsyncGenerator[bytes]:
        """The events of a background response with numbers above ``after``, until it ends."""
        job = self._jobs.get(id)
        if job is not None and job.tenant == tenant:
            async with contextlib.aclosing(job.follow(after)) as events:
                async for event in events:
                    yield event
            return
        while True:
            response = await self.find(id, tenant)  # before its events: they are all there then
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
        """Within the block old responses are purged; at its end jobs are stopped, as failed."""
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
        """Keep how far the jobs are, and end those that nobody wants, while there are any."""
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
