"""The sequences of one API request, from submission to completion.

Submits, aborts and counts sequences. A :class:`Generation` is a context manager: however its block
exits, every sequence has ended, its blocks are being freed, and it has been counted exactly once,
as finished, failed or aborted.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from types import TracebackType
from typing import Self

import msgspec

from engine.beam_search import BeamParams
from engine.beam_streams import submit_beams
from engine.client import RequestStream
from engine.errors import (
    DeadlineExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    OutOfMemory,
    RequestError,
)
from engine.requests import fan_out
from engine.text.output import OutputDecoder, TextDelta
from engine.types import RequestOutput
from server.access.account import Charge
from server.access.caller import ANONYMOUS, Caller
from server.access.usage import UsageCounts
from server.openai.choice import Choice, Job, Step
from server.openai.outputs import (
    CompletionTokensDetails,
    PromptTokensDetails,
    Usage,
)
from server.openai.timings import times_until_now, timings_of
from server.state import Model, ServerState
from server.tracing import TracedRequest

# The engine itself ends sequences at their deadline. If it reports nothing for this long after, it
# hangs or is restarting, and the client gets the error without it.
_DEADLINE_GRACE_S = 1.0


class Generation:
    """``n`` continuations of each of some prompts; choice ``prompt * n + i``.

    Args:
        id: the response's unique id, under which the engine knows the sequences.
        jobs: the prompts and their sampling, which may differ only in ``max_tokens``.
        continuation: the outputs' text continues the prompt's, as in completions.
        caller: whose quota and prefix cache are used, and the deadline.
        shown_special_ids: special tokens that are always part of the outputs' text.
        report_progress: report the prefill progress of each prompt with its first choice.
        beams: use beam search instead of sampling, with width ``n``; the choices of a prompt arrive
            whole, the likeliest first.
        count_param: the request's field that ``n`` comes from.
        follows, is_followed: of several in sequence that answer one request, whether it is not the
            first, and whether it need not be the last.

    Entering raises ApiError (429 beyond the caller's limits, 503 when the queue is full, 400 when
    it could never hold the sequences), and EngineDead.
    """

    def __init__(
        self,
        state: ServerState,
        model: Model,
        id: str,
        jobs: Sequence[Job],
        *,
        priority: int = 0,
        cache_salt: str = "",
        continuation: bool = False,
        caller: Caller = ANONYMOUS,
        shown_special_ids: frozenset[int] = frozenset(),
        report_progress: bool = False,
        beams: BeamParams | None = None,
        count_param: str = "n",
        follows: bool = False,
        is_followed: bool = False,
    ) -> None:
        self._state = state
        self._model = model
        self._id = id
        self._jobs = jobs
        self._priority = priority
        # Tenants share no cached prefixes: latencies would reveal one's prompts to another.
        self._cache_salt = f"{caller.tenant}\0{cache_salt}" if caller.tenant else cache_salt
        self._caller = caller
        self._continuation = continuation
        self._shown_special_ids = shown_special_ids
        self._report_progress = report_progress
        self._beams = beams
        self._follows, self._is_followed = follows, is_followed
        self._count_param = count_param if jobs[0].sampling.n > 1 else "prompt"
        self._cached_tokens = 0
        self._num_drafted = self._num_accepted = 0  # draft tokens, of the choices that have ended
        self._charge: Charge | None = None
        self._media_bytes = sum(job.media_bytes for job in jobs)
        self._deadline_passed = False
        self._timer: asyncio.TimerHandle | None = None
        # Of the weights that generate: a request that waits while they are replaced gets the new
        # ones.
        self.fingerprint = model.info.fingerprint
        self.choices: list[Choice] = []

    def __enter__(self) -> Self:
        state = self._state
        count = sum(job.sampling.n for job in self._jobs)
        prompt_tokens = self._prompt_tokens
        most = sum((job.sampling.max_tokens or 0) * job.sampling.n for job in self._jobs)
        account, background = self._caller.account, self._caller.background
        charge = account.charge(prompt_tokens, most, background=background)
        try:
            state.admit(count, self._caller, self._media_bytes, param=self._count_param)
        except BaseException:
            charge.settle(UsageCounts())
            raise
        self._charge = charge
        try:
            choices = self._make_choices()
            streams = self._submit(choices)
        except BaseException:
            self._release(count)
            state.media.release(self._media_bytes)
            charge.settle(UsageCounts())
            raise
        self.choices = choices
        for choice, stream in zip(choices, streams, strict=True):
            choice.stream = stream
            prompt = choice.request.prompt_token_ids
            limit = choice.request.sampling.max_tokens
            most = self._model.info.max_model_len - len(prompt)
            state.metrics.record_submitted(
                choice.request.id,
                choice.request.arrival_s,
                prompt_tokens=len(prompt),
                max_tokens=most if limit is None else limit,
            )
        for job in self._jobs:
            state.metrics.record_prompt(
                len(job.token_ids),
                job.sampling.n,
                images=sum(not image.is_tile and image.video is None for image in job.images),
                audio=len(job.audio),
                videos=sum(image.begins_video for image in job.images),
            )
        if (deadline_s := self._caller.deadline_s) is not None:
            delay_s = deadline_s - time.monotonic() + _DEADLINE_GRACE_S
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._abort_at_deadline)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        metrics = self._state.metrics
        if self._timer is not None:
            self._timer.cancel()
        self._state.media.release(self._media_bytes)
        for choice in self.choices:
            if choice.finish_reason is not None or choice.stream is None:
                continue
            choice.stream.abort()
            self._release(1)
            if isinstance(error, Exception):
                metrics.record_failed(choice.request.id, _failure_reason(error))
            else:  # cancelled, or the consumer stopped early: nobody reads any further
                phase = "decoding" if choice.num_tokens else "waiting"
                metrics.record_aborted(choice.request.id, phase)
        if self._charge is not None:
            self._charge.settle(self._usage_counts())
        if self._state.tracing is not None:
            self._state.tracing.record(self._trace_record(error))

    def _trace_record(self, error: BaseException | None) -> TracedRequest:
        return TracedRequest(
            id=self._id,
            operation=self.operation,
            model=self._model.name,
            tenant=self._caller.tenant,
            parent=self._caller.trace,
            sampling=self._jobs[0].sampling,
            usage=self.usage,
            choices=self.choices,
            error=_failure_reason(error) if isinstance(error, Exception) else None,
        )

    def _submit(self, choices: Sequence[Choice]) -> list[RequestStream]:
        engine = self._state.engine
        if self._beams is None:
            return engine.submit([choice.request for choice in choices])
        streams: list[RequestStream] = []
        try:
            for group in range(len(self._jobs)):
                requests = [choice.request for choice in choices if choice.prompt_index == group]
                streams += submit_beams(engine, requests, self._beams)
        except BaseException:
            for stream in streams:
                stream.abort()
            raise
        return streams

    def _usage_counts(self) -> UsageCounts:
        usage = self.usage
        return UsageCounts(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=self._cached_tokens,
            output_tokens=usage.completion_tokens,
        )

    def _abort_at_deadline(self) -> None:
        """End all sequences: the deadline has passed and the engine has not reported it."""
        self._deadline_passed = True
        for choice in self.choices:
            if choice.finish_reason is None and choice.stream is not None:
                choice.stream.abort()

    def _make_choices(self) -> list[Choice]:
        choices: list[Choice] = []
        for prompt_index, (token_ids, sampling, images, audio) in enumerate(self._jobs):
            sequences = fan_out(
                self._id if len(self._jobs) == 1 else f"{self._id}-{prompt_index}",
                token_ids,
                sampling,
                images=images,
                audio=audio,
                priority=self._priority,
                cache_salt=self._cache_salt,
                adapter=self._model.adapter,
                tenant=self._caller.tenant,
                weight=self._caller.weight,
                background=self._caller.background,
                deadline_s=self._caller.deadline_s,
                follows=self._follows,
                is_followed=self._is_followed,
            )
            if self._report_progress:
                sequences[0] = msgspec.structs.replace(sequences[0], report_progress=True)
            for request in sequences:
                decoder = OutputDecoder(
                    self._model.tokenizer,
                    sampling,
                    continuation=self._continuation,
                    shown_special_ids=self._shown_special_ids,
                )
                choices.append(Choice(len(choices), prompt_index, request, decoder))
        return choices

    async def steps(self) -> AsyncIterator[Step]:
        """Yield the new output of the choices as it arrives, until all have ended.

        A consumer that lags gets several engine steps merged into one.

        Raises:
            RequestError: the engine refused the request.
            RequestFailed: a sequence failed because of a fault in the server.
            DeadlineExceeded: the caller's deadline has passed.
            EngineDead: the engine is gone.
        """
        if len(self.choices) > 1:
            async for step in self._merged_steps():
                yield step
            return
        choice = self.choices[0]
        assert choice.stream is not None
        while choice.finish_reason is None:
            yield [(choice, self._process_output(choice, await choice.stream.next()))]

    async def _merged_steps(self) -> AsyncIterator[Step]:
        """The choices' steps, with one pending ``next()`` per choice so that its outputs merge."""
        ready: asyncio.Queue[tuple[Choice, asyncio.Task[RequestOutput]]] = asyncio.Queue()
        pending: set[asyncio.Task[RequestOutput]] = set()

        def pull(choice: Choice) -> None:
            assert choice.stream is not None
            task = asyncio.ensure_future(choice.stream.next())
            pending.add(task)
            task.add_done_callback(lambda task: ready.put_nowait((choice, task)))

        try:
            for choice in self.choices:
                pull(choice)
            while pending:
                arrived = [await ready.get()]
                while not ready.empty():
                    arrived.append(ready.get_nowait())
                step: Step = []
                for choice, task in arrived:
                    pending.discard(task)
                    step.append((choice, self._process_output(choice, task.result())))
                yield step
                for choice, _ in arrived:
                    if choice.finish_reason is None:
                        pull(choice)
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    def _process_output(self, choice: Choice, output: RequestOutput) -> TextDelta:
        """Decode one output; after the last one, record the choice's totals."""
        metrics = self._state.metrics
        if output.prompt_logprobs:
            choice.prompt_logprobs += output.prompt_logprobs
        if output.num_cached_tokens and choice.request.fork_of is None:
            self._cached_tokens += output.num_cached_tokens
            metrics.record_cached_tokens(output.num_cached_tokens)
        if output.scheduled_s is not None:
            choice.scheduled_s = output.scheduled_s
        choice.progress = output.progress
        if not choice.num_tokens:
            self.fingerprint = self._state.engine.info.fingerprint
        delta = choice.decoder.push(output)
        if not choice.num_tokens and delta.token_ids:
            choice.first_token_s = time.monotonic()
        choice.num_tokens += len(delta.token_ids)
        metrics.record_generated_tokens(len(delta.token_ids))
        if delta.finished:
            assert choice.stream is not None
            if self._deadline_passed and delta.finish_reason == "abort":
                raise DeadlineExceeded
            if delta.finish_reason not in ("stop", "length"):
                raise EngineDead("the engine ended the sequence")
            choice.finish_reason, choice.stop_reason = delta.finish_reason, delta.stop_reason
            times = output.timings or times_until_now(
                choice.request.arrival_s, choice.scheduled_s, choice.first_token_s
            )
            choice.timings = timings_of(times, choice.first_token_s, output.timings is not None)
            if output.finish_reason is None:
                choice.stream.abort()  # a stop string, which the engine does not watch for
            self._release(1)
            if output.timings is not None:
                self._num_drafted += output.timings.num_draft_tokens
                self._num_accepted += output.timings.num_accepted_tokens
            metrics.record_finished(
                choice.request.id, delta.finish_reason, choice.num_tokens, times
            )
        return delta

    def _release(self, count: int) -> None:
        self._state.release(count, self._caller)

    @property
    def operation(self) -> str:
        """OpenTelemetry's name for this operation."""
        return "text_completion" if self._continuation else "chat"

    @property
    def _prompt_tokens(self) -> int:
        return sum(len(job.token_ids) for job in self._jobs)

    @property
    def usage(self) -> Usage:
        """Tokens read and generated so far."""
        prompt_tokens = self._prompt_tokens
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        return Usage(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=self._cached_tokens),
            completion_tokens_details=self._completion_details,
        )

    @property
    def _completion_details(self) -> CompletionTokensDetails:
        details = CompletionTokensDetails(
            reasoning_tokens=sum(choice.num_reasoning_tokens for choice in self.choices)
        )
        if self._num_drafted:
            details.accepted_prediction_tokens = self._num_accepted
            details.rejected_prediction_tokens = self._num_drafted - self._num_accepted
        return details


def _failure_reason(error: Exception) -> str:
    if isinstance(error, RequestError):
        return "refused"
    if isinstance(error, DeadlineExceeded):
        return "deadline"
    if isinstance(error, OutOfMemory):
        return "out_of_memory"
    if isinstance(error, EngineAsleep):
        return "asleep"
    if isinstance(error, EngineDead):
        return "engine_dead"
    return "failed" if isinstance(error, EngineError) else "internal"
