"""Taking a step's result in: tokens are appended, sequences end, clients are told."""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.output import OutputBuilder
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import Fill
from engine.types import EngineOutput, FinishReason, ScheduledRow, StepPlan, StepResult


class ResultTaker:
    """Turns results into outputs, and publishes what the steps have computed."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def take(
        self, plan: StepPlan, fills: Iterable[Fill], result: StepResult, now_s: float
    ) -> EngineOutput:
        """The news that ``result`` brings, and all there is since the last output.

        Rows of sequences that have ended since are passed over.
        """
        state, news = self._state, self._state.news
        if result.errors:
            self._take_errors(result, now_s)
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, result)
        for seq, table, start, end in fills:
            if seq.table is table and seq.status is Status.RUNNING:
                state.pool.publish(seq.chain, seq.token_ids, table, start, end)
        self._take_tokens(result, now_s)
        for row in plan.rows:
            if not row.samples:
                self._end_without_tokens(row, now_s)
        if news.prompt_logprobs:  # of prompts that go on: they have no row among the columns yet
            told = set(news.ids)
            for request_id in news.prompt_logprobs:
                if request_id not in told:
                    news.append(request_id, (), None)
        state.news = OutputBuilder()
        return news.build(state.stats(plan.num_tokens))

    def _take_errors(self, result: StepResult, now_s: float) -> None:
        state = self._state
        for request_id, failure in result.errors.items():
            seq = state.running.get(request_id)
            if seq is not None:
                state.finish(seq, now_s)
                state.news.append(request_id, (), "error")
                state.news.errors[request_id] = failure

    def _take_tokens(self, result: StepResult, now_s: float) -> None:
        # The other loop over every sequence at every step; its columns are the result's own.
        news, running = self._state.news, self._state.running
        first = len(news.ids)
        ended: list[int] = []  # indices of sequences that have ended before
        news.ids += result.ids
        news.token_ids += result.token_ids
        news.finish_reasons += [None] * len(result.ids)
        for index, request_id in enumerate(result.ids, first):
            seq = running.get(request_id)
            if seq is None:
                ended.append(index)
                continue
            if seq.first_token_s is None:
                self._take_first(seq, now_s)
            new_tokens = news.token_ids[index]
            token_ids = seq.token_ids
            token_ids += new_tokens
            if len(token_ids) >= seq.max_num_tokens or not seq.stop_ids.isdisjoint(new_tokens):
                self._take_last(seq, index, now_s)
        if any(result.logprobs):
            self._take_logprobs(result, first)
        for index in reversed(ended):
            news.withdraw(index)

    def _take_first(self, seq: Sequence, now_s: float) -> None:
        """The first token is there: the prompt is computed."""
        seq.first_token_s = now_s
        self._state.news.tell_cached(seq)
        self._state.free_forks(seq)

    def _take_last(self, seq: Sequence, index: int, now_s: float) -> None:
        """End ``seq`` at the first of its new tokens that ends it, if one does."""
        news = self._state.news
        new_tokens = news.token_ids[index]
        before = len(seq.token_ids) - len(new_tokens)
        for count, token in enumerate(new_tokens, 1):
            reason: FinishReason
            if token in seq.stop_ids and before + count >= seq.min_num_tokens:
                reason = "stop"
                news.stop_token_ids[seq.id] = token
            elif before + count >= seq.max_num_tokens:
                reason = "length"
            else:
                continue
            news.token_ids[index] = new_tokens[:count]
            news.finish_reasons[index] = reason
            self._state.finish(seq, now_s)
            return

    def _take_logprobs(self, result: StepResult, first: int) -> None:
        news = self._state.news
        for index, logprobs in enumerate(result.logprobs, first):
            if logprobs:
                news.logprobs[news.ids[index]] = logprobs[: len(news.token_ids[index])]

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        starts = {row.id: row.start for row in plan.rows}
        for request_id, logprobs in result.prompt_logprobs.items():
            seq = self._state.running.get(request_id)
            if seq is None:
                continue
            # Entry i of a sequence belongs to its token i + 1; a row at s brings entries from s.
            fresh = logprobs[max(0, seq.num_prompt_logprobs - starts[request_id]) :]
            if fresh:
                seq.num_prompt_logprobs += len(fresh)
                self._state.news.prompt_logprobs[request_id] = fresh
                self._state.news.tell_cached(seq)

    def _end_without_tokens(self, row: ScheduledRow, now_s: float) -> None:
        """End a sequence that wanted no token, once its prompt is computed."""
        seq = self._state.running.get(row.id)
        if seq is None:
            return
        end = row.start + len(row.token_ids)
        if end == len(seq.token_ids) >= seq.max_num_tokens:
            self._state.news.tell_cached(seq)
            self._state.news.append(seq.id, (), "length")
            self._state.finish(seq, now_s)
