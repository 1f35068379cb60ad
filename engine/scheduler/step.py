"""A step's plan in the making, and what must be remembered of it until its result is there."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from msgspec import structs

from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.pool import BlockTable
from engine.plan_rows import PlanRows, ScheduledRow
from engine.scheduler.sequence import Sequence, Status
from engine.types import AddedRow, BlockCopy, StateCopy, StepPlan

# The part of a step that is left to the prompts of who yields to others (``Policy.yields``): what
# arrives meanwhile waits for the step's end. It costs throughput: where prompts are twice as long
# as outputs a third costs 6 % of the requests, a quarter 11 %.
_YIELDING = 3


class Fill(NamedTuple):
    """Blocks that a planned row fills, to be published once the row is computed.

    Void if the sequence has another table by then, or none: it was preempted or has ended.
    """

    seq: Sequence
    table: BlockTable
    start: int
    end: int


class Planned(NamedTuple):
    """What is remembered of a plan until its result is there.

    Sequences, not ids: an aborted request's id may have been given to another by then.
    """

    seqs: list[Sequence]  # of the plan's rows, in order
    fills: list[Fill]
    plan: StepPlan
    has_failed: bool = False  # it could not be run as it was planned


class StepBuilder:
    """The plan under construction. Written by the Scheduler alone."""

    __slots__ = (
        "added",
        "budget",
        "copies",
        "fills",
        "lenders",
        "loads",
        "num_preempted",
        "places",
        "prompts",
        "restores",
        "rows",
        "saves",
        "seqs",
        "spare",
        "victims",
    )

    def __init__(self, budget: int, places: int, prompts: int) -> None:
        self.budget = budget  # tokens that still fit
        self.prompts = prompts  # of prompts, at most
        self.places = places  # for sequences that run and have one token to compute
        self.spare = max(1, budget // _YIELDING)  # of them for prompts of who yields
        self.rows = PlanRows()
        self.seqs: list[Sequence] = []  # of the rows
        self.added: list[AddedRow] = []
        self.copies: list[BlockCopy] = []
        # Whose blocks are copied: a newcomer that was given one could load, or copy, something else
        # into it before that.
        self.lenders: set[str] = set()
        self.loads: dict[int, int] = {}  # slots of the host, by the blocks that they go to
        # States that go to snapshots or come from there, by the ids of their rows.
        self.restores: dict[str, StateCopy] = {}
        self.saves: dict[str, StateCopy] = {}
        self.fills: list[Fill] = []
        self.num_preempted = 0
        self.victims: list[Sequence] | None = None  # who runs, the next to be preempted last

    def withdraw(self, seq: Sequence) -> int:
        """Take a row back that was planned before its sequence was chosen for preemption, and what
        was to be done for it alone if it has joined with this very step; returns how many tokens
        it had. What was to be loaded is: others may read it."""
        if seq not in self.seqs:
            return 0
        index = self.seqs.index(seq)
        row = self.rows.remove(index)
        del self.seqs[index]
        self.budget += len(row.token_ids)
        if len(row.token_ids) > 1:
            self.prompts += len(row.token_ids)
        seq.num_pending -= row.samples
        self.added = [added for added in self.added if added.request.id != seq.id]
        held = set(seq.table.block_ids[seq.table.num_passed :])
        self.copies = [copy for copy in self.copies if copy.target not in held]
        return len(row.token_ids)

    def build(self, removed: list[str], tier: HostTier | None) -> StepPlan:
        """The finished plan; the builder is not used again."""
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
    """What the runner must know of a sequence before its first row."""
    return AddedRow(seq.request, tuple(seq.token_ids[seq.num_prompt :]), seq.grammar)


def replay(plan: StepPlan, seqs: Mapping[str, Sequence], rows: Iterable[ScheduledRow]) -> StepPlan:
    """The part of ``plan`` that computes ``rows``, for a runner that knows none of them.

    Each row is removed and added again, with its whole block table and the tokens that were still
    pending when it was planned; see the runner's row contract. Rows of sequences that have lost
    their blocks since are left out. What was to be copied into a block is computed instead: the
    source's holder may have ended, and a step that is void by now may have written there. Nothing
    is offloaded: whoever was given a block may have written there.

    Args:
        plan: the oldest whose result has not been taken in.
        seqs: of the plan's rows, by id.
        rows: some of the plan's.
    """
    planned = set(plan.rows.ids)
    removed = [request_id for request_id in plan.removed if request_id not in planned]
    added: list[AddedRow] = []
    whole = PlanRows()
    targets = {copy.target for copy in plan.copies}
    for row in rows:
        seq = seqs[row.id]
        removed.append(row.id)
        if seq.status is not Status.RUNNING:
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
            ScheduledRow(row.id, start, tokens, table, row.samples, row.num_drafts, row.text)
        )
    return StepPlan(
        rows=whole,
        added=tuple(added),
        removed=tuple(removed),
    )


def from_the_start(
    plan: StepPlan, seqs: Mapping[str, Sequence], step_tokens: int
) -> list[StepPlan]:
    """What must be run so that ``plan`` can be, for a runner that keeps a state of each sequence:
    its rows' tokens from the first one on, row by row; and the plan itself, behind these.

    Args:
        plan: made by ``replay``.
        seqs: of its rows, by id.
        step_tokens: the most that a step computes.
    """
    leads: list[StepPlan] = []
    rows, added = PlanRows(), {row.request.id: row for row in plan.added}
    for row in plan.rows:
        blocks = row.new_block_ids
        for begin in range(0, row.start, step_tokens):
            tokens = tuple(seqs[row.id].token_ids[begin : min(row.start, begin + step_tokens)])
            part = ScheduledRow(row.id, begin, tokens, blocks, samples=False)
            newcomers = (added.pop(row.id),) if row.id in added else ()
            removed = () if begin else (row.id,)
            leads.append(StepPlan(rows=PlanRows.of([part]), added=newcomers, removed=removed))
            blocks = ()
        rows.append(structs.replace(row, new_block_ids=blocks))
    known = {row.id for row in plan.rows if row.start}
    removed = tuple(request_id for request_id in plan.removed if request_id not in known)
    return [*leads, StepPlan(rows=rows, added=tuple(added.values()), removed=removed)]
