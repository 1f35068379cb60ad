"""Processes the result of a step: appends tokens, finishes sequences, collects the output."""

from __future__ import annotations

from engine.scheduler.drafts import rollback_rejected
from engine.scheduler.output import OutputBuilder
from engine.scheduler.passes import rollback_passes
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import Fill, PlannedStep
from engine.speculation.speculator import Speculator
from engine.types import EngineOutput, FinishReason, StepPlan, StepResult


class ResultProcessor:
    """Turns step results into outputs, and publishes the blocks that were filled."""

    def __init__(self, state: SchedulerState, speculator: Speculator | None = None) -> None:
        self._state = state
        self._speculator = speculator

    def process(
        self, plan: StepPlan, planned: PlannedStep, result: StepResult, now_s: float
    ) -> EngineOutput:
        """The output of ``result``, with everything else since the last output.

        Rows of sequences that have ended in the meantime are ignored.
        """
        state = self._state
        sampled = _sampled(plan, planned.seqs, result)
        if result.errors:
            self._take_errors(planned.seqs, result, now_s)
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, planned.seqs, result)
        if result.pooled:
            self._take_pooled(planned.fills, result)
        for seq, table, start, end in planned.fills:
            if seq.table is table and seq.status is Status.RUNNING:
                seq.num_confirmed = max(seq.num_confirmed, end)
                state.pool.publish(seq.chain, seq.token_ids, table, start, end)
        self._take_tokens(sampled, result, now_s)
        if plan.rows.unsampled:
            self._end_without_tokens(planned.fills, now_s)
        if state.window is not None:
            for seq, table, _, _ in planned.fills:
                if seq.table is table and seq.status is Status.RUNNING:
                    state.free_out_of_window(seq)
        state.progress.report(state.pending_output, state.sequences.values(), now_s)
        return self.flush_output(plan.num_tokens)

    def flush_output(self, step_tokens: int) -> EngineOutput:
        """Everything that has happened since the last output."""
        news = self._state.pending_output
        # Unfinished prompts with something to report do not have a row in the columns yet.
        if unended := news.prompt_logprobs.keys() | news.progress.keys():
            for request_id in unended.difference(news.ids):
                news.append(request_id, (), None)
        self._state.pending_output = OutputBuilder()
        return news.build(self._state.stats(step_tokens))

    def _take_errors(self, seqs: list[Sequence], result: StepResult, now_s: float) -> None:
        state = self._state
        for seq in seqs:
            failure = result.errors.get(seq.id)
            if failure is not None and seq.status is not Status.FINISHED:
                state.finish(seq, now_s)
                state.pending_output.append(seq.id, (), "error")
                state.pending_output.errors[seq.id] = failure

    def _take_tokens(self, seqs: list[Sequence], result: StepResult, now_s: float) -> None:
        # Like the planner's, this loop visits every sequence in every step; it reuses the result's
        # columns.
        news = self._state.pending_output
        first = len(news.ids)
        ended: list[int] = []  # indices of sequences that ended in the meantime
        news.ids += result.ids
        news.token_ids += result.token_ids
        news.finish_reasons += [None] * len(result.ids)
        running = Status.RUNNING
        for index, (seq, new_tokens) in enumerate(zip(seqs, result.token_ids, strict=True), first):
            seq.num_pending -= 1
            if seq.status is not running:
                if seq.status is Status.FINISHED:
                    seq.draft_ids = ()
                    ended.append(index)
                    continue
                self._state.num_waiting_tokens += len(new_tokens)  # preempted in the meantime
            if seq.first_token_s is None:
                self._take_first(seq, now_s)
            token_ids = seq.token_ids
            token_ids += new_tokens
            if seq.draft_ids and self._speculator is not None:
                rollback_rejected(seq, new_tokens, self._state, self._speculator)
            elif seq.num_extra_passes:
                rollback_passes(seq, len(new_tokens), self._state)
            stop_ids = seq.stop_ids
            is_last = len(token_ids) >= seq.max_num_tokens
            if is_last or (stop_ids and not stop_ids.isdisjoint(new_tokens)):
                self._take_last(seq, index, now_s)
        if any(result.logprobs):
            self._take_logprobs(result, first)
        for index in reversed(ended):
            news.remove_row(index)

    def _take_first(self, seq: Sequence, now_s: float) -> None:
        """Note the first token of ``seq``, which means that its prompt is computed."""
        seq.first_token_s = now_s
        self._state.pending_output.report_begin(seq)
        self._state.enqueue_forks(seq)

    def _take_last(self, seq: Sequence, index: int, now_s: float) -> None:
        """End ``seq`` at the first of its new tokens that finishes it, if any."""
        news = self._state.pending_output
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
        news = self._state.pending_output
        for index, logprobs in enumerate(result.logprobs, first):
            if logprobs:
                news.logprobs[news.ids[index]] = logprobs[: len(news.token_ids[index])]

    def _take_prompt_logprobs(
        self, plan: StepPlan, seqs: list[Sequence], result: StepResult
    ) -> None:
        for seq, row_id, start in zip(seqs, plan.rows.ids, plan.rows.starts, strict=True):
            logprobs = result.prompt_logprobs.get(row_id)
            if logprobs is None or seq.status is Status.FINISHED:
                continue
            # Entry i of a sequence belongs to its token i + 1; a row starting at s has entries from
            # s on.
            fresh = logprobs[max(0, seq.num_prompt_logprobs - start) :]
            if fresh:
                seq.num_prompt_logprobs += len(fresh)
                self._state.pending_output.prompt_logprobs[row_id] = fresh
                self._state.pending_output.report_begin(seq)

    def _take_pooled(self, fills: list[Fill], result: StepResult) -> None:
        """Collect parts of pooled vectors, but none from before a preemption: they come again."""
        for seq, table, _, _ in fills:
            part = result.pooled.get(seq.id)
            params = seq.request.pooling
            if part is None or params is None or seq.table is not table:
                continue
            if seq.pooled is None:
                # Imported here because it needs numpy, which API processes do without.
                from engine.scheduler.pooling import PoolingAccumulator

                seq.pooled = PoolingAccumulator(params)
            seq.pooled.add(part)

    def _end_without_tokens(self, fills: list[Fill], now_s: float) -> None:
        """End the sequences that sample no token and whose prompts are computed.

        One that was preempted since, and may even run again, ends when it is computed again: what
        its vector had of the steps before has been dropped.
        """
        news = self._state.pending_output
        for seq, table, _, end in fills:
            if seq.table is not table or seq.status is not Status.RUNNING:
                continue
            if not end == len(seq.token_ids) >= seq.max_num_tokens:
                continue
            news.report_begin(seq)
            if seq.request.pooling is None:
                news.append(seq.id, (), "length")
            else:
                news.append(seq.id, (), "stop")
                vector = None if seq.pooled is None else seq.pooled.finish()
                if vector is not None:
                    news.embeddings[seq.id] = vector
            self._state.finish(seq, now_s)


def _sampled(plan: StepPlan, seqs: list[Sequence], result: StepResult) -> list[Sequence]:
    """The sequences that the result's ids stand for, in order; ``seqs`` itself if that is all."""
    if len(result.ids) == len(seqs):
        return seqs
    silent = plan.rows.unsampled
    if len(result.ids) + len(silent) == len(seqs):
        return [seq for place, seq in enumerate(seqs) if place not in silent]
    reported = set(result.ids)
    found: list[Sequence] = []
    for place, (row_id, seq) in enumerate(zip(plan.rows.ids, seqs, strict=True)):
        if row_id in reported:
            found.append(seq)
        elif place not in silent:  # it failed, or lost its blocks before the step was replayed
            seq.num_pending -= 1 + seq.num_extra_passes
            seq.num_extra_passes, seq.should_wait_for_token = 0, False
            seq.draft_ids = ()
    return found
