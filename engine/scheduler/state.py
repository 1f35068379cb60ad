"""What the scheduler knows, and the four things that can happen to a sequence.

    enqueue ──► waiting ──start──► running ──┐
                  ▲                   │      ├──finish──►
                  └──────preempt──────┘      │
                  └──────────────────────────┘

Whoever plans a step or takes its result in does so through these, so that the books agree: which
sequences there are, who holds blocks, how many slots of those are wasted, what the runner must
forget.
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
from engine.types import DraftStats, EngineStats, TierStats

_NO_DRAFTS = DraftStats()
_NO_TIER = TierStats()


class SchedulerState:
    """Written by the Scheduler's parts alone."""

    def __init__(
        self,
        pool: BlockPool,
        policy: Policy,
        speculator: Speculator | None = None,
        window: int | None = None,
    ) -> None:
        self.pool = pool
        self.window = window  # positions that a token sees; None: all
        self.policy = policy
        self._speculator = speculator
        self.sequences: dict[str, Sequence] = {}  # all that have not finished
        self.running: dict[str, Sequence] = {}  # in the order of admission
        self.num_background = 0  # of those running
        self.waiting = policy.new_queue()
        self.deadlines = Deadlines()
        self.adapters = AdapterCounts()
        self.progress = ProgressReports(policy)
        self.num_waiting_tokens = 0
        self.num_held = 0  # requests that are not queued yet
        self.removed: list[str] = []  # rows the runner is to forget with the next plan
        self.news = OutputBuilder()

        self.num_wasted = 0  # slots of running tables that hold no token
        self.num_preemptions = 0
        self.num_recomputed = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.host_queries = 0
        self.host_hits = 0
        self.num_steps = 0
        self.slots_held_sum = 0
        self.slots_wasted_sum = 0

    # ------------------------------------------------------------ what happens to a sequence

    def enqueue(self, seq: Sequence) -> None:
        """A new sequence waits; a fork, until its leader's prompt is computed."""
        self.sequences[seq.id] = seq
        self.num_waiting_tokens += len(seq.token_ids)
        self.deadlines.add(seq)
        self.progress.add(seq)
        self.adapters.move(seq, None, Status.WAITING)
        if seq.leader is not None and seq.leader.first_token_s is None:
            seq.leader.forks.append(seq)  # parked beside the queue: it holds nobody up
        else:
            self.waiting.push(seq)

    def start(self, seq: Sequence) -> None:
        """``seq`` leaves the queue, of which it was the head."""
        self.waiting.pop(seq)
        self.num_waiting_tokens -= len(seq.token_ids)
        seq.status = Status.RUNNING
        self.adapters.move(seq, Status.WAITING, Status.RUNNING)
        seq.known_to_runner = True
        seq.leader = None
        self.running[seq.id] = seq
        self.num_background += seq.request.background
        self.num_recomputed += max(0, seq.num_given_up - seq.num_computed)
        seq.num_given_up = 0

    def preempt(self, seq: Sequence, num_withdrawn: int = 0) -> None:
        """``seq`` gives its blocks up and waits again, with all its tokens to compute, of which
        ``num_withdrawn`` were planned and never will be."""
        self._release(seq)
        seq.table = BlockTable()
        seq.num_given_up = max(seq.num_given_up, seq.num_computed - num_withdrawn)
        seq.num_computed = seq.num_landed = 0
        seq.pooled = None
        seq.status = Status.WAITING
        self.adapters.move(seq, Status.RUNNING, Status.WAITING)
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.num_waiting_tokens += len(seq.token_ids)
        self.waiting.push(seq)

    def finish(self, seq: Sequence, now_s: float) -> None:
        """``seq`` gives up all it holds and is forgotten. The caller tells the reason."""
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
            self._speculator.finish(seq.request, seq.token_ids, seq.draft)
        self.deadlines.discard(seq)
        self.progress.discard(seq)
        if seq.forks:
            self._appoint_leader(seq.forks)
        self.news.tell_timings(seq, now_s)

    def expire(self, now_s: float) -> None:
        """End every sequence whose deadline has passed, and say so."""
        for seq in self.deadlines.passed(now_s):
            self.finish(seq, now_s)
            self.news.append(seq.id, (), "error")
            self.news.errors[seq.id] = Failure.of(DeadlineExceeded())

    def pass_by(self, seq: Sequence) -> None:
        """``seq`` gives back the blocks that none of its tokens to come will see.

        Steps that are run again compute what has not landed, and refused drafts what follows the
        newest token but one: both see a window behind it.
        """
        if self.window is not None:
            next_start = min(seq.num_landed, len(seq.token_ids) - 1)
            self.pool.pass_by(seq.table, next_start - self.window + 1)

    def free_forks(self, leader: Sequence) -> None:
        """The leader's prompt is computed: its forks may be admitted."""
        for fork in leader.forks:
            self.waiting.push(fork)
        leader.forks = []

    # ------------------------------------------------------------ what can be said of it all

    def count_step(self) -> None:
        """Count a step that is planned, with the slots held while it runs."""
        pool = self.pool
        self.num_steps += 1
        self.slots_held_sum += (pool.num_blocks - pool.num_free) * pool.block_size
        self.slots_wasted_sum += self.num_wasted

    def count_lookup(self, seq: Sequence, prefix: Prefix) -> None:
        """Count how much of a prompt was found in the cache, ``seq.num_cached`` tokens of it."""
        num_cached = seq.num_cached or 0
        self.prefix_queries += seq.num_prompt
        self.prefix_hits += num_cached
        if self.pool.tier is not None:
            num_hits = min(num_cached, prefix.num_on_host * self.pool.block_size)
            self.host_queries += seq.num_prompt - num_cached + num_hits
            self.host_hits += num_hits

    def stats(self, step_tokens: int) -> EngineStats:
        """A snapshot, in O(1) and the adapters in use."""
        tier = self.pool.tier
        return EngineStats(
            num_running=len(self.running),
            num_waiting=len(self.sequences) - len(self.running) + self.num_held,
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
        self.num_background -= seq.request.background
        self.num_wasted -= seq.table.capacity - seq.num_computed
        self.pool.release(seq.table)
        if seq.known_to_runner:
            self.removed.append(seq.id)
            seq.known_to_runner = False

    def _appoint_leader(self, forks: list[Sequence]) -> None:
        """A leader ended before its prompt was computed: its first fork takes its place."""
        heir, *rest = forks
        heir.leader, heir.forks = None, rest
        for fork in rest:
            fork.leader = heir
        self.waiting.push(heir)
