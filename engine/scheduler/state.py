"""The scheduler's state, and the four transitions of a sequence.

    enqueue ──► waiting ──start──► running ──┐
                  ▲                   │      ├──finish──►
                  └──────preempt──────┘      │
                  └──────────────────────────┘

Planning a step and processing its result change the state only through these transitions. They keep
the accounting consistent: the live sequences, the owners of blocks, the unused slots in those
blocks, and the rows that the runner must drop.
"""

from __future__ import annotations

from engine.errors import DeadlineExceeded, Failure
from engine.kv_cache.pool import BlockPool, BlockTable, Prefix
from engine.scheduler.adapters import AdapterCounts
from engine.scheduler.deadlines import Deadlines
from engine.scheduler.output import OutputBuilder
from engine.scheduler.policy import Policy
from engine.scheduler.progress import ProgressReports
from engine.scheduler.sequence import Sequence, Status
from engine.speculation.speculator import Speculator
from engine.stats import DraftStats, EngineStats, TierStats

_NO_DRAFTS = DraftStats()
_NO_TIER = TierStats()


class SchedulerState:
    """Written only by the Scheduler's parts."""

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        speculator: Speculator | None = None,
        window: int | None = None,
    ) -> None:
        self.pool = pool
        self.window = window  # positions that a token attends to; None: all
        self.policy = policy
        self._speculator = speculator
        self.sequences: dict[str, Sequence] = {}  # all that have not finished
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.num_background = 0  # how many of the running are background work
        self.num_changes = 0  # sequences that started or stopped running, or had a first token
        self.waiting = policy.new_queue()
        self.deadlines = Deadlines()
        self.adapters = AdapterCounts()
        self.progress = ProgressReports(policy)
        self.num_waiting_tokens = 0
        self.num_unqueued = 0  # requests not yet queued
        self.removed: list[str] = []  # rows that the runner drops with the next plan
        self.pending_output = OutputBuilder()

        self.num_wasted = 0  # allocated slots of running sequences that hold no token
        self.num_preemptions = 0
        self.num_recomputed = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.host_queries = 0
        self.host_hits = 0
        self.num_steps = 0
        self.slots_held_sum = 0
        self.slots_wasted_sum = 0

    # ------------------------------------------------------------ transitions

    def enqueue(self, seq: Sequence) -> None:
        """Queue a new sequence; a fork is held back until its leader's prompt is computed."""
        self.sequences[seq.id] = seq
        self.num_waiting_tokens += len(seq.token_ids)
        self.deadlines.add(seq)
        self.progress.add(seq)
        self.adapters.move(seq, None, Status.WAITING)
        if seq.leader is not None and seq.leader.first_token_s is None:
            seq.leader.forks.append(seq)  # outside the queue, so that it blocks nobody
        else:
            self.waiting.push(seq)

    def start(self, seq: Sequence) -> None:
        """Move ``seq``, the head of the queue, to the running sequences."""
        self.waiting.pop(seq)
        self.num_waiting_tokens -= len(seq.token_ids)
        seq.status = Status.RUNNING
        self.adapters.move(seq, Status.WAITING, Status.RUNNING)
        seq.known_to_runner = True
        seq.leader = None
        self.running[seq.id] = seq
        self.num_changes += 1
        self.num_background += seq.request.background
        self.num_recomputed += max(0, seq.num_discarded - seq.num_computed)
        seq.num_discarded = 0

    def preempt(self, seq: Sequence, num_withdrawn: int = 0) -> None:
        """Free the blocks of ``seq`` and requeue it, to be recomputed from the start.

        ``num_withdrawn`` of its tokens had been planned but were taken out of the step.
        """
        self._release(seq)
        seq.table = BlockTable()
        seq.num_discarded = max(seq.num_discarded, seq.num_computed - num_withdrawn)
        seq.num_computed = seq.num_confirmed = 0
        seq.pooled = None
        seq.status = Status.WAITING
        self.adapters.move(seq, Status.RUNNING, Status.WAITING)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.num_waiting_tokens += len(seq.token_ids)
        self.waiting.push(seq)

    def finish(self, seq: Sequence, now_s: float) -> None:
        """Free everything that ``seq`` holds and drop it. The caller reports the reason."""
        del self.sequences[seq.id]
        if seq.status is Status.RUNNING:
            self._release(seq)
        else:
            self.num_waiting_tokens -= len(seq.token_ids)
            if seq.leader is not None and seq in seq.leader.forks:
                seq.leader.forks.remove(seq)
            else:
                self.waiting.discard(seq)
        self.adapters.move(seq, seq.status, None)
        seq.status = Status.FINISHED
        if self._speculator is not None and len(seq.token_ids) > seq.num_prompt:
            self._speculator.finish(seq.request, seq.token_ids, seq.draft_state)
        self.deadlines.discard(seq)
        self.progress.discard(seq)
        if seq.forks:
            self._promote_fork(seq.forks)
        self.pending_output.report_timings(seq, now_s)

    def expire(self, now_s: float) -> None:
        """Finish every sequence whose deadline has passed, and report the error."""
        for seq in self.deadlines.expired(now_s):
            self.finish(seq, now_s)
            self.pending_output.append(seq.id, (), "error")
            self.pending_output.errors[seq.id] = Failure.of(DeadlineExceeded())

    def free_out_of_window(self, seq: Sequence) -> None:
        """Free the blocks that lie wholly behind the window of all tokens yet to be computed.

        A replayed step computes tokens from ``num_confirmed`` on, and after refused drafts the
        sequence resumes at its second newest token at the earliest. A window behind both is kept.
        """
        if self.window is not None:
            next_start = min(seq.num_confirmed, len(seq.token_ids) - 1)
            self.pool.free_leading_blocks(seq.table, next_start - self.window + 1)

    def enqueue_forks(self, leader: Sequence) -> None:
        """Queue the forks of ``leader``, whose prompt is now computed."""
        self.num_changes += 1
        for fork in leader.forks:
            self.waiting.push(fork)
        leader.forks = []

    # ------------------------------------------------------------ statistics

    def count_step(self) -> None:
        """Count a planned step, and the slots held while it runs."""
        pool = self.pool
        self.num_steps += 1
        self.slots_held_sum += (pool.num_blocks - pool.num_free) * pool.block_size
        self.slots_wasted_sum += self.num_wasted

    def count_lookup(self, seq: Sequence, prefix: Prefix) -> None:
        """Count a prefix cache lookup that found ``seq.num_cached`` tokens of the prompt."""
        num_cached = seq.num_cached or 0
        self.prefix_queries += seq.num_prompt
        self.prefix_hits += num_cached
        if self.pool.tier is not None:
            num_hits = min(num_cached, prefix.num_on_host * self.pool.block_size)
            self.host_queries += seq.num_prompt - num_cached + num_hits
            self.host_hits += num_hits

    def stats(self, step_tokens: int) -> EngineStats:
        """A snapshot, in O(number of adapters in use)."""
        tier = self.pool.tier
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.sequences) - len(self.running) + self.num_unqueued,
            blocks=self.pool.stats(self.num_wasted),
            tier=_NO_TIER if tier is None else tier.stats(self.host_queries, self.host_hits),
            num_preemptions=self.num_preemptions,
            num_recomputed=self.num_recomputed,
            prefix_cache_queries=self.prefix_queries,
            prefix_cache_hits=self.prefix_hits,
            num_steps=self.num_steps,
            step_tokens=step_tokens,
            slots_held_sum=self.slots_held_sum,
            slots_wasted_sum=self.slots_wasted_sum,
            drafts=_NO_DRAFTS if self._speculator is None else self._speculator.stats,
            running_adapters=self.adapters.names(Status.RUNNING),
            waiting_adapters=self.adapters.names(Status.WAITING),
        )

    # ------------------------------------------------------------ helpers

    def _release(self, seq: Sequence) -> None:
        del self.running[seq.id]
        self.num_changes += 1
        self.num_background -= seq.request.background
        self.num_wasted -= seq.table.capacity - seq.num_computed
        self.pool.release(seq.table)
        if seq.known_to_runner:
            self.removed.append(seq.id)
            seq.known_to_runner = False

    def _promote_fork(self, forks: list[Sequence]) -> None:
        """Make the first fork the new leader: the old one ended before its prompt was computed."""
        heir, *rest = forks
        heir.leader, heir.forks = None, rest
        for fork in rest:
            fork.leader = heir
        self.waiting.push(heir)
