"""Decides which sequences compute which tokens in each step, by bookkeeping alone.

    add ──► waiting ──admit──► running ──update──► finished
               ▲                  │
               └─────preempt──────┘

Each step has a token budget. Running sequences are served first. Waiting prompts then join in
chunks, until the budget, the blocks or the places are used up. A sequence leaves in the step in
which its last token arrives. When a running sequence needs a block and none is free, the policy's
last sequence is preempted: all its blocks are freed and it returns to the queue. On readmission its
tokens are recomputed, except those still in the prefix cache. With a host tier, all its full blocks
are still on the host or the device, provided that the tier is large enough.

There is no torch, clock or I/O here. The caller passes the time in, so the same calls always
produce the same plans.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from engine.config import SchedulerConfig
from engine.errors import Failure, InvalidParameter
from engine.kv_cache.pool import BlockPool, BlockTable
from engine.plan_rows import ScheduledRow
from engine.prompt_progress import PromptProgress
from engine.scheduler.planner import Planner
from engine.scheduler.policy import make_policy
from engine.scheduler.results import ResultProcessor
from engine.scheduler.reuse import find_prefix
from engine.scheduler.sequence import Sequence, find_leader, make_sequence
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import PlannedStep, replay, replay_from_start
from engine.speculation.speculator import Speculator
from engine.stats import EngineStats
from engine.types import EngineOutput, Request, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.grammar.backend import CompiledGrammar


class Scheduler:
    """Owns all sequences and, through the pool, all blocks.

    ``schedule`` counts planned tokens as computed and tokens to be sampled as pending; ``update``
    replaces the pending ones with the actual tokens. Plans can therefore be made before the results
    of earlier plans are known. Results must be passed in plan order. A sequence that ends with a
    result still has a row in each plan made in the meantime. That row writes beyond the sequence's
    end, before the freed blocks are reused, and its token is discarded.

    Args:
        config: the limits of a step, and the policy.
        pool: the blocks; nothing else allocates from it.
        max_model_len: the maximum context, in tokens of prompt and output.
        window: for a model whose layers are all windowed, the number of positions that a token
            attends to, itself included. Blocks that no later token sees are freed. None: no window.
        recurrent: the model keeps a state per sequence, which starts at the first token or, if the
            pool has snapshots, from one of these.
        eos_token_ids: tokens that end a sequence unless its request ignores them.
        speculator: proposes drafts; None: no speculation.
        atomic_image_cell: the side of an image cell in pixels, if all tokens of an image must be
            computed in one step. None: prompts may be split anywhere.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        pool: BlockPool,
        *,
        max_model_len: int,
        window: int | None = None,
        recurrent: bool = False,
        eos_token_ids: Iterable[int] = (),
        speculator: Speculator | None = None,
        atomic_image_cell: int | None = None,
    ) -> None:
        self._pool = pool
        self._atomic_image_cell = atomic_image_cell
        self._max_len = min(max_model_len, pool.num_blocks * pool.block_size)
        self._eos = frozenset(eos_token_ids)
        self._num_added = 0
        self._recurrent = recurrent
        self._step_tokens = config.step_tokens
        policy = make_policy(config.policy, self._num_cached, lambda: self._state.num_changes)
        self._state = SchedulerState(pool, policy, speculator, window)
        self._planner = Planner(config, self._state, speculator)
        self._results = ResultProcessor(self._state, speculator)
        self._planned: deque[PlannedStep] = deque()  # plans whose results have not arrived

    # ------------------------------------------------------------ requests

    @property
    def has_work(self) -> bool:
        """Whether there are sequences to compute or news to report."""
        return bool(self._state.sequences) or self.has_pending_output

    @property
    def has_pending_output(self) -> bool:
        """Whether the next output has something to report even if nothing is computed."""
        return bool(self._state.pending_output.ids)

    @property
    def num_running(self) -> int:
        """The number of sequences that hold blocks."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """The number of sequences without blocks: new, preempted, or forks still held back."""
        return len(self._state.sequences) - len(self._state.running)

    @property
    def num_waiting_tokens(self) -> int:
        """The total length of the waiting sequences, forks included."""
        return self._state.num_waiting_tokens

    @property
    def tables(self) -> list[BlockTable]:
        """Every block table in use, for the pool's integrity check."""
        return [seq.table for seq in self._state.running.values()]

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All unfinished sequences in order of arrival; read-only."""
        return self._state.sequences

    @property
    def running(self) -> Iterable[Sequence]:
        """All sequences that hold blocks, in order of admission; read-only."""
        return self._state.running.values()

    def take_place(self) -> int:
        """A place in the order of arrival, for a request that will be added later."""
        self._num_added += 1
        return self._num_added

    def add(
        self, request: Request, grammar: CompiledGrammar | None = None, place: int | None = None
    ) -> None:
        """Queue a request with its grammar, if it has one, in the ``place`` taken when it arrived.

        Raises:
            ContextLengthExceeded: prompt and output can never fit into the context or the pool.
            InvalidParameter: the prompt is empty, or a live request has the same id.
        """
        live = self._state.sequences
        seq = self._make_sequence(request, grammar, self.take_place() if place is None else place)
        # A recurrent fork cannot share its leader's blocks. It waits only if there are snapshots,
        # which the leader leaves in the prefix cache.
        if not self._recurrent or self._pool.snapshots is not None:
            seq.leader = find_leader(seq, live)
        self._state.enqueue(seq)

    def num_cached_tokens(self, request: Request) -> int:
        """How many tokens of a request that is not queued yet are in the prefix cache.

        Raises:
            ContextLengthExceeded, InvalidParameter: as ``add`` does.
        """
        return self._num_cached(self._make_sequence(request, None, 0))

    def has_computed(self, request_id: str, num_tokens: int) -> bool:
        """Whether planned steps cover a request's first ``num_tokens``, or it has ended."""
        seq = self._state.sequences.get(request_id)
        return seq is None or seq.num_computed >= num_tokens

    def abort(self, request_id: str, now_s: float = 0.0) -> None:
        """End a request now and free its blocks. Unknown ids are ignored."""
        seq = self._state.sequences.get(request_id)
        if seq is not None:
            self._state.finish(seq, now_s)
            self._state.pending_output.append(request_id, (), "abort")

    def fail_all(self, failure: Failure, now_s: float = 0.0) -> None:
        """End every request with ``failure`` and free all blocks."""
        for seq in list(self._state.sequences.values()):
            self._state.finish(seq, now_s)
            self.finish_unqueued(seq.id, failure)

    def finish_unqueued(self, request_id: str, failure: Failure | None) -> None:
        """Report the end of a request that was never queued: its failure, or None if aborted."""
        news = self._state.pending_output
        news.append(request_id, (), "abort" if failure is None else "error")
        if failure is not None:
            news.errors[request_id] = failure

    def set_num_unqueued(self, num_unqueued: int) -> None:
        """Set the number of requests not queued yet, which statistics count as waiting."""
        self._state.num_unqueued = num_unqueued

    def report_waiting(self, request: Request) -> None:
        """Report to a client that wants prompt progress that its request is not queued yet."""
        if request.report_progress and not request.resumed_token_ids:
            progress = PromptProgress(len(request.prompt_token_ids), 0, 0, 0.0)
            self._state.pending_output.progress[request.id] = progress

    # ------------------------------------------------------------ the step

    def schedule(
        self,
        admit: bool = True,
        now_s: float = 0.0,
        *,
        max_passes: int = 1,
        max_prompt_tokens: int | None = None,
    ) -> StepPlan:
        """Plan the next step; with ``admit`` false, only for sequences that are already running.

        If all rows decode and nothing waits, each row may have up to ``max_passes`` passes. If any
        row decodes, prompts take at most ``max_prompt_tokens`` of the step's tokens. Sequences past
        their deadline end first. An empty plan is not run and has no result.
        """
        self._state.expire(now_s)
        step = self._planner.plan(admit, now_s, max_passes, max_prompt_tokens)
        removed, self._state.removed = self._state.removed, []
        plan = step.build(removed, self._pool.tier)
        if not plan.is_empty:
            self._planned.append(PlannedStep(step.seqs, step.fills, plan))
        if plan.rows:
            self._state.count_step()
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_s: float = 0.0) -> EngineOutput:
        """Process the result of a plan's step. Plans must be passed in the order they were made."""
        planned = self._planned.popleft()
        assert planned.plan is plan, "plans are run in the order they were made"
        tier = self._pool.tier
        if tier is not None:
            tier.release(load.source for load in plan.loads)
            if not planned.has_failed:
                tier.complete_offloads(plan.offloads)
        if self._pool.snapshots is not None and not planned.has_failed:
            self._pool.snapshots.complete(save.line for save in plan.saves)
        return self._results.process(plan, planned, result, now_s)

    def mark_failed(self) -> StepPlan:
        """Note that the oldest plan could not be run as it was made.

        The caller runs parts of it again (``replay``) and then calls ``update``. Returns the plan
        to run first, whichever rows are at fault. It holds the failed plan's loads, since other
        sequences may hold the loaded blocks by now, and is empty if there are none.
        """
        planned = self._planned[0]
        if self._pool.tier is not None:
            self._pool.tier.cancel_offloads(planned.plan.offloads)
        if self._pool.snapshots is not None:
            self._pool.snapshots.cancel(save.line for save in planned.plan.saves)
        self._planned[0] = planned._replace(has_failed=True)
        return StepPlan(loads=planned.plan.loads)

    def flush_output(self) -> EngineOutput:
        """Everything that has happened since the last output, without a step."""
        return self._results.flush_output(0)

    def replay(self, plan: StepPlan, rows: Iterable[ScheduledRow]) -> list[StepPlan]:
        """The plans that compute ``rows`` of ``plan``, for a runner that has forgotten them all.

        For use between ``mark_failed()`` and ``update(plan, ...)``, after the plan itself could not
        be run. Only the last plan returned has a result; those before it prepare the runner for it.
        In the last one each row is removed and added again with its whole block table. Rows of
        sequences that have ended or been preempted since are left out, even if they run again. See
        the runner's row contract.
        """
        planned = self._planned[0]
        seqs = {seq.id: seq for seq in planned.seqs}
        last = replay(plan, seqs, {fill.seq.id: fill.table for fill in planned.fills}, rows)
        return replay_from_start(last, seqs, self._step_tokens) if self._recurrent else [last]

    @property
    def has_room_for_suspect(self) -> bool:
        """Whether another suspect may be added, which would be admitted at once; O(sequences)."""
        return self._planner.has_room_for_suspect

    def preempted(self, plan: StepPlan) -> list[str]:
        """The sequences that the plan just made has preempted."""
        live = self._state.sequences
        return [id_ for id_ in plan.removed if id_ in live] if plan.num_preempted else []

    def stats(self) -> EngineStats:
        """A snapshot of queues, blocks and counters, in O(number of adapters in use)."""
        return self._state.stats(0)

    def _make_sequence(
        self, request: Request, grammar: CompiledGrammar | None, place: int
    ) -> Sequence:
        if request.id in self._state.sequences:
            raise InvalidParameter(f"request id {request.id!r} is in use", param="id")
        adapter = request.adapter.id if request.adapter else ""
        chain = self._pool.chain(request.cache_salt, adapter, request.media)
        return make_sequence(
            request,
            place,
            chain,
            self._max_len,
            self._eos,
            grammar,
            atomic_image_cell=self._atomic_image_cell,
        )

    def _num_cached(self, seq: Sequence) -> int:
        if seq.must_compute_prompt:
            return 0
        prefix = find_prefix(self._state, seq)
        return (prefix.num_skipped + len(prefix.block_ids)) * self._pool.block_size
