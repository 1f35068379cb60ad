"""Which sequences compute which tokens, step by step: pure bookkeeping, no torch, clock or I/O.

    add ──► waiting ──admit──► running ──update──► finished
               ▲                  │
               └─────preempt──────┘

A step has one budget of tokens. Whoever runs comes first, then waiting prompts join in chunks
until the budget, the blocks or the places are used up; a sequence leaves in the step in which its
last token arrives. When a running sequence needs a block and none is free, the one that the
policy puts last gives all of its blocks up and waits again: its tokens are computed once more
when it returns, less those that are still found in the prefix cache.

Times are told by the caller, so that the same calls always give the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from engine.config import SchedulerConfig
from engine.errors import InvalidParameter
from engine.kv_cache.pool import BlockPool, BlockTable
from engine.scheduler.output import OutputBuilder
from engine.scheduler.policy import POLICIES
from engine.scheduler.sequence import Sequence, Status, leader_of, sequence_of
from engine.scheduler.step import Fill, StepBuilder, added_row, replay
from engine.scheduler.waiting import WaitingQueue
from engine.types import (
    EngineOutput,
    EngineStats,
    FinishReason,
    Request,
    ScheduledRow,
    StepPlan,
    StepResult,
)


class Scheduler:
    """Owns all sequences, and through the pool all blocks.

    ``schedule`` counts the tokens it plans as computed, and ``update`` only adds what came of
    them; so plans may be made ahead of the results of earlier ones, given in order.

    Args:
        config: limits of a step, and the policy.
        pool: the blocks; nobody else takes any.
        max_model_len: longest context, in tokens of prompt and output.
        eos_token_ids: tokens that end a sequence unless it asks to ignore them.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        max_model_len: int,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        self._config = config
        self._pool = pool
        self._max_len = min(max_model_len, pool.num_blocks * pool.block_size)
        self._eos = frozenset(eos_token_ids)
        self._key = POLICIES[config.policy]

        self._sequences: dict[str, Sequence] = {}  # all that have not finished
        self._running: dict[str, Sequence] = {}  # in the order of admission
        self._waiting = WaitingQueue(self._key)
        self._num_added = 0
        self._num_waiting_tokens = 0
        # The head of the queue when it last found too few blocks, and how many it found.
        self._blocked: tuple[Sequence | None, int] = (None, 0)

        self._removed: list[str] = []  # rows the runner is to forget with the next plan
        self._fills: deque[list[Fill]] = deque()  # of the plans whose results are not there yet
        self._news = OutputBuilder()

        self._num_wasted = 0  # slots of running tables that hold no token
        self._num_preemptions = 0
        self._prefix_queries = 0
        self._prefix_hits = 0
        self._num_steps = 0
        self._slots_held_sum = 0
        self._slots_wasted_sum = 0

    # ------------------------------------------------------------ requests

    @property
    def has_work(self) -> bool:
        """Whether there is a sequence to compute or something to tell."""
        return bool(self._sequences or self._news.ids)

    @property
    def has_news(self) -> bool:
        """Whether the next output has something to tell even if nothing is computed."""
        return bool(self._news.ids)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not: new, preempted, or forks of a prompt not yet computed."""
        return len(self._sequences) - len(self._running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting sequences have, forks included."""
        return self._num_waiting_tokens

    @property
    def tables(self) -> list[BlockTable]:
        """Every block table in use, for the pool's integrity check."""
        return [seq.table for seq in self._running.values()]

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            ContextLengthExceeded: prompt and output can never fit the context or the pool.
            InvalidParameter: the prompt is empty, or the id is that of a live request.
        """
        if request.id in self._sequences:
            raise InvalidParameter(f"request id {request.id!r} is in use", param="id")
        chain = self._pool.chain(request.cache_salt)
        seq = sequence_of(request, self._num_added, chain, self._max_len, self._eos)
        self._num_added += 1
        self._num_waiting_tokens += len(seq.token_ids)
        self._sequences[seq.id] = seq
        seq.leader = leader_of(seq, self._sequences)
        if seq.leader is not None and seq.leader.first_token_s is None:
            seq.leader.forks.append(seq)  # parked: it holds nobody up until its prompt is there
        else:
            self._waiting.push(seq)

    def abort(self, request_id: str, now_s: float = 0.0) -> None:
        """End a request now; its blocks are free at once. An unknown id is no error."""
        seq = self._sequences.get(request_id)
        if seq is not None:
            self._finish(seq, now_s)
            self._news.append(request_id, (), "abort")

    # ------------------------------------------------------------ the step

    def schedule(self, admit: bool = True, now_s: float = 0.0) -> StepPlan:
        """Choose the next step's rows; with ``admit`` false, from those already running."""
        step = StepBuilder(self._config.max_num_batched_tokens)
        self._plan_running(step)
        # Who was preempted a moment ago must not find its place taken, nor take it back at once.
        if admit and not step.num_preempted:
            self._plan_waiting(step, now_s)
        self._fills.append(step.fills)
        if step.rows:
            self._num_steps += 1
            held = self._pool.num_blocks - self._pool.num_free
            self._slots_held_sum += held * self._pool.block_size
            self._slots_wasted_sum += self._num_wasted
        removed, self._removed = self._removed, []
        return step.build(removed)

    def update(self, plan: StepPlan, result: StepResult, now_s: float = 0.0) -> EngineOutput:
        """Take in what a plan's step produced, in the order in which the plans were made.

        Rows of sequences that have ended since are passed over.
        """
        news = self._news
        for request_id, failure in result.errors.items():
            seq = self._running.get(request_id)
            if seq is not None:
                self._finish(seq, now_s)
                news.append(request_id, (), "error")
                news.errors[request_id] = failure
        if result.prompt_logprobs:
            self._take_prompt_logprobs(plan, result)
        for seq, table, start, end in self._fills.popleft():
            if seq.table is table and seq.status is Status.RUNNING:
                self._pool.publish(seq.chain, seq.token_ids, table, start, end)
        self._take_tokens(result, now_s)
        for row in plan.rows:
            if not row.samples:
                self._end_without_tokens(row, now_s)
        if news.prompt_logprobs:  # of prompts that go on: they have no row among the columns yet
            told = set(news.ids)
            for request_id in news.prompt_logprobs:
                if request_id not in told:
                    news.append(request_id, (), None)
        self._news = OutputBuilder()
        return news.build(self.stats(plan.num_tokens))

    def replay(self, plan: StepPlan, rows: Iterable[ScheduledRow]) -> StepPlan:
        """The part of ``plan`` that computes ``rows``, for a runner that knows none of them.

        For use before ``update(plan, ...)``, after the plan itself could not be run: each row is
        removed and added again, with its whole block table. See the runner's row contract.
        """
        return replay(plan, rows, self._running)

    def stats(self, step_tokens: int = 0) -> EngineStats:
        """A snapshot of the queues, the blocks and the counters, in O(1)."""
        return EngineStats(
            num_running=self.num_running,
            num_waiting=self.num_waiting,
            blocks=self._pool.stats(self._num_wasted),
            num_preemptions=self._num_preemptions,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            num_steps=self._num_steps,
            step_tokens=step_tokens,
            slots_held_sum=self._slots_held_sum,
            slots_wasted_sum=self._slots_wasted_sum,
        )

    # ------------------------------------------------------------ planning: who runs

    def _plan_running(self, step: StepBuilder) -> None:
        # The one loop that sees every sequence at every step. Nearly all of them add one token to
        # their last block, so that case is inline and touches no more than it must.
        budget, num_decoded = step.budget, 0
        for seq in list(self._running.values()):
            if not budget:
                break
            start, end = seq.num_computed, len(seq.token_ids)
            table = seq.table
            if end - start == 1 and end <= table.capacity and end < seq.max_num_tokens:
                row = ScheduledRow(seq.id, start, (seq.token_ids[start],), (), True)
                step.rows.append(row)
                seq.num_computed = end
                if end == table.capacity:
                    step.fills.append(Fill(seq, table, start, end))
                budget -= 1
                num_decoded += 1
            elif end > start:
                step.budget = budget
                self._plan_more(step, seq)
                budget = step.budget
        step.budget = budget
        self._num_wasted -= num_decoded

    def _plan_more(self, step: StepBuilder, seq: Sequence) -> None:
        """Plan a running sequence that needs blocks or has several tokens to compute."""
        while seq.status is Status.RUNNING:  # it may have made room for another, or for itself
            end = min(len(seq.token_ids), seq.num_computed + step.budget)
            missing = self._pool.blocks_for(end) - len(seq.table.block_ids)
            if missing <= self._pool.num_free:
                new_blocks = self._pool.extend(seq.table, missing)
                self._num_wasted += missing * self._pool.block_size
                self._plan_row(step, seq, end, new_blocks)
                return
            self._preempt_last(step)

    def _plan_row(
        self, step: StepBuilder, seq: Sequence, end: int, new_blocks: Iterable[int]
    ) -> None:
        start, num_tokens = seq.num_computed, len(seq.token_ids)
        samples = end == num_tokens and num_tokens < seq.max_num_tokens
        tokens = tuple(seq.token_ids[start:end])
        step.rows.append(ScheduledRow(seq.id, start, tokens, tuple(new_blocks), samples))
        step.fills.append(Fill(seq, seq.table, start, end))
        step.budget -= end - start
        seq.num_computed = end
        self._num_wasted -= end - start
        if start < seq.num_prompt - 1:
            step.computing_prompts.add(seq.id)

    def _preempt_last(self, step: StepBuilder) -> None:
        """Take its blocks from the running sequence that the policy puts last."""
        if step.victims is None:
            step.victims = sorted(self._running.values(), key=self._key)
        victim = step.victims.pop()
        step.withdraw(victim.id)
        step.num_preempted += 1
        self._num_preemptions += 1
        victim.num_preemptions += 1
        self._release(victim)
        victim.table = BlockTable()
        victim.num_computed = 0
        victim.status = Status.WAITING
        self._num_waiting_tokens += len(victim.token_ids)
        self._waiting.push(victim)

    # ------------------------------------------------------------ planning: who joins

    def _plan_waiting(self, step: StepBuilder, now_s: float) -> None:
        while step.budget and len(self._running) < self._config.max_num_seqs:
            seq = self._waiting.head()
            if seq is None or not self._admit(step, seq, now_s):
                return
            self._waiting.pop()

    def _admit(self, step: StepBuilder, seq: Sequence, now_s: float) -> bool:
        """Start ``seq`` if there are blocks for all of its tokens, and some to spare."""
        pool = self._pool
        blocked, num_free = self._blocked
        if seq is blocked and pool.num_free <= num_free and self._running:
            return False  # nothing was freed since: no need to look its prefix up again
        leader = self._usable_leader(step, seq)
        shared: list[int] = []
        if leader is not None:
            shared = leader.table.block_ids[: (seq.num_prompt - 1) // pool.block_size]
        elif not seq.owes_prompt_logprobs:
            shared = pool.match(seq.chain, seq.token_ids)
        needed = pool.blocks_for(len(seq.token_ids)) - len(shared) + pool.num_unheld(shared)
        # A spare block for each sequence that runs: else the newcomer, being the last, would be
        # preempted as soon as one of them reaches its next block, and its tokens computed in vain.
        if needed + len(self._running) > pool.num_free:
            self._blocked = (seq, pool.num_free)
            return False

        if leader is not None:
            seq.table, copy = pool.fork(leader.table, seq.num_prompt - 1)
            seq.num_computed = seq.num_prompt - 1
            if copy is not None:
                step.copies.append(copy)
        else:
            pool.share(seq.table, shared)
            seq.num_computed = seq.table.capacity
        self._num_wasted += seq.table.capacity - seq.num_computed
        self._start(seq, now_s, looked_up=leader is None and not seq.owes_prompt_logprobs)
        step.added.append(added_row(seq))
        end = min(len(seq.token_ids), seq.num_computed + step.budget)
        missing = pool.blocks_for(end) - len(seq.table.block_ids)
        pool.extend(seq.table, missing)
        self._num_wasted += missing * pool.block_size
        self._plan_row(step, seq, end, seq.table.block_ids)
        return True

    def _start(self, seq: Sequence, now_s: float, *, looked_up: bool) -> None:
        seq.status = Status.RUNNING
        seq.known_to_runner = True
        seq.leader = None
        self._running[seq.id] = seq
        self._num_waiting_tokens -= len(seq.token_ids)
        if seq.num_cached is None:  # the first time: what a preempted one finds is its own
            seq.scheduled_s = now_s
            seq.num_cached = min(seq.num_computed, seq.num_prompt)
            if looked_up:
                self._prefix_queries += seq.num_prompt
                self._prefix_hits += seq.num_cached

    # ------------------------------------------------------------ forks

    def _usable_leader(self, step: StepBuilder, seq: Sequence) -> Sequence | None:
        """The leader, if earlier steps have computed its prompt and it still holds it."""
        leader = seq.leader
        if leader is None or leader.status is not Status.RUNNING:
            return None
        if leader.num_computed < leader.num_prompt or leader.id in step.computing_prompts:
            return None
        return leader

    def _appoint_leader(self, forks: list[Sequence]) -> None:
        """The leader ended before its prompt was computed: the first fork takes its place."""
        heir, *rest = forks
        heir.leader, heir.forks = None, rest
        for fork in rest:
            fork.leader = heir
        self._waiting.push(heir)

    # ------------------------------------------------------------ results

    def _take_tokens(self, result: StepResult, now_s: float) -> None:
        # The other loop over every sequence at every step; its columns are the result's own.
        news, running = self._news, self._running
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
        self._news.tell_cached(seq)
        for fork in seq.forks:
            self._waiting.push(fork)
        seq.forks = []

    def _take_last(self, seq: Sequence, index: int, now_s: float) -> None:
        """End ``seq`` at the first of its new tokens that ends it, if one does."""
        news = self._news
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
            self._finish(seq, now_s)
            return

    def _take_logprobs(self, result: StepResult, first: int) -> None:
        news = self._news
        for index, logprobs in enumerate(result.logprobs, first):
            if logprobs:
                news.logprobs[news.ids[index]] = logprobs[: len(news.token_ids[index])]

    def _take_prompt_logprobs(self, plan: StepPlan, result: StepResult) -> None:
        starts = {row.id: row.start for row in plan.rows}
        for request_id, logprobs in result.prompt_logprobs.items():
            seq = self._running.get(request_id)
            if seq is None:
                continue
            # Entry i of a sequence belongs to its token i + 1; a row at s brings entries from s.
            fresh = logprobs[max(0, seq.num_prompt_logprobs - starts[request_id]) :]
            if fresh:
                seq.num_prompt_logprobs += len(fresh)
                self._news.prompt_logprobs[request_id] = fresh
                self._news.tell_cached(seq)

    def _end_without_tokens(self, row: ScheduledRow, now_s: float) -> None:
        """End a sequence that wanted no token, once its prompt is computed."""
        seq = self._running.get(row.id)
        if seq is None:
            return
        end = row.start + len(row.token_ids)
        if end == len(seq.token_ids) >= seq.max_num_tokens:
            self._news.tell_cached(seq)
            self._news.append(seq.id, (), "length")
            self._finish(seq, now_s)

    # ------------------------------------------------------------ helpers

    def _finish(self, seq: Sequence, now_s: float) -> None:
        """Give up all that ``seq`` holds, and all memory of it. The caller tells the reason."""
        del self._sequences[seq.id]
        if seq.status is Status.RUNNING:
            self._release(seq)
        else:
            self._num_waiting_tokens -= len(seq.token_ids)
            if seq.leader is not None and seq in seq.leader.forks:
                seq.leader.forks.remove(seq)
            else:
                self._waiting.discard()
        seq.status = Status.FINISHED
        if seq.forks:
            self._appoint_leader(seq.forks)
        self._news.tell_timings(seq, now_s)

    def _release(self, seq: Sequence) -> None:
        del self._running[seq.id]
        self._num_wasted -= seq.table.capacity - seq.num_computed
        self._pool.release(seq.table)
        if seq.known_to_runner:
            self._removed.append(seq.id)
            seq.known_to_runner = False
