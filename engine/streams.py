"""From the engine's columns, one step for all requests, to streams, all steps for one request.

Used by both clients. Everything here belongs to one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from engine.errors import EngineError, Failure, RequestFailed
from engine.prompt_progress import PromptProgress
from engine.types import (
    EngineOutput,
    FinishReason,
    Request,
    RequestOutput,
    RequestTimings,
    TokenLogprobs,
)

_MAX_RESUMED = 2  # engines that may die with a request before it is given up


class Stream:
    """A :class:`engine.client.RequestStream`, and what is needed to resume its request.

    News gathers here until the consumer comes for it: a consumer that lags costs no queue, and
    wakes once for all that it missed.
    """

    def __init__(self, request: Request, abort: Callable[[str], None]) -> None:
        self.request = request
        self.aborted = False
        self._abort = abort
        self._waiter: asyncio.Future[None] | None = None

        self._token_ids = list(request.resumed_token_ids)  # the whole output so far
        self._num_taken = len(self._token_ids)
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._num_prompt_logprobs = 0  # received
        self._num_repeated = 0  # of those to come, received before the engine died
        self._embedding: bytes | None = None
        self._num_cached: int | None = None
        self._cached_taken = False
        self._progress: PromptProgress | None = None  # that has not been taken
        self._first_token_s: float | None = None
        self.num_resumed = 0  # engines that have died with it

        self._has_news = False
        self._has_details = False  # more than tokens are to be told
        self._finish_reason: FinishReason | None = None
        self._stop_token_id: int | None = None
        self._timings: RequestTimings | None = None
        self._error: EngineError | None = None
        self._exhausted = False

    # ------------------------------------------------------------ the consumer's side

    @property
    def request_id(self) -> str:
        """The id it was submitted under."""
        return self.request.id

    async def next(self) -> RequestOutput:
        """The next output; see :class:`engine.client.RequestStream`."""
        while not self._has_news:
            if self._error is not None:
                raise self._error
            if self._exhausted:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._take()

    def abort(self) -> None:
        """Stop the request now. Idempotent, and without effect once it has ended."""
        if self._ended:
            return
        self.aborted = True
        self._finish_reason, self._has_details = "abort", True
        self._wake()
        self._abort(self.request.id)

    def _take(self) -> RequestOutput:
        token_ids = tuple(self._token_ids[self._num_taken :])
        self._num_taken = len(self._token_ids)
        self._has_news = False
        if not self._has_details:
            return RequestOutput(id=self.request.id, token_ids=token_ids)
        self._has_details = False
        logprobs, self._logprobs = self._logprobs, []
        prompt_logprobs, self._prompt_logprobs = self._prompt_logprobs, []
        num_cached = None if self._cached_taken else self._num_cached
        self._cached_taken = self._num_cached is not None
        progress, self._progress = self._progress, None
        self._exhausted = self._finish_reason is not None
        return RequestOutput(
            id=self.request.id,
            token_ids=token_ids,
            logprobs=tuple(logprobs) if logprobs else None,
            prompt_logprobs=tuple(prompt_logprobs),
            embedding=self._embedding,
            num_cached_tokens=num_cached,
            progress=progress,
            finish_reason=self._finish_reason,
            stop_token_id=self._stop_token_id,
            timings=self._timings,
        )

    # ------------------------------------------------------------ the engine's side

    def push(self, token_ids: tuple[int, ...], reason: FinishReason | None) -> int:
        """One step's tokens. Returns how many it took: none once it has ended."""
        if self._finish_reason is not None or self._error is not None:
            return 0
        if self._first_token_s is None and token_ids:
            self._first_token_s = time.monotonic()
        self._token_ids += token_ids
        if reason is not None:
            self._finish_reason, self._has_details = reason, True
        self._has_news = True
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
        return len(token_ids)

    # What few outputs have; the same output's ``push`` comes after it.

    def add_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """Those of the tokens that the same output pushes."""
        self._has_details = True
        self._logprobs += logprobs

    def add_prompt_logprobs(self, logprobs: tuple[TokenLogprobs, ...]) -> None:
        """The next ones of the prompt, less those that a resumed request brings once more."""
        self._has_details = True
        repeated = min(self._num_repeated, len(logprobs))
        self._num_repeated -= repeated
        self._prompt_logprobs += logprobs[repeated:]
        self._num_prompt_logprobs += len(logprobs) - repeated

    def set_embedding(self, embedding: bytes) -> None:
        """The vector, whose request ends with the same output."""
        self._has_details = True
        self._embedding = embedding

    def set_num_cached(self, num_cached: int) -> None:
        """How much of the prompt was cached: the first word on it counts."""
        if self._num_cached is None:
            self._has_details = True
            self._num_cached = num_cached

    def set_progress(self, progress: PromptProgress) -> None:
        """How far its prompt has come: the last word on it counts."""
        self._has_details = True
        self._progress = progress

    def set_stop_token(self, token_id: int) -> None:
        """The token that ends it with the same output."""
        self._has_details = True
        self._stop_token_id = token_id

    def set_timings(self, timings: RequestTimings) -> None:
        """When things happened. A restarted engine does not know of a first token that came before,
        but of one of its own better than who reads it later."""
        if self.num_resumed and self._first_token_s is not None:
            first_s = min(self._first_token_s, timings.first_token_s or self._first_token_s)
            timings = msgspec.structs.replace(timings, first_token_s=first_s)
        self._has_details = True
        self._timings = timings

    def fail(self, error: EngineError) -> None:
        """End with ``error``, after what has already come."""
        if not self._ended:
            self._error = error
            self._wake(news=False)

    def resume(self) -> Request:
        """The request that goes on where this stream's output ends."""
        self.num_resumed += 1
        self._num_repeated = self._num_prompt_logprobs
        return msgspec.structs.replace(self.request, resumed_token_ids=tuple(self._token_ids))

    def move(self, abort: Callable[[str], None]) -> None:
        """Its request lives in another table from now on, whose ``abort`` this is."""
        self._abort = abort

    @property
    def num_tokens(self) -> int:
        """That its sequence holds, but for a prompt that it shares with its leader."""
        prompt = 0 if self.request.fork_of is not None else len(self.request.prompt_token_ids)
        return prompt + len(self._token_ids)

    @property
    def has_output(self) -> bool:
        """Whether anything has been told of it that another model would have said otherwise."""
        return bool(self._token_ids) or self._num_prompt_logprobs > 0

    @property
    def _ended(self) -> bool:
        return self._finish_reason is not None or self._error is not None

    def _wake(self, *, news: bool = True) -> None:
        self._has_news = self._has_news or news
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class StreamTable:
    """The streams of an engine's live requests.

    A stream stays here until the engine says that its request has ended, also when its consumer
    has aborted it: only then can its id mean another request.
    """

    def __init__(self, abort: Callable[[str], None]) -> None:
        self._abort = abort
        self._streams: dict[str, Stream] = {}
        self._num_tokens = 0

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request: Request) -> Stream:
        """A stream for a request about to be submitted. Raises ValueError if its id is live."""
        if request.id in self._streams:
            raise ValueError(f"request id {request.id!r} is in use")
        stream = Stream(request, self._abort)
        self._add(stream)
        return stream

    def dispatch(self, output: EngineOutput) -> None:
        """Hand each stream its share. No consumer runs before this returns."""
        streams = self._streams
        num_pushed = 0
        # The sparse columns first: the last word on a request closes its stream.
        self._each(output.logprobs, Stream.add_logprobs)
        self._each(output.prompt_logprobs, Stream.add_prompt_logprobs)
        self._each(output.embeddings, Stream.set_embedding)
        self._each(output.num_cached_tokens, Stream.set_num_cached)
        self._each(output.progress, Stream.set_progress)
        self._each(output.stop_token_ids, Stream.set_stop_token)
        self._each(output.timings, Stream.set_timings)
        self._each(output.errors, _fail)
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

    def take_all(self) -> list[Stream]:
        """All streams that somebody still wants, in order of submission; none is left here."""
        return [stream for stream in self._clear() if not stream.aborted]

    def adopt(self, streams: Sequence[Stream]) -> list[Request]:
        """What to submit so that streams whose engine has died go on here, in their order.

        What has been there at too many deaths may be what kills, and fails instead.
        """
        requests: list[Request] = []
        for stream in streams:
            if stream.num_resumed >= _MAX_RESUMED:
                stream.fail(RequestFailed("the engine has died too often with this request"))
                continue
            stream.move(self._abort)
            self._add(stream)
            requests.append(stream.resume())
        return requests

    @property
    def num_tokens(self) -> int:
        """That the sequences of all streams hold, waiting or running.

        Counted as they come and go: who asks once a request must not look at all the others.
        """
        return self._num_tokens

    def _add(self, stream: Stream) -> None:
        self._streams[stream.request_id] = stream
        self._num_tokens += stream.num_tokens

    def _clear(self) -> list[Stream]:
        streams, self._streams, self._num_tokens = list(self._streams.values()), {}, 0
        return streams

    def _each(self, column: dict[str, Any], tell: Callable[[Stream, Any], None]) -> None:
        for request_id, value in column.items():
            stream = self._streams.get(request_id)
            if stream is not None and not stream.aborted:
                tell(stream, value)


def _fail(stream: Stream, failure: Failure) -> None:
    stream.fail(failure.to_error())
