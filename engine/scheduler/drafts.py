"""Drafts of a step: appended to planned rows, and settled when the result arrives.

A planned draft counts as computed, like any other planned token. When the result arrives, rejected
drafts are rolled back: ``num_computed`` returns to the last accepted token, and the slots after it
are overwritten later. Until then the sequence is not planned again.

Drafts follow a known token. When steps are planned ahead of results, a sequence whose drafts are
expected to pay is skipped until its newest token is known. The other sequences are not held up.

Drafts use only budget that is left over and blocks that no sequence is about to need, so they never
delay a prompt or cause a preemption.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import StepBuilder
from engine.speculation.speculator import Speculator
from engine.types import PENDING_TOKEN

_MAX_IDLE_STEPS = 64  # steps in a row with no row due for drafts, before all are checked again


def plan_drafts(step: StepBuilder, state: SchedulerState, speculator: Speculator) -> None:
    """Append drafts to the decode rows of a planned step."""
    if not speculator.begin_step(len(step.rows)):
        for seq in step.seqs:
            seq.should_wait_for_token = False
        return
    num_idle = _MAX_IDLE_STEPS
    for place, seq in enumerate(step.seqs):
        rest = (
            0
            if seq.draft_state is None
            else speculator.tokens_until_due(seq.draft_state, len(seq.token_ids))
        )
        if rest:
            seq.should_wait_for_token = False
        else:
            rest = _plan_row(step, place, state, speculator)
        num_idle = min(num_idle, rest - 1)
    speculator.end_step(max(0, num_idle))


def _plan_row(step: StepBuilder, place: int, state: SchedulerState, speculator: Speculator) -> int:
    """Append drafts to a row if they pay.

    Returns the number of tokens after which to check the row again.
    """
    seq, rows = step.seqs[place], step.rows
    newest, *others = rows.token_ids[place]
    if others or rows.starts[place] < seq.num_prompt or place in rows.unsampled:
        return 1
    if seq.draft_state is None:
        seq.draft_state = speculator.begin(seq.request)
    if newest == PENDING_TOKEN:
        seq.should_wait_for_token = speculator.should_wait_for_token(seq.draft_state)
        return 1
    seq.should_wait_for_token = False
    most = min(step.budget, seq.max_num_tokens - len(seq.token_ids) - 1)
    most = min(most, _num_slots(seq, state))
    if most <= 0:
        return 1
    drafts = speculator.propose(seq.draft_state, seq.token_ids, most)
    if not drafts:
        return speculator.tokens_until_due(seq.draft_state, len(seq.token_ids))
    blocks = _allocate_draft_blocks(seq, drafts, state)
    rows.append_drafts(place, drafts, blocks, seq.token_ids)
    step.budget -= len(drafts)
    return 1


def rollback_rejected(
    seq: Sequence, new_tokens: tuple[int, ...], state: SchedulerState, speculator: Speculator
) -> None:
    """Roll back the rejected drafts of ``seq``, whose ``token_ids`` include ``new_tokens``."""
    num_drafts, num_accepted = len(seq.draft_ids), len(new_tokens) - 1
    seq.draft_ids = ()
    if seq.draft_state is not None:
        speculator.record_acceptance(seq.draft_state, num_drafts, num_accepted)
    state.policy.charge_extra(seq, num_accepted)
    if seq.status is not Status.RUNNING:
        return  # preempted in the meantime: none of it is computed
    seq.num_computed -= num_drafts - num_accepted
    state.num_wasted += num_drafts - num_accepted
    # Steps with drafts may pass every block boundary, so no other place would note this.
    seq.num_confirmed = seq.num_computed
    start = seq.num_computed - num_accepted
    state.pool.publish(seq.chain, seq.token_ids, seq.table, start, seq.num_computed)
    state.free_out_of_window(seq)


def _num_slots(seq: Sequence, state: SchedulerState) -> int:
    """The slots available for drafts of ``seq``: in its last block, and in spare blocks."""
    pool = state.pool
    spare = max(0, pool.num_free - len(state.running))
    return seq.table.capacity - seq.num_computed + spare * pool.block_size


def _allocate_draft_blocks(
    seq: Sequence, drafts: tuple[int, ...], state: SchedulerState
) -> tuple[int, ...]:
    """Count the drafts of ``seq`` as computed; returns the newly allocated blocks."""
    pool, end = state.pool, seq.num_computed + len(drafts)
    missing = max(0, pool.blocks_for(end) - len(seq.table.block_ids))
    blocks = pool.extend(seq.table, missing)
    state.num_wasted += missing * pool.block_size - len(drafts)
    seq.num_computed = end
    seq.draft_ids = drafts
    return tuple(blocks)
