"""Drafts of a step: laid behind rows that are planned, and settled when its result is there.

A draft counts as computed once it is planned, like any token. When the result is there, the refused
ones are taken back: ``num_computed`` returns to the last token that was kept, and what was written
behind it is written again. Until then the sequence is planned no further.

Drafts follow a known token. Where steps are planned ahead of results, a sequence whose drafts are
expected to pay is passed over until its newest token is there; the others go on.

Drafts get what the step leaves: budget that nobody needs, and blocks that nobody is about to need,
so that they neither delay a prompt nor preempt anybody.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import StepBuilder
from engine.speculation.speculator import Speculator
from engine.types import PENDING_TOKEN

_MOST_IDLE = 64  # steps in a row in which nobody is due: then all are asked once more


def plan_drafts(step: StepBuilder, state: SchedulerState, speculator: Speculator) -> None:
    """Lay drafts behind those rows of a planned step that decode."""
    if not speculator.begin_step(len(step.rows)):
        for seq in step.seqs:
            seq.awaits_token = False
        return
    num_idle = _MOST_IDLE
    for place, seq in enumerate(step.seqs):
        rest = 0 if seq.draft is None else speculator.rest(seq.draft, len(seq.token_ids))
        if rest:
            seq.awaits_token = False
        else:
            rest = _plan_row(step, place, state, speculator)
        num_idle = min(num_idle, rest - 1)
    speculator.end_step(max(0, num_idle))


def _plan_row(step: StepBuilder, place: int, state: SchedulerState, speculator: Speculator) -> int:
    """Lay drafts behind a row, if any pay; returns after how many tokens to look at it again."""
    seq, rows = step.seqs[place], step.rows
    newest, *others = rows.token_ids[place]
    if others or rows.starts[place] < seq.num_prompt or place in rows.silent:
        return 1
    if seq.draft is None:
        seq.draft = speculator.begin(seq.request)
    if newest == PENDING_TOKEN:
        seq.awaits_token = speculator.is_worth_waiting(seq.draft)
        return 1
    seq.awaits_token = False
    most = min(step.budget, seq.max_num_tokens - len(seq.token_ids) - 1)
    most = min(most, _num_slots(seq, state))
    if most <= 0:
        return 1
    drafts = speculator.propose(seq.draft, seq.token_ids, most)
    if not drafts:
        return speculator.rest(seq.draft, len(seq.token_ids))
    blocks = _blocks_for(seq, drafts, state)
    rows.extend_row(place, drafts, blocks, seq.token_ids)
    step.budget -= len(drafts)
    return 1


def settle(
    seq: Sequence, new_tokens: tuple[int, ...], state: SchedulerState, speculator: Speculator
) -> None:
    """Take the refused drafts of ``seq`` back, whose ``token_ids`` end with the new ones by now."""
    num_drafts, num_accepted = len(seq.draft_ids), len(new_tokens) - 1
    seq.draft_ids = ()
    if seq.draft is not None:
        speculator.settle(seq.draft, num_drafts, num_accepted)
    state.policy.grant(seq, num_accepted)
    if seq.status is not Status.RUNNING:
        return  # preempted meanwhile: nothing of it is computed
    seq.num_computed -= num_drafts - num_accepted
    state.num_wasted += num_drafts - num_accepted
    start = seq.num_computed - num_accepted
    state.pool.publish(seq.chain, seq.token_ids, seq.table, start, seq.num_computed)


def _num_slots(seq: Sequence, state: SchedulerState) -> int:
    """Slots for drafts of ``seq``: left in its last block, and in blocks that nobody will miss."""
    pool = state.pool
    spare = max(0, pool.num_free - len(state.running))
    return seq.table.capacity - seq.num_computed + spare * pool.block_size


def _blocks_for(seq: Sequence, drafts: tuple[int, ...], state: SchedulerState) -> tuple[int, ...]:
    """Count the drafts of ``seq`` as computed; returns the new blocks that they need."""
    pool, end = state.pool, seq.num_computed + len(drafts)
    missing = max(0, pool.blocks_for(end) - len(seq.table.block_ids))
    blocks = pool.extend(seq.table, missing)
    state.num_wasted += missing * pool.block_size - len(drafts)
    seq.num_computed = end
    seq.draft_ids = drafts
    return tuple(blocks)
