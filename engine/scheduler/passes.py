"""Multi-pass steps: each row decodes several consecutive tokens in one step.

A pass over a small model takes less time than everything around a step: planning, reporting the
output, and the clients' reading. When every row just decodes, one step may therefore make several
passes and report all their tokens at once.

This must not keep anyone waiting. Every request present when the step is planned must be running
with its first token reported. Passes use only left-over budget and blocks that no sequence is about
to need, so they cause no preemption. A row has no more passes than its text lacks tokens, and no
pass goes beyond the token at which drafts are checked again.

Planned tokens count as computed, and the tokens they sample as pending. When the result arrives,
passes that were not made are rolled back like rejected drafts: ``num_computed`` returns to the last
token that was computed. Until then the sequence is not planned again. Passes follow a known token,
so steps planned ahead of results have only one.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import StepBuilder


def plan_passes(step: StepBuilder, state: SchedulerState, most: int) -> int:
    """Extend the rows of a planned step to up to ``most`` passes, if all of them allow it.

    Returns the number of passes.
    """
    rows, pool = step.rows, state.pool
    num_rows = len(rows)
    if not num_rows or not num_rows == len(state.running) == len(state.sequences):
        return 1
    if rows.unsampled or step.copies or rows.num_tokens != num_rows:  # prompt chunks or drafts
        return 1
    if not all(map(_allows_more_passes, step.seqs)):
        return 1
    lengths = list(zip(step.seqs, rows.starts, strict=True))
    most = min(most, 1 + step.budget // num_rows)
    spare = pool.num_free - num_rows
    while most > 1 and _num_missing(lengths, most, state) > spare:
        most -= 1
    for place, (seq, start) in enumerate(lengths):
        end = min(start + most, seq.max_num_tokens - 1)
        more = end - start - 1
        if more <= 0:
            continue
        missing = pool.blocks_for(end) - len(seq.table.block_ids)
        if missing > 0:
            rows.new_blocks[place] = (
                *rows.new_blocks.get(place, ()),
                *pool.extend(seq.table, missing),
            )
            state.num_wasted += missing * pool.block_size
        rows.num_passes[place] = 1 + more
        seq.num_computed = end
        seq.num_pending += more
        seq.num_extra_passes = more
        seq.should_wait_for_token = True
        state.num_wasted -= more
        step.budget -= more
    return max(rows.num_passes.values(), default=1)


def rollback_passes(seq: Sequence, num_made: int, state: SchedulerState) -> None:
    """Roll back the passes of ``seq`` that were not made.

    Its ``token_ids`` already include the tokens of the ``num_made`` passes, and all but one of
    these are no longer pending.
    """
    num_planned, num_more = seq.num_extra_passes, num_made - 1
    seq.num_extra_passes = 0
    seq.should_wait_for_token = False
    seq.num_pending -= num_planned
    state.policy.charge_extra(seq, num_more)
    if seq.status is not Status.RUNNING:
        return  # preempted in the meantime: none of it is computed
    seq.num_computed -= num_planned - num_more
    state.num_wasted += num_planned - num_more
    seq.num_confirmed = seq.num_computed
    start = seq.num_computed - num_more
    state.pool.publish(seq.chain, seq.token_ids, seq.table, start, seq.num_computed)
    state.free_out_of_window(seq)


def _allows_more_passes(seq: Sequence) -> bool:
    """Whether a row of ``seq`` may have more passes: its token is known and its first reported."""
    return seq.is_plain and seq.num_pending == 1 and seq.first_token_s is not None


def _num_missing(lengths: list[tuple[Sequence, int]], passes: int, state: SchedulerState) -> int:
    """How many blocks rows with these starts lack for so many passes."""
    num_missing, blocks_for = 0, state.pool.blocks_for
    for seq, start in lengths:
        end = min(start + passes, seq.max_num_tokens - 1)
        if end > seq.table.capacity:
            num_missing += blocks_for(end) - len(seq.table.block_ids)
    return num_missing
