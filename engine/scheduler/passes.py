"""Steps of several passes: each row computes its token, the one that is chosen then, and so on.

A pass over a small model takes less time than all that surrounds a step: planning it, telling what
came of it, the clients' reading. Where every row does nothing but decode, one step may therefore
make several passes and tell of all their tokens at once.

Nobody is kept waiting by it: whoever is there when the step is planned must be running, with its
first token told. Passes take what the step leaves of its budget, and blocks that nobody is about to
need, so that they preempt nobody. A row has no more passes than its text lacks tokens.
Nor are there passes beyond the token at which drafts are looked for again.

Tokens count as computed, and those they choose as pending, once they are planned. When the result
is there, passes that were not made are taken back like refused drafts: ``num_computed`` returns to
the last token that was. Until then the sequence is planned no further. They follow a known token:
where steps are planned ahead of results, there are none.
"""

from __future__ import annotations

from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import StepBuilder


def plan_passes(step: StepBuilder, state: SchedulerState, most: int) -> int:
    """Let the rows of a planned step go on for up to ``most`` passes, where all of them can.

    Returns how many passes the step has.
    """
    rows, pool = step.rows, state.pool
    num_rows = len(rows)
    if not num_rows or not num_rows == len(state.running) == len(state.sequences):
        return 1
    if rows.silent or step.copies or rows.num_tokens != num_rows:  # a prompt goes on, or drafts
        return 1
    if not all(map(_can_go_on, step.seqs)):
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
        seq.num_ahead = more
        seq.awaits_token = True
        state.num_wasted -= more
        step.budget -= more
    return max(rows.num_passes.values(), default=1)


def settle_passes(seq: Sequence, num_made: int, state: SchedulerState) -> None:
    """Take back the passes of ``seq`` that were not made. Its ``token_ids`` end with the tokens of
    those ``num_made`` that were, and all but one of these are pending no more."""
    num_planned, num_more = seq.num_ahead, num_made - 1
    seq.num_ahead = 0
    seq.awaits_token = False
    seq.num_pending -= num_planned
    state.policy.grant(seq, num_more)
    if seq.status is not Status.RUNNING:
        return  # preempted meanwhile: nothing of it is computed
    seq.num_computed -= num_planned - num_more
    state.num_wasted += num_planned - num_more
    seq.num_landed = seq.num_computed
    start = seq.num_computed - num_more
    state.pool.publish(seq.chain, seq.token_ids, seq.table, start, seq.num_computed)
    state.pass_by(seq)


def _can_go_on(seq: Sequence) -> bool:
    """Whether a planned row of ``seq`` may have passes: behind a token that is known and told."""
    return seq.is_plain and seq.num_pending == 1 and seq.first_token_s is not None


def _num_missing(lengths: list[tuple[Sequence, int]], passes: int, state: SchedulerState) -> int:
    """Blocks that rows with these starts lack for so many passes."""
    num_missing, blocks_for = 0, state.pool.blocks_for
    for seq, start in lengths:
        end = min(start + passes, seq.max_num_tokens - 1)
        if end > seq.table.capacity:
            num_missing += blocks_for(end) - len(seq.table.block_ids)
    return num_missing
