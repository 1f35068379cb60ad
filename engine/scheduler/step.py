"""A step plan under construction, and the record kept of a plan until its result arrives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import structs

from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.pool import BlockTable
from engine.plan_rows import PlanRows, ScheduledRow
from engine.scheduler.sequence import Sequence, Status
from engine.types import AddedRow, BlockCopy, StateCopy, StepPlan

# A step gives at most a third of its budget to yielding prompts
# (``Policy.should_throttle_prompt``), to keep steps short for new arrivals, which wait for the step
# to end. This costs throughput: with prompts twice as long as outputs, a third costs 6 % of the
# requests and a quarter 11 %.
_THROTTLE_DIVISOR = 3


class Fill(NamedTuple):
    """Slots that a planned row fills; their full blocks are published once the row is computed.

    Void if the sequence no longer has this table by then, because it was preempted or finished.
    """

    seq: Sequence
    table: BlockTable
    start: int
    end: int


class PlannedStep(NamedTuple):
    """The record kept of a plan until its result arrives.

    Holds sequences rather than ids, because the id of an aborted request may have been reused.
    """

    seqs: list[Sequence]  # one per row of the plan, in order
    fills: list[Fill]
    plan: StepPlan
    has_failed: bool = False  # the plan could not be run as it was made


class StepBuilder:
    """The plan under construction. Written only by the Scheduler's parts."""

    __slots__ = (
        "added",
        "budget",
        "copies",
        "copy_source_ids",
        "decode_slots",
        "fills",
        "loads",
        "num_preempted",
        "prompt_budget",
        "restores",
        "rows",
        "saves",
        "seqs",
        "throttled_budget",
        "victims",
    )

    def __init__(self, budget: int, decode_slots: int, prompt_budget: int) -> None:
        self.budget = budget  # tokens left in the step
        self.prompt_budget = prompt_budget  # of these, at most this many for prompts
        self.throttled_budget = max(1, budget // _THROTTLE_DIVISOR)  # and for yielding prompts
        # Rows left for running sequences that compute a single token.
        self.decode_slots = decode_slots
        self.rows = PlanRows()
        self.seqs: list[Sequence] = []  # one per row
        self.added: list[AddedRow] = []
        self.copies: list[BlockCopy] = []
        # Sequences whose blocks this step copies. They must not be preempted: a sequence admitted
        # afterwards could load or copy something else into those blocks before the copy is made.
        self.copy_source_ids: set[str] = set()
        self.loads: dict[int, int] = {}  # from block id to the host slot it is loaded from
        # Copies of states from and to snapshots, by row id.
        self.restores: dict[str, StateCopy] = {}
        self.saves: dict[str, StateCopy] = {}
        self.fills: list[Fill] = []
        self.num_preempted = 0
        self.victims: list[Sequence] | None = None  # running sequences, the next victim last

    def remove_row(self, seq: Sequence) -> int:
        """Remove the row of a sequence that is about to be preempted, if it has one.

        If the sequence was admitted in this very step, its admission and copies are removed too.
        Planned loads stay, since other sequences may read those blocks. Returns the number of
        tokens removed.
        """
        if seq not in self.seqs:
            return 0
        index = self.seqs.index(seq)
        row = self.rows.remove(index)
        del self.seqs[index]
        self.budget += len(row.token_ids)
        if len(row.token_ids) > 1:
            self.prompt_budget += len(row.token_ids)
        seq.num_pending -= row.is_sampled
        self.added = [added for added in self.added if added.request.id != seq.id]
        held = set(seq.table.block_ids[seq.table.num_freed :])
        self.copies = [copy for copy in self.copies if copy.target not in held]
        return len(row.token_ids)

    def build(self, removed: list[str], tier: HostTier | None) -> StepPlan:
        """Return the finished plan. The builder must not be used afterwards."""
        return StepPlan(
            rows=self.rows,
            added=tuple(self.added),
            removed=tuple(removed),
            copies=tuple(self.copies),
            offloads=() if tier is None else tier.take_offloads(),
            loads=tuple(BlockCopy(slot, block) for block, slot in self.loads.items()),
            restores=tuple(self.restores.values()),
            saves=tuple(self.saves.values()),
            num_preempted=self.num_preempted,
        )


def added_row(seq: Sequence) -> AddedRow:
    """What the runner needs to know about a sequence before its first row."""
    return AddedRow(seq.request, tuple(seq.token_ids[seq.num_prompt :]), seq.grammar)


def replay(
    plan: StepPlan,
    seqs: Mapping[str, Sequence],
    tables: Mapping[str, BlockTable],
    rows: Iterable[ScheduledRow],
) -> StepPlan:
    """The part of ``plan`` that computes ``rows``, for a runner that has forgotten them all.

    Each row is removed and added again with its whole block table and with the tokens that were
    pending when it was planned; see the runner's row contract. Rows of sequences that have lost
    their blocks since are left out. The contents of copied blocks are computed instead: the source
    may have been freed, and a later step that is now void may have written there. For the same
    reason nothing is offloaded: a block's next owner may already have written to it.

    Args:
        plan: the oldest plan whose result has not been processed.
        seqs: the sequences of the plan's rows, by id.
        tables: those that the rows fill, by id. A sequence with another one by now has lost its
            blocks and been admitted again. One without a table here waits for its token instead.
        rows: a subset of the plan's rows.
    """
    planned = set(plan.rows.ids)
    removed = [request_id for request_id in plan.removed if request_id not in planned]
    added: list[AddedRow] = []
    whole = PlanRows()
    targets = {copy.target for copy in plan.copies}
    for row in rows:
        seq = seqs[row.id]
        removed.append(row.id)
        if seq.status is not Status.RUNNING or seq.table is not tables.get(row.id, seq.table):
            continue
        added.append(added_row(seq))
        table = tuple(seq.table.block_ids)
        block_size = seq.table.capacity // len(table)
        start = row.start
        if table[start // block_size] in targets:
            start -= start % block_size
        num_known = len(row.token_ids) - row.num_drafts
        tokens = tuple(seq.token_ids[start : row.start + num_known]) + row.token_ids[num_known:]
        whole.append(
            ScheduledRow(
                row.id, start, tokens, table, row.is_sampled, row.num_drafts, row.known_token_ids
            )
        )
    return StepPlan(
        rows=whole,
        added=tuple(added),
        removed=tuple(removed),
    )


def replay_from_start(
    plan: StepPlan, seqs: Mapping[str, Sequence], step_tokens: int
) -> list[StepPlan]:
    """The plans that compute ``plan`` on a runner with recurrent states.

    A lost state can only be rebuilt from the sequence's first token. So for each row, plans that
    compute all earlier tokens come first, and ``plan`` itself comes last. The first of all removes
    what ``plan`` does, since the runner may have no line to spare.

    Args:
        plan: a plan made by ``replay``.
        seqs: the sequences of its rows, by id.
        step_tokens: the most tokens that one step computes.
    """
    leads: list[StepPlan] = []
    rows, added = PlanRows(), {row.request.id: row for row in plan.added}
    for row in plan.rows:
        blocks = row.new_block_ids
        for begin in range(0, row.start, step_tokens):
            tokens = tuple(seqs[row.id].token_ids[begin : min(row.start, begin + step_tokens)])
            part = ScheduledRow(row.id, begin, tokens, blocks, is_sampled=False)
            newcomers = (added.pop(row.id),) if row.id in added else ()
            removed = () if begin else (row.id,) if leads else plan.removed
            leads.append(StepPlan(rows=PlanRows.of([part]), added=newcomers, removed=removed))
            blocks = ()
        rows.append(structs.replace(row, new_block_ids=blocks))
    known = {row.id for row in plan.rows if row.start}
    removed = tuple(request_id for request_id in plan.removed if request_id not in known)
    return [*leads, StepPlan(rows=rows, added=tuple(added.values()), removed=removed)]
