"""Converts the engine's output, one step for all requests, into one stream per request.

Used by all clients. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine import suspects
from engine.errors import EngineError, Failure
from engine.prompt_progress import PromptProgress
from engine.types import (
    EngineOutput,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)


class Stream:
    """A :class:`engine.client.RequestStream`, with what is needed to resume its request.

    Output accumulates here until the consumer reads it. A slow consumer causes no queue, and wakes
    once for everything that it missed.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self.aborted = False
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None

        self._token_ids = list(request.resumed_token_ids)  # the whole output so far
        self._num_read = len(self._token_ids)
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_prompt_logprobs = 0  # received
        self._num_repeated = 0  # of those to come, how many were received before the engine died
        self._embedding: bytes | None = None
        self._num_cached: int | None = None
        self._scheduled_s: float | None = None
        self._begin_read = False  # whether these two have been
        self._progress: PromptProgress | None = None  # not read yet
        self._first_token_s: float | None = None
        self.num_resumed = 0  # engines that have died with this request
        self.is_begun = False  # the current engine works on it
        self._num_fruitless = 0  # of the engines that died, those in a row that may be due to it
        self._num_at_resume = len(self._token_ids)  # tokens when the current engine got it

        self._has_unread = False
        self._has_details = False  # there is more to report than tokens
        self._finish_reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._timings: RequestTimings | None = None
        self._error: EngineError | None = None
        self._exhausted = False

    # ------------------------------------------------------------ consumer

    @property
    def request_id(self) -> str:
        """The id under which it was submitted."""
        return self.request.id

    async def next(self) -> RequestOutput:
        """The next output; see :class:`engine.client.RequestStream`."""
        while not self._has_unread:
            if self._error is not None:
                raise self._error
            if self._exhausted:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._drain()

    def abort(self) -> None:
        """Stop the request now. Idempotent; no effect once it has ended."""
        if self._ended:
            return
        self.aborted = True
        self._finish_reason, self._has_details = "abort", True
        self._wake()
        self._abort(self.request.id)

    def _drain(self) -> RequestOutput:
        token_ids = tuple(self._token_ids[self._num_read :])
        self._num_read = len(self._token_ids)
        self._has_unread = False
        if not self._has_details:
            return RequestOutput(id=self.request.id, token_ids=token_ids)
        self._has_details = False
        logprobs, self._logprobs = self._logprobs, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        num_cached = None if self._begin_read else self._num_cached
        scheduled_s = None if self._begin_read else self._scheduled_s
        self._begin_read = self._num_cached is not None
        progress, self._progress = self._progress, None
        self._exhausted = self._finish_reason is not None
        return RequestOutput(
            id=self.request.id,
            token_ids=token_ids,
            logprobs=tuple(logprobs) if logprobs else None,
            prompt_logprobs=tuple(prompt_logprobs),
            embedding=self._embedding,
            num_cached_tokens=num_cached,
            scheduled_s=scheduled_s,
            progress=progress,
            finish_reason=self._finish_reason,
            stop_token_id=self._stop_token_id,
            timings=self._timings,
        )

    # ------------------------------------------------------------ engine

    def push(self, token_ids: tuple[int, ...], reason: FinishReason | None) -> int:
        """Add one step's tokens. Returns how many were accepted: none once the stream has ended."""
        if self._finish_reason is not None or self._error is not None:
            return 0
        if self._first_token_s is None and token_ids:
            self._first_token_s = time.monotonic()
        self._token_ids += token_ids
        if reason is not None:
            self._finish_reason, self._has_details = reason, True
        self._has_unread = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return len(token_ids)

    # Called for few outputs, always before ``push`` for the same output.

    def add_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Add the log-probabilities of the tokens that the same output pushes."""
        self._has_details = True
        self._logprobs += logprobs

    def add_prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Add prompt log-probabilities, less those that a resumed request repeats."""
        self._has_details = True
        repeated = min(self._num_repeated, len(logprobs))
        self._num_repeated -= repeated
        self._prompt_logprobs += logprobs[repeated:]
        self._num_prompt_logprobs += len(logprobs) - repeated

    def set_embedding(self, embedding: bytes) -> None:
        """Set the vector; the request ends with the same output."""
        self._has_details = True
        self._embedding = embedding

    def set_num_cached(self, num_cached: int) -> None:
        """Set how much of the prompt was cached; only the first report counts."""
        if self._num_cached is None:
            self._has_details = True
            self._num_cached = num_cached

    def set_scheduled(self, scheduled_s: float) -> None:
        """Set when it began, after ``set_num_cached``; only the first report counts."""
        if self._scheduled_s is None:
            self._scheduled_s = scheduled_s

    def set_progress(self, progress: PromptProgress) -> None:
        """Set the progress of the prompt; only the latest report counts."""
        self._has_details = True
        self._progress = progress

    def set_stop_token(self, token_id: int) -> None:
        """Set the token that ends the request with the same output."""
        self._has_details = True
        self._stop_token_id = token_id

    def set_timings(self, timings: RequestTimings) -> None:
        """Set the timestamps.

        A restarted engine does not know of a first token that came before. Otherwise its own time
        is more exact than the time at which the token arrived here.
        """
        if self.num_resumed and self._first_token_s is not None:
            first_s = min(self._first_token_s, timings.first_token_s or self._first_token_s)
            timings = msgspec.structs.replace(timings, first_token_s=first_s)
        self._has_details = True
        self._timings = timings

    def fail(self, error: EngineError) -> None:
        """End with ``error``, after the output that has already arrived."""
        if not self._ended:
            self._error = error
            self._wake(has_unread=False)

    def count_death(self) -> None:
        """Count an engine that has died, if that may be due to this request."""
        if self.is_begun:
            self._num_fruitless = self._num_fruitless + 1 if self.is_unproven else 1

    def acquit(self) -> None:
        """Note that the engines have died of another request."""
        self._num_fruitless = 0

    def resume(self) -> Request:
        """The request that continues where this stream's output ends."""
        self.num_resumed += 1
        self._num_repeated = self._num_prompt_logprobs
        self.is_begun = False
        self._num_at_resume = len(self._token_ids)
        return msgspec.structs.replace(
            self.request, resumed_token_ids=tuple(self._token_ids), is_suspect=self.is_suspect
        )

    @property
    def num_new(self) -> int:
        """Tokens that the current engine, or the one that has just died, has made."""
        return len(self._token_ids) - self._num_at_resume

    @property
    def is_suspect(self) -> bool:
        """Whether an engine may have died of it."""
        return self._num_fruitless > 0

    @property
    def is_unproven(self) -> bool:
        """Whether it is suspect and has made little progress since."""
        return self.is_suspect and self.num_new < suspects.LEAST_PROGRESS

    @property
    def would_be_blamed(self) -> bool:
        """Whether it is the cause if the engine has died."""
        count = self._num_fruitless + 1
        return self.is_begun and self.is_unproven and count > suspects.MAX_FRUITLESS

    def reattach(self, abort: Callable[[str], None]) -> None:
        """Attach the stream to another table, whose ``abort`` this is."""
        self._abort = abort

    @property
    def num_tokens(self) -> int:
        """Tokens that its sequence holds, without a prompt that it shares with its leader."""
        prompt = 0 if self.request.fork_of is not None else len(self.request.prompt_token_ids)
        return prompt + len(self._token_ids)

    @property
    def has_output(self) -> bool:
        """Whether it has received output that other weights would have made different."""
        return bool(self._token_ids) or self._num_prompt_logprobs > 0

    @property
    def _ended(self) -> bool:
        return self._finish_reason is not None or self._error is not None

    def _wake(self, *, has_unread: bool = True) -> None:
        self._has_unread = self._has_unread or has_unread
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamTable:
    """The streams of an engine's live requests.

    A stream stays here until the engine reports the end of its request, even if its consumer has
    aborted it. Only then can its id be reused.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._streams: dict[str, Stream] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    def check_ids(self, requests: Sequence[Request]) -> None:
        """Check that requests may be submitted together. Raises ValueError if an id is live, or
        that of two of them."""
        ids: set[str] = set()
        for request in requests:
            if request.id in self._streams or request.id in ids:
                raise ValueError(f"request id {request.id!r} is in use")
            ids.add(request.id)

    def open(self, requests: Sequence[Request]) -> list[Stream]:
        """Open a stream for each of the requests to be submitted; none if it raises.

        Raises ValueError as ``check_ids`` does.
        """
        self.check_ids(requests)
        streams = [Stream(request, self._abort) for request in requests]
        for stream in streams:
            self._add(stream)
        return streams

    def dispatch(self, output: EngineOutput) -> None:
        """Distribute an output to the streams. No consumer runs before this returns."""
        streams = self._streams
        num_pushed = 0
        # The sparse columns first, since the last row of a request closes its stream.
        self._for_each(output.logprobs, Stream.add_logprobs)
        self._for_each(output.prompt_logprobs, Stream.add_prompt_logprobs)
        self._for_each(output.embeddings, Stream.set_embedding)
        self._for_each(output.num_cached_tokens, Stream.set_num_cached)
        self._for_each(output.scheduled_s, Stream.set_scheduled)
        self._for_each(output.progress, Stream.set_progress)
        self._for_each(output.stop_token_ids, Stream.set_stop_token)
        self._for_each(output.timings, Stream.set_timings)
        self._for_each(output.errors, _fail)
        for request_id, token_ids, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            stream = streams.get(request_id)
            if stream is None:
                continue
            num_pushed += stream.push(token_ids, reason)
            if reason is not None:
                del streams[request_id]
                self._num_tokens -= stream.num_tokens
        self._num_tokens += num_pushed

    def fail_all(self, error: EngineError) -> None:
        """End every stream with ``error``."""
        for stream in self._clear():
            stream.fail(error)

    def begin(self, begun: Sequence[str], withdrawn: Sequence[str] = ()) -> None:
        """Note the requests that the engine begins to work on, or puts back into its queue."""
        for is_begun, request_ids in ((True, begun), (False, withdrawn)):
            for request_id in request_ids:
                stream = self._streams.get(request_id)
                if stream is not None:
                    stream.is_begun = is_begun

    def pop_all(self, *, has_died: bool = True) -> list[Stream]:
        """Remove the streams of an engine that is lost; return those to resume, in order.

        If it ``has_died``, a request that it seems to have died of fails instead
        (``engine/suspects.py``). Otherwise it has hung up on a client that was slow.
        """
        streams = [stream for stream in self._clear() if not stream.aborted]
        return suspects.judge(streams) if has_died else streams

    def adopt(self, streams: Sequence[Stream]) -> list[Request]:
        """The requests to submit so that streams of a dead engine continue here, in order."""
        requests: list[Request] = []
        for stream in streams:
            stream.reattach(self._abort)
            self._add(stream)
            requests.append(stream.resume())
        return requests

    @property
    def num_tokens(self) -> int:
        """Tokens that the sequences of all streams hold, waiting or running.

        Kept as a running total, because it is read once per request.
        """
        return self._num_tokens

    def _add(self, stream: Stream) -> None:
        self._streams[stream.request_id] = stream
        self._num_tokens += stream.num_tokens

    def _clear(self) -> list[Stream]:
        streams, self._streams, self._num_tokens = list(self._streams.values()), {}, 0
        return streams

    def _for_each(self, column: dict[str, Any], update: Callable[[Stream, Any], None]) -> None:
        for request_id, value in column.items():
            stream = self._streams.get(request_id)
            if stream is not None and not stream.aborted:
                update(stream, value)


def _fail(stream: Stream, failure: Failure) -> None:
    stream.fail(failure.to_error())
