"""Collects what happens to requests between two outputs of the engine."""

from __future__ import annotations

from engine.errors import Failure
from engine.prompt_progress import PromptProgress
from engine.scheduler.sequence import Sequence
from engine.stats import EngineStats
from engine.types import EngineOutput, FinishReason, RequestTimings, TokenLogprobs


class OutputBuilder:
    """The columns of an :class:`EngineOutput` under construction."""

    __slots__ = (
        "embeddings",
        "errors",
        "finish_reasons",
        "ids",
        "logprobs",
        "num_cached_tokens",
        "progress",
        "prompt_logprobs",
        "scheduled_s",
        "stop_token_ids",
        "timings",
        "token_ids",
    )

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.token_ids: list[tuple[int, ...]] = []
        self.finish_reasons: list[FinishReason | None] = []
        self.logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        self.embeddings: dict[str, bytes] = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.scheduled_s: dict[str, float] = {}
        self.progress: dict[str, PromptProgress] = {}
        self.stop_token_ids: dict[str, int] = {}
        self.timings: dict[str, RequestTimings] = {}
        self.errors: dict[str, Failure] = {}

    def append(
        self, request_id: str, token_ids: tuple[int, ...], reason: FinishReason | None
    ) -> None:
        """Add a request's row to the columns; at most one per step."""
        self.ids.append(request_id)
        self.token_ids.append(token_ids)
        self.finish_reasons.append(reason)

    def remove_row(self, index: int) -> None:
        """Remove the row of a request that ended before its token arrived."""
        request_id = self.ids.pop(index)
        del self.token_ids[index], self.finish_reasons[index]
        self.logprobs.pop(request_id, None)

    def report_begin(self, seq: Sequence) -> None:
        """Report once when it began, and how much of the prompt was found in the cache."""
        if not seq.begin_reported and seq.num_cached is not None:
            seq.begin_reported = True
            self.num_cached_tokens[seq.id] = seq.num_cached
            if seq.scheduled_s is not None:
                self.scheduled_s[seq.id] = seq.scheduled_s

    def report_timings(self, seq: Sequence, finished_s: float) -> None:
        """Report the timestamps of a request; 0 for events that never happened."""
        self.timings[seq.id] = RequestTimings(
            seq.request.arrival_s,
            seq.scheduled_s or 0.0,
            seq.first_token_s or 0.0,
            finished_s,
            seq.num_preemptions,
            0 if seq.draft_state is None else seq.draft_state.num_drafted,
            0 if seq.draft_state is None else seq.draft_state.num_accepted,
        )

    def build(self, stats: EngineStats) -> EngineOutput:
        """Return the finished output. The builder must not be used afterwards."""
        return EngineOutput(
            ids=tuple(self.ids),
            token_ids=tuple(self.token_ids),
            finish_reasons=tuple(self.finish_reasons),
            logprobs=self.logprobs,
            prompt_logprobs=self.prompt_logprobs,
            embeddings=self.embeddings,
            num_cached_tokens=self.num_cached_tokens,
            scheduled_s=self.scheduled_s,
            progress=self.progress,
            stop_token_ids=self.stop_token_ids,
            timings=self.timings,
            errors=self.errors,
            stats=stats,
        )
