"""Which sequences compute which tokens, step by step: pure bookkeeping, no torch, clock or I/O.

    add ──► waiting ──admit──► running ──update──► finished
               ▲                  │
               └─────preempt──────┘

A step has one budget of tokens. Whoever runs comes first, then waiting prompts join in chunks
until the budget, the blocks or the places are used up; a sequence leaves in the step in which its
last token arrives. When a running sequence needs a block and none is free, the one that the
policy puts last gives all of its blocks up and waits again: its tokens are computed once more
when it returns, less those that are still found in the prefix cache. Where that has a tier in the
host's memory, its full blocks are there, or on the device, unless the tier is too small for them.

Times are told by the caller, so that the same calls always give the same plans.
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
from engine.scheduler.results import ResultTaker
from engine.scheduler.sequence import Sequence, leader_of, sequence_of
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import Planned, from_the_start, replay
from engine.speculation.speculator import Speculator
from engine.types import EngineOutput, EngineStats, Request, StepPlan, StepResult

if TYPE_CHECKING:
    from engine.grammar.backend import CompiledGrammar


class Scheduler:
    """Owns all sequences, and through the pool all blocks.

    ``schedule`` counts the tokens it plans as computed and those it samples as pending, and
    ``update`` adds what came of them; so plans may be made ahead of the results of earlier ones,
    which are given in order. A sequence that ends by such a result has a row too many in the plans
    ahead: that row writes behind the sequence's end, before anybody who is given its blocks, and
    what it samples is passed over.

    Args:
        config: limits of a step, and the policy.
        pool: the blocks; nobody else takes any.
        max_model_len: longest context, in tokens of prompt and output.
        window: positions that a token sees, itself included, in a model all of whose layers have a
            window: what no later token sees is given back; None: all.
        recurrent: the model keeps a state of each sequence, which begins at its first token or, if
            the pool has snapshots, with one of them.
        eos_token_ids: tokens that end a sequence unless it asks to ignore them.
        speculator: guesses tokens ahead; None: nobody does.
        whole_images: the side of a cell in pixels, where all tokens of an image are computed by one
            step; None: prompts are cut anywhere.
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
        whole_images: int | None = None,
    ) -> None:
        self._pool = pool
        self._whole_images = whole_images
        self._max_len = min(max_model_len, pool.num_blocks * pool.block_size)
        self._eos = frozenset(eos_token_ids)
        self._num_added = 0
        self._recurrent = recurrent
        self._step_tokens = config.step_tokens
        policy = make_policy(config.policy, self._num_cached, lambda: self.num_running)
        self._state = SchedulerState(pool, policy, speculator, window)
        self._planner = Planner(config, self._state, speculator)
        self._results = ResultTaker(self._state, speculator)
        self._planned: deque[Planned] = deque()  # of the plans whose results are not there yet

    # ------------------------------------------------------------ requests

    @property
    def has_work(self) -> bool:
        """Whether there is a sequence to compute or something to tell."""
        return bool(self._state.sequences) or self.has_news

    @property
    def has_news(self) -> bool:
        """Whether the next output has something to tell even if nothing is computed."""
        return bool(self._state.news.ids)

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks."""
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        """Sequences that do not: new, preempted, or forks of a prompt not yet computed."""
        return len(self._state.sequences) - len(self._state.running)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens that the waiting sequences have, forks included."""
        return self._state.num_waiting_tokens

    @property
    def tables(self) -> list[BlockTable]:
        """Every block table in use, for the pool's integrity check."""
        return [seq.table for seq in self._state.running.values()]

    @property
    def sequences(self) -> Mapping[str, Sequence]:
        """All that have not ended, in the order of their arrival; to be read only."""
        return self._state.sequences

    @property
    def running(self) -> Iterable[Sequence]:
        """Those that hold blocks, in the order of their admission; to be read only."""
        return self._state.running.values()

    def add(self, request: Request, grammar: CompiledGrammar | None = None) -> None:
        """Queue a request, with its grammar where it has one.

        Raises:
            ContextLengthExceeded: prompt and output can never fit the context or the pool.
            InvalidParameter: the prompt is empty, or the id is that of a live request.
        """
        live = self._state.sequences
        seq = self._sequence_of(request, grammar)
        # With states a fork waits for what its leader leaves in the prefix cache, or for nothing.
        if not self._recurrent or self._pool.snapshots is not None:
            seq.leader = leader_of(seq, live)
        self._num_added += 1
        self._state.enqueue(seq)

    def find(self, request: Request) -> int:
        """How many tokens of a request that is not queued yet are in the prefix cache now. Raises
        as ``add`` would."""
        seq = self._sequence_of(request)
        if seq.owes_prompt:
            return 0
        prefix = self._planner.find(seq)
        return (prefix.num_passed + len(prefix.block_ids)) * self._pool.block_size

    def has_computed(self, request_id: str, num_tokens: int) -> bool:
        """Whether the first tokens of a request are in steps that are planned, or it has ended."""
        seq = self._state.sequences.get(request_id)
        return seq is None or seq.num_computed >= num_tokens

    def abort(self, request_id: str, now_s: float = 0.0) -> None:
        """End a request now; its blocks are free at once. An unknown id is no error."""
        seq = self._state.sequences.get(request_id)
        if seq is not None:
            self._state.finish(seq, now_s)
            self._state.news.append(request_id, (), "abort")

    def end_all(self, failure: Failure, now_s: float = 0.0) -> None:
        """End every request with ``failure``; their blocks are free at once."""
        for seq in list(self._state.sequences.values()):
            self._state.finish(seq, now_s)
            self.turn_away(seq.id, failure)

    def turn_away(self, request_id: str, failure: Failure | None) -> None:
        """Tell the end of a request that was never queued: its failure, or that it was aborted."""
        news = self._state.news
        news.append(request_id, (), "abort" if failure is None else "error")
        if failure is not None:
            news.errors[request_id] = failure

    def count_held(self, num_held: int) -> None:
        """So many requests are not queued yet; what is told of those who wait counts them."""
        self._state.num_held = num_held

    def tell_waits(self, request: Request) -> None:
        """Tell who asked for the progress of a prompt that it is not queued yet."""
        if request.tells_progress and not request.resumed_token_ids:
            progress = PromptProgress(len(request.prompt_token_ids), 0, 0, 0.0)
            self._state.news.progress[request.id] = progress

    # ------------------------------------------------------------ the step

    def schedule(
        self,
        admit: bool = True,
        now_s: float = 0.0,
        *,
        max_passes: int = 1,
        max_prompt_tokens: int | None = None,
    ) -> StepPlan:
        """Choose the next step's rows; with ``admit`` false, from those already running.

        Where all of them decode and nobody waits, each may have up to ``max_passes`` passes. Where
        one of them decodes, prompts have no more than ``max_prompt_tokens`` of the step's tokens.
        Sequences whose deadline has passed end first. A plan that is empty is not run, and has no
        result to be taken in.
        """
        self._state.expire(now_s)
        step = self._planner.plan(admit, now_s, max_passes, max_prompt_tokens)
        removed, self._state.removed = self._state.removed, []
        plan = step.build(removed, self._pool.tier)
        if not plan.is_empty:
            self._planned.append(Planned(step.seqs, step.fills, plan))
        if plan.rows:
            self._state.count_step()
        return plan

    def update(self, plan: StepPlan, result: StepResult, now_s: float = 0.0) -> EngineOutput:
        """Take in what a plan's step produced, in the order in which the plans were made."""
        planned = self._planned.popleft()
        tier = self._pool.tier
        if tier is not None:
            tier.let_go(load.source for load in plan.loads)
            if not planned.has_failed:
                tier.landed(plan.offloads)
        if self._pool.snapshots is not None and not planned.has_failed:
            self._pool.snapshots.land(save.line for save in plan.saves)
        return self._results.take(plan, planned, result, now_s)

    def fail(self) -> StepPlan:
        """The oldest plan could not be run as it was made: parts of it are run again (``replay``),
        and then it is taken in.

        Returns what must come before any part, whosever rows are at fault: its loads, whose blocks
        others may hold by now. It is empty where there are none.
        """
        planned = self._planned[0]
        if self._pool.tier is not None:
            self._pool.tier.void(planned.plan.offloads)
        if self._pool.snapshots is not None:
            self._pool.snapshots.void(save.line for save in planned.plan.saves)
        self._planned[0] = planned._replace(has_failed=True)
        return StepPlan(loads=planned.plan.loads)

    def tell(self) -> EngineOutput:
        """What has happened since the last output, without a step."""
        return self._results.tell(0)

    def replay(self, plan: StepPlan, rows: Iterable[ScheduledRow]) -> list[StepPlan]:
        """The part of ``plan`` that computes ``rows``, for a runner that knows none of them: the
        last of the plans that are returned. Those before it bring it about that it can be run; they
        tell nothing that is not known.

        For use between ``fail()`` and ``update(plan, ...)``, after the plan itself could not be
        run: each row is removed and added again, with its whole block table. Rows of sequences that
        have ended or were preempted since are not in it. See the runner's row contract.
        """
        seqs = {seq.id: seq for seq in self._planned[0].seqs}
        last = replay(plan, seqs, rows)
        return from_the_start(last, seqs, self._step_tokens) if self._recurrent else [last]

    def stats(self) -> EngineStats:
        """A snapshot of the queues, the blocks and the counters, in O(1)."""
        return self._state.stats(0)

    def _sequence_of(self, request: Request, grammar: CompiledGrammar | None = None) -> Sequence:
        if request.id in self._state.sequences:
            raise InvalidParameter(f"request id {request.id!r} is in use", param="id")
        adapter = request.adapter.id if request.adapter else ""
        chain = self._pool.chain(request.cache_salt, adapter, request.images)
        given = request, self._num_added, chain, self._max_len, self._eos, grammar
        return sequence_of(*given, whole_images=self._whole_images)

    def _num_cached(self, seq: Sequence) -> int:
        if seq.owes_prompt:
            return 0
        prefix = self._planner.find(seq)
        return (prefix.num_passed + len(prefix.block_ids)) * self._pool.block_size
