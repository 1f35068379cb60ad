"""Drives an engine core in the caller's thread, for the offline ``LLM``."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Self

from engine.core import EngineCore
from engine.errors import EngineDead, Failure
from engine.interrupts import DeferredInterrupts
from engine.text.bad_words import with_bad_token_ids
from engine.text.output import OutputDecoder, TextDelta, TokenLogprob
from engine.text.tokenizer import Tokenizer
from engine.types import (
    EngineOutput,
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    TokenLogprobs,
)


class Choice:
    """One continuation being generated. Written only by the driver."""

    def __init__(self, request: Request, decoder: OutputDecoder, *, keep_deltas: bool) -> None:
        self.request = request
        self.deltas: deque[TextDelta] | None = deque() if keep_deltas else None
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.embedding: bytes | None = None
        self.num_cached_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: str | int | None = None
        self.failure: Failure | None = None
        self._decoder = decoder
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)

    def push(self, output: RequestOutput) -> None:
        """Add one step's output."""
        self.prompt_logprobs += output.prompt_logprobs
        self.embedding = output.embedding
        if output.num_cached_tokens is not None:
            self.num_cached_tokens = output.num_cached_tokens
        delta = self._decoder.push(output)
        self._texts.append(delta.text)
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason
        if self.deltas is not None:
            self.deltas.append(delta)


class Driver:
    """Adds requests to a core, steps it, and distributes each step's output to the choices.

    Ctrl-C is raised between these, when core and choices are consistent, so all can be used again.
    """

    def __init__(self, core: EngineCore, tokenizer: Tokenizer) -> None:
        self._core: EngineCore | None = core
        self._tokenizer = tokenizer
        self._live: dict[str, Choice] = {}
        self._uninterrupted = DeferredInterrupts(self._give_up)
        self._abandoned: deque[Choice] = deque()  # to be aborted between steps
        self._thread_id = threading.get_ident()  # of the last caller
        self._end = "this engine has been closed"

    @property
    def core(self) -> EngineCore:
        """The engine. Raises EngineDead once it is closed."""
        if self._core is None:
            raise EngineDead(self._end)
        return self._core

    def close(self) -> None:
        """Release the engine; unfinished choices never finish. Idempotent."""
        self._core = None
        self._live.clear()
        self._abandoned.clear()

    def prepare_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """``sampling`` with its bad words converted to tokens; its grammar is compiled.

        Raises:
            InvalidParameter: the grammar is unusable.
        """
        if sampling.grammar is not None:
            self.core.compile(sampling.grammar)
        return with_bad_token_ids(sampling, self._tokenizer)

    def submit(
        self,
        requests: Sequence[Request],
        sampling: SamplingParams,
        *,
        continuation: bool,
        keep_deltas: bool = False,
    ) -> list[Choice]:
        """Queue the requests of one prompt; if one is refused, none is queued.

        Raises:
            RequestError: the engine refused a request.
        """
        choices: list[Choice] = []
        self._thread_id = threading.get_ident()
        try:
            with self._uninterrupted:
                for request in requests:
                    self.core.add(request)
                    decoder = OutputDecoder(self._tokenizer, sampling, continuation=continuation)
                    choices.append(Choice(request, decoder, keep_deltas=keep_deltas))
                    self._live[request.id] = choices[-1]
        except BaseException:  # refused, or interrupted: the caller would not know of them
            self.abort(choices)
            raise
        return choices

    def step(self) -> list[Choice]:
        """Compute one step for everything queued; returns the choices that it finished.

        Raises:
            EngineDead: the device is lost.
        """
        if idle_s := self.core.idle_s:
            time.sleep(idle_s)
        self._thread_id = threading.get_ident()
        finished: list[Choice] = []
        with self._uninterrupted:
            output = self.core.step()
            for index, request_id in enumerate(output.ids):
                choice = self._live.get(request_id)
                if choice is None:
                    continue
                choice.push(_request_output(output, index))
                choice.failure = output.errors.get(request_id)
                if choice.finish_reason is not None:
                    finished.append(choice)
                    del self._live[request_id]
                    if output.finish_reasons[index] is None:  # by a stop string
                        self.core.abort(request_id)
            self._abort_abandoned()
        return finished

    def abort(self, choices: Sequence[Choice]) -> None:
        """End those of ``choices`` that are unfinished, and free what they hold."""
        with self._uninterrupted:
            for choice in choices:
                if self._live.pop(choice.request.id, None) is not None:
                    self.core.abort(choice.request.id)
            while not self._live and self._core is not None and self._core.has_work:
                self._core.step()  # no other step would come to free it

    def abandon(self, choice: Choice) -> None:
        """End a choice that nobody holds any more, at once or after the step in progress.

        For finalizers, which the garbage collector may run within a step, in any thread.
        """
        self._abandoned.append(choice)
        if not self._uninterrupted.is_active and threading.get_ident() == self._thread_id:
            self._abort_abandoned()

    def _abort_abandoned(self) -> None:
        while self._abandoned:
            self.abort([self._abandoned.popleft()])

    def _give_up(self) -> None:
        self.close()
        self._end = "this engine was interrupted in the middle of a step"


class TextStream(Iterator[TextDelta]):
    """The text deltas of one continuation; ``next`` steps the engine if necessary."""

    def __init__(self, driver: Driver, choice: Choice) -> None:
        self._driver = driver
        self._choice = choice
        self._closed = False

    def __next__(self) -> TextDelta:
        """The next delta that is not empty; the last one is ``finished``.

        Raises:
            RequestFailed: the request failed through the engine's own fault.
            EngineDead: the device is lost, or the engine closed.
        """
        deltas = self._choice.deltas
        assert deltas is not None
        while not self._closed:
            while not deltas and self._choice.finish_reason is None:
                self._driver.step()
            if not deltas:
                break
            delta = deltas.popleft()
            if delta.finished:
                self.close()
                if self._choice.failure is not None:
                    raise self._choice.failure.to_error()
            if delta.text or delta.finished or delta.logprobs:
                return delta
        raise StopIteration

    def close(self) -> None:
        """End the request if it has not ended. Idempotent."""
        if not self._closed:
            self._closed = True
            self._driver.abort([self._choice])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if not self._closed:
            self._closed = True
            self._driver.abandon(self._choice)


def _request_output(output: EngineOutput, index: int) -> RequestOutput:
    """One request's part of a step's output."""
    request_id = output.ids[index]
    return RequestOutput(
        id=request_id,
        token_ids=output.token_ids[index],
        logprobs=output.logprobs.get(request_id),
        prompt_logprobs=output.prompt_logprobs.get(request_id, ()),
        embedding=output.embeddings.get(request_id),
        num_cached_tokens=output.num_cached_tokens.get(request_id),
        scheduled_s=output.scheduled_s.get(request_id),
        finish_reason=output.finish_reasons[index],
        stop_token_id=output.stop_token_ids.get(request_id),
        timings=output.timings.get(request_id),
    )
