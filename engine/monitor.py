"""Records what steps do and what becomes of requests, while somebody looks.

While nobody looks, a step costs one comparison. Otherwise a step costs O(its rows), and a look
O(blocks + sequences reported). The scheduler's state is only read. What it does not contain, the
time at which a sequence entered each phase, is noted step by step:

    images or audio ──► grammar ──► queued ──► prefill ──► decode ──► ended
                                                  ▲          │
                                                  └─preempted┘

Recording stops by itself some time after the last look.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice, zip_longest

from engine.kv_cache.pool import BlockPool, BlockTable
from engine.scheduler import Scheduler
from engine.scheduler.sequence import Sequence, Status
from engine.snapshot import (
    CACHED,
    FREE,
    HELD,
    BlockMap,
    Phase,
    PhaseKind,
    RequestRecord,
    SecondRecord,
    Snapshot,
    StepRecord,
)
from engine.types import EngineOutput, FinishReason, Request, StepPlan

MAX_STEPS = 120  # steps kept
MAX_SECONDS = 120
MAX_ENDED = 48
MAX_WAITING_LISTED = 48  # waiting requests listed; the stats have their total number
MAX_CELLS = 4096  # cells in the block map
RECORDING_TIMEOUT_S = 10.0  # recording stops so long after the last look


class EngineMonitor:
    """The recorder of one engine. Used only by the engine's thread, between steps.

    Args:
        scheduler, pool: the state to read.
        held: yields the requests that are not queued yet, and what each waits for.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        pool: BlockPool,
        held: Callable[[], Iterator[tuple[Request, PhaseKind]]],
    ) -> None:
        self._scheduler = scheduler
        self._pool = pool
        self._held_requests = held
        self.is_recording = False  # whether ``record_step`` and ``enter_phase`` have to be called
        self._last_snapshot_s = 0.0
        self._reset(0.0)

    # ------------------------------------------------------------ called by the engine

    def enter_phase(
        self, request: Request, before: PhaseKind, kind: PhaseKind, now_s: float
    ) -> None:
        """Note that a request that was not queued yet enters its next phase."""
        self._record_of(request, before).enter(kind, now_s)

    def record_step(
        self, plan: StepPlan | None, launched_s: float, output: EngineOutput, now_s: float
    ) -> None:
        """Record a step that has ended, or output without a step (``plan`` is None).

        Args:
            plan: the step's plan.
            launched_s: its launch time.
            output: its output.
            now_s: its end.
        """
        if now_s - self._last_snapshot_s > RECORDING_TIMEOUT_S:
            self.is_recording = False
            self._reset(now_s)
            return
        if plan is not None and plan.rows:
            began_s = min(max(launched_s, self._last_end_s), now_s)
            num_prompts, num_prompt_tokens = self._record_rows(plan, began_s, now_s)
            self._append_step(plan, began_s, output, now_s, num_prompts, num_prompt_tokens)
        for request_id, tokens, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            record = self._live.get(request_id)
            if record is None:
                continue  # it came and went between two looks, without a step
            record.num_output += len(tokens)
            if reason is not None:
                failure = output.errors.get(request_id)
                record.end(reason, "" if failure is None else failure.kind, now_s)
                self._ended.append(self._live.pop(request_id))

    def snapshot(self, now_s: float) -> Snapshot:
        """Take a snapshot; steps are recorded from now on."""
        if not self.is_recording:
            self.is_recording = True
            self._reset(now_s)
        self._last_snapshot_s = now_s
        running, waiting = self._find_live(now_s)
        requests = [record.to_record() for record in (*running, *waiting, *reversed(self._ended))]
        return Snapshot(
            now_s=now_s,
            since_s=self._since_s,
            stats=self._scheduler.stats(),
            steps=tuple(self._steps),
            seconds=tuple(self._seconds),
            requests=tuple(requests),
            blocks=map_blocks(self._pool, self._scheduler.tables),
        )

    # ------------------------------------------------------------ helpers

    def _reset(self, now_s: float) -> None:
        self._since_s = now_s
        self._last_end_s = 0.0
        self._steps: deque[StepRecord] = deque(maxlen=MAX_STEPS)
        self._seconds: deque[SecondRecord] = deque(maxlen=MAX_SECONDS)
        self._live: dict[str, _Record] = {}
        self._ended: deque[_Record] = deque(maxlen=MAX_ENDED)
        self._drafts: tuple[int, int] | None = None  # totals of drafts verified and accepted so far

    def _record_of(self, request: Request, kind: PhaseKind) -> _Record:
        record = self._live.get(request.id)
        if record is None:
            record = self._live[request.id] = _Record(request, kind)
        return record

    def _find_live(self, now_s: float) -> tuple[list[_Record], list[_Record]]:
        """The running and the first waiting requests; records are made for those without one."""
        held = islice(self._held_requests(), MAX_WAITING_LISTED)
        waiting = [self._record_of(request, kind) for request, kind in held]
        sequences = self._scheduler.sequences.values()
        in_queue = (seq for seq in sequences if seq.status is Status.WAITING)
        listed = islice(in_queue, MAX_WAITING_LISTED - len(waiting))
        waiting += [self._track(seq, now_s) for seq in listed]
        running = [self._track(seq, now_s) for seq in self._scheduler.running]
        return running, waiting

    def _track(self, seq: Sequence, now_s: float) -> _Record:
        """The record of a live sequence; a new one starts from the scheduler's state."""
        record = self._live.get(seq.id)
        if record is None:
            record = self._live[seq.id] = _Record(seq.request, "queued")
            record.catch_up(seq, now_s)
        record.seq = seq
        return record

    def _record_rows(self, plan: StepPlan, began_s: float, now_s: float) -> tuple[int, int]:
        """Record what a step was to its requests; returns the number of prompts and of their
        tokens in it."""
        rows, sequences = plan.rows, self._scheduler.sequences
        for request_id in plan.removed if plan.num_preempted else ():
            record, seq = self._live.get(request_id), sequences.get(request_id)
            if record is not None and seq is not None and seq.num_preemptions:
                record.enter("preempted", began_s)
        for added in plan.added:
            self._record_of(added.request, "queued").enter("prefill", began_s)

        num_prompts = num_prompt_tokens = 0
        prompts: set[int] = set()
        for place, tokens in enumerate(rows.token_ids):
            count = len(tokens) - rows.num_drafts.get(place, 0)
            if count > 1 or place in rows.unsampled:
                prompts.add(place)
                num_prompts += 1
                num_prompt_tokens += count
        for place, request_id in enumerate(rows.ids):
            record = self._live.get(request_id)
            if record is None:
                continue  # it came and went without being added: the id was reused
            if record.seq is None:
                record.seq = sequences.get(request_id)
            others = num_prompts - (place in prompts)
            record.count_step(len(rows.ids), is_prompt=place in prompts, is_mixed=others > 0)
            if place not in rows.unsampled:
                record.enter("decode", now_s)
        return num_prompts, num_prompt_tokens

    def _append_step(
        self,
        plan: StepPlan,
        began_s: float,
        output: EngineOutput,
        now_s: float,
        num_prompts: int,
        num_prompt_tokens: int,
    ) -> None:
        self._last_end_s = now_s
        num_told = sum(map(len, output.token_ids))
        num_drafts, num_accepted = self._count_drafts(output)
        self._steps.append(
            StepRecord(
                ended_s=now_s,
                duration_s=now_s - began_s,
                num_decodes=len(plan.rows) - num_prompts,
                num_prompts=num_prompts,
                num_prompt_tokens=num_prompt_tokens,
                num_drafts=num_drafts,
                num_accepted=num_accepted,
                num_passes=plan.num_passes,
                num_preempted=plan.num_preempted,
                num_output_tokens=num_told,
            )
        )
        second = int(now_s)
        if not self._seconds or self._seconds[-1].second != second:
            self._seconds.append(SecondRecord(second))
        last = self._seconds[-1]
        last.num_steps += 1
        last.num_prompt_tokens += num_prompt_tokens
        last.num_output_tokens += num_told
        last.num_running = output.stats.num_running
        last.num_waiting = output.stats.num_waiting

    def _count_drafts(self, output: EngineOutput) -> tuple[int, int]:
        """Drafts verified and accepted since the last step, from the cumulative counters."""
        drafts = output.stats.drafts
        draft_counts = drafts.num_draft_tokens, drafts.num_accepted_tokens
        before, self._drafts = self._drafts or draft_counts, draft_counts
        return draft_counts[0] - before[0], draft_counts[1] - before[1]


class _Record:
    """What a request's :class:`RequestRecord` is made of. Written by ``EngineMonitor`` alone."""

    __slots__ = (
        "_final",
        "_num_mixed_steps",
        "_num_prompt_steps",
        "_num_rows",
        "_num_steps",
        "_phases",
        "_request",
        "num_output",
        "seq",
    )

    def __init__(self, request: Request, kind: PhaseKind) -> None:
        self._request = request
        self._phases: list[Phase] = [Phase(kind, request.arrival_s)]
        self._num_steps = self._num_prompt_steps = self._num_rows = self._num_mixed_steps = 0
        self._final: RequestRecord | None = None
        self.num_output = len(request.resumed_token_ids)
        self.seq: Sequence | None = None  # while the sequence is live

    def enter(self, kind: PhaseKind, now_s: float) -> None:
        """Begin a phase, unless it is the current one."""
        if self._phases[-1].kind != kind:
            self._phases.append(Phase(kind, now_s))

    def catch_up(self, seq: Sequence, now_s: float) -> None:
        """Add the phases before recording began, as far as they are known."""
        self.num_output = len(seq.token_ids) - seq.num_prompt
        if seq.scheduled_s is not None:
            self.enter("prefill", seq.scheduled_s)
        if seq.first_token_s is not None:
            self.enter("decode", seq.first_token_s)
        if seq.status is Status.WAITING and seq.num_preemptions:
            self.enter("preempted", now_s)

    def count_step(self, num_rows: int, *, is_prompt: bool, is_mixed: bool) -> None:
        """Count a step that had a row of this request."""
        self._num_steps += 1
        self._num_rows += num_rows
        if is_prompt:
            self._num_prompt_steps += 1
        elif is_mixed:
            self._num_mixed_steps += 1

    def end(self, reason: FinishReason, error: str, now_s: float) -> None:
        """Note that the request has ended, and release its sequence."""
        self._final = self._make_record(reason, error, now_s)
        self.seq = None

    def to_record(self) -> RequestRecord:
        """The request's life up to now or to its end."""
        return self._final or self._make_record(None, "", None)

    def _make_record(
        self, reason: FinishReason | None, error: str, ended_s: float | None
    ) -> RequestRecord:
        request, seq = self._request, self.seq
        num_prompt = len(request.prompt_token_ids)
        return RequestRecord(
            id=request.id,
            tenant=request.tenant,
            background=request.background,
            num_prompt=num_prompt,
            num_cached=0 if seq is None else seq.num_cached or 0,
            num_output=self.num_output,
            max_output=self.num_output if seq is None else seq.max_num_tokens - num_prompt,
            num_blocks=0 if seq is None or ended_s is not None else seq.table.num_held,
            phases=tuple(self._phases),
            ended_s=ended_s,
            finish_reason=reason,
            error=error,
            num_preemptions=0 if seq is None else seq.num_preemptions,
            num_steps=self._num_steps,
            num_prompt_steps=self._num_prompt_steps,
            mean_rows=self._num_rows / self._num_steps if self._num_steps else 0.0,
            num_mixed_steps=self._num_mixed_steps,
        )


def map_blocks(pool: BlockPool, tables: Iterable[BlockTable]) -> BlockMap:
    """The owner of each block, in O(blocks).

    Args:
        pool: the block pool.
        tables: all block tables in use, in the order of the snapshot's requests.
    """
    references, idle = pool.usage_snapshot()
    owners = [FREE] * len(references)
    for block in idle:
        owners[block] = CACHED
    for owner, table in enumerate(tables, HELD):
        for block in table.block_ids[table.num_freed :]:
            owners[block] = owner
    size = -(-len(owners) // MAX_CELLS)
    held = [1 if count else 0 for count in references]
    if size == 1:
        return BlockMap(1, tuple(owners), tuple(held), tuple(references))
    return BlockMap(
        size,
        tuple(map(max, _cells(owners, size))),
        tuple(map(sum, _cells(held, size))),
        tuple(map(max, _cells(references, size))),
    )


def _cells(values: list[int], size: int) -> Iterable[tuple[int, ...]]:
    """``values`` in groups of ``size``; the last group is padded with zeros."""
    return zip_longest(*(values[start::size] for start in range(size)), fillvalue=0)
