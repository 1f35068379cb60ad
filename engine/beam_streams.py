"""Beam search through an engine client: each token of each beam is a short request of its own.

    RequestStream ┐                   ┌ submit: one request a beam, one token each, with logprobs
    RequestStream ┼── group (a task) ─┤
    RequestStream ┘                   └ advance the search; again, until it is done

What a beam shares with its parent, the prompt and nearly all of the output, is found in the prefix
cache, so a token costs a beam at most one block of recomputation. To the caller the hypotheses are
ordinary streams with one output each: they can be aborted, they raise the engine's errors, and they
survive a restart of the engine. If the weights are replaced during a search, it starts over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from engine.beam_search import BeamParams, Hypothesis, make_search, one_token_request
from engine.client import EngineClient, RequestStream
from engine.errors import EngineDead
from engine.types import Request, RequestOutput, RequestTimings, TokenLogprobs

_RESUBMIT_S = 0.05  # between attempts to reach an engine that is restarting


def submit_beams(
    client: EngineClient, requests: Sequence[Request], params: BeamParams
) -> list[RequestStream]:
    """Search the continuations of one prompt; stream ``i`` yields the ``i``-th best hypothesis.

    Must be called in the client's event loop.

    Args:
        client: the engine.
        requests: ``params.width`` of them, as ``fan_out`` makes them. The first one's parameters
            apply to all.
        params: how to search.

    Raises:
        InvalidParameter: the vocabulary is too small for the width.
        EngineDead: the engine is dead.
    """
    return list(_Group(client, requests, params).streams)


class _Group:
    """One search and the streams that await its result."""

    def __init__(
        self, client: EngineClient, requests: Sequence[Request], params: BeamParams
    ) -> None:
        self._client = client
        self._leader = requests[0]
        self._params = params
        self._start_search()
        self._num_steps = 0
        self._live: list[RequestStream] = self._submit()
        self._num_cached: int | None = None
        self._timings: RequestTimings | None = None
        self.streams = [BeamStream(request.id, self) for request in requests]
        self._num_wanted = len(self.streams)
        self._task = asyncio.create_task(self._run())

    def drop(self) -> None:
        """Note that a stream was aborted; the search ends once all are."""
        self._num_wanted -= 1
        if not self._num_wanted:
            self._task.cancel()
            self._abort()

    async def _run(self) -> None:
        try:
            while not self._search.is_done:
                if self._num_steps:
                    self._live = await self._submit_again()
                self._num_steps += 1
                outputs = [await self._next(stream) for stream in self._live]
                if self._client.info.generation == self._generation:
                    self._search.advance(outputs)
                else:  # never mix two sets of weights in one answer
                    self._start_search()
            self._deliver(self._search.best)
        except Exception as error:
            for stream in self.streams:
                stream.fail(error)
            self._abort()

    def _start_search(self) -> None:
        info = self._client.info
        self._generation = info.generation
        self._search = make_search(self._leader, self._params, info)

    def _abort(self) -> None:
        for stream in self._live:
            stream.abort()  # no effect on those that have ended

    def _submit(self) -> list[RequestStream]:
        search, step = self._search, self._num_steps
        return self._client.submit(
            [
                one_token_request(
                    self._leader, f"{step}.{index}", beam.token_ids, search.num_logprobs
                )
                for index, beam in enumerate(search.beams)
            ]
        )

    async def _submit_again(self) -> list[RequestStream]:
        """As ``_submit``, but waits while the engine is restarting."""
        while True:
            try:
                return self._submit()
            except EngineDead:
                if self._client.dead:
                    raise
            await asyncio.sleep(_RESUBMIT_S)

    async def _next(self, stream: RequestStream) -> TokenLogprobs:
        """The log-probabilities of a one-token request."""
        logprobs: tuple[TokenLogprobs, ...] = ()
        while True:
            output = await stream.next()
            logprobs += output.logprobs or ()
            if self._num_cached is None:
                self._num_cached = output.num_cached_tokens
            if output.finish_reason is not None:
                break
        if output.finish_reason != "length" or not logprobs:
            raise EngineDead("the engine ended a beam")
        if output.timings is not None:
            self._timings = _merge_timings(self._timings, output.timings)
        return logprobs[0]

    def _deliver(self, best: Sequence[Hypothesis]) -> None:
        for index, (stream, found) in enumerate(zip(self.streams, best, strict=True)):
            stream.end(
                RequestOutput(
                    id=stream.request_id,
                    token_ids=found.beam.token_ids,
                    logprobs=found.beam.logprobs,
                    num_cached_tokens=None if index else self._num_cached,
                    finish_reason=found.finish_reason,
                    stop_token_id=found.stop_token_id,
                    timings=self._timings,
                )
            )


class BeamStream:
    """A :class:`engine.client.RequestStream` of one hypothesis, which arrives as a whole."""

    def __init__(self, request_id: str, group: _Group) -> None:
        self._request_id = request_id
        self._group = group
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ended = asyncio.Event()
        self._consumed = False

    @property
    def request_id(self) -> str:
        """The id under which it was submitted."""
        return self._request_id

    async def next(self) -> RequestOutput:
        """The whole hypothesis; see :class:`engine.client.RequestStream`."""
        if self._consumed:
            raise StopAsyncIteration
        await self._ended.wait()
        if self._error is not None:
            raise self._error
        self._consumed = True
        assert self._output is not None
        return self._output

    def abort(self) -> None:
        """Stop waiting for the hypothesis. Idempotent."""
        if not self._ended.is_set():
            self.end(RequestOutput(id=self._request_id, finish_reason="abort"))
            self._group.drop()

    def end(self, output: RequestOutput) -> None:
        """Set the only output, unless the stream has ended."""
        if not self._ended.is_set():
            self._output = output
            self._ended.set()

    def fail(self, error: Exception) -> None:
        """Set the error, unless the stream has ended."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()


def _merge_timings(first: RequestTimings | None, last: RequestTimings) -> RequestTimings:
    """Combine the timings of successive short requests into those of one request."""
    if first is None:
        return last
    return msgspec.structs.replace(
        first,
        finished_s=last.finished_s,
        num_preemptions=first.num_preemptions + last.num_preemptions,
        num_draft_tokens=first.num_draft_tokens + last.num_draft_tokens,
        num_accepted_tokens=first.num_accepted_tokens + last.num_accepted_tokens,
    )
