"""Where prompts are cut so that states are copied, and which copy a sequence begins with.

    A   [ shared ........ | own of A .... ]          computes all; a snapshot at its last full block
    B   [ shared ........ | own of B .. ]            finds the blocks of what is shared, and no
                          └─ is cut here               snapshot there: makes one, on its way
    C   [ shared ........ | own of C ... ]           goes on from it

So what comes again whole is found by its second comer (a conversation, a prompt sent twice), and
what begins alike, by its third.
"""

from __future__ import annotations

from engine.kv_cache.pool import BlockPool, Prefix
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import StepBuilder
from engine.types import StateCopy


def part_with_state(pool: BlockPool, seq: Sequence, prefix: Prefix) -> Prefix:
    """Of a cached prefix of ``seq`` what comes before the last snapshot of it. Where there is more,
    the sequence makes a snapshot at its end."""
    seq.branch = 0
    if pool.snapshots is None or not prefix.block_ids:
        return prefix
    count = len(prefix.block_ids)
    digests = seq.chain.digests(seq.token_ids, count)
    with_state = pool.snapshots.longest(digests, count)
    if with_state < count:
        seq.branch = count * pool.block_size
    return Prefix(0, prefix.block_ids[:with_state])


def begin(pool: BlockPool, step: StepBuilder, seq: Sequence) -> None:
    """``seq``, which has begun with cached blocks, begins with the snapshot at their end."""
    if pool.snapshots is not None and seq.table.block_ids:
        digests = seq.chain.digests(seq.token_ids, len(seq.table.block_ids))
        line = pool.snapshots.use(digests[len(seq.table.block_ids) - 1])
        step.restores[seq.id] = StateCopy(seq.id, line)


def cut(pool: BlockPool, seq: Sequence, end: int) -> int:
    """Where a row of ``seq`` ends that could go on to ``end``: at its next snapshot, or if it does
    not reach the end of what is known of its text, with a block."""
    if pool.snapshots is None or end - seq.num_computed <= 1:
        return end
    start, size = seq.num_computed, pool.block_size
    for place in (seq.branch, _last_full(pool, seq)):
        if start < place < end:
            end = place
    whole = end // size * size
    return whole if end < len(seq.token_ids) and whole > start else end


def plan_save(pool: BlockPool, step: StepBuilder, seq: Sequence, end: int) -> None:
    """A row of ``seq`` ends at ``end``: its state is copied there where that ends a block of a text
    that goes on."""
    snapshots, size = pool.snapshots, pool.block_size
    if snapshots is None or end % size or end >= len(seq.token_ids):
        return
    digest = seq.chain.digests(seq.token_ids, end // size)[end // size - 1]
    in_passing = end not in (seq.branch, _last_full(pool, seq))
    line = snapshots.take(digest, in_passing=in_passing)
    if line is not None:
        step.saves[seq.id] = StateCopy(seq.id, line)


def withdraw(pool: BlockPool, step: StepBuilder, seq: Sequence) -> None:
    """A row of ``seq`` is taken out of the step: it copies no state."""
    step.restores.pop(seq.id, None)
    save = step.saves.pop(seq.id, None)
    if save is not None and pool.snapshots is not None:
        pool.snapshots.void((save.line,))


def _last_full(pool: BlockPool, seq: Sequence) -> int:
    """The end of the last full block that others may find: a token comes behind it."""
    return (len(seq.token_ids) - 1) // pool.block_size * pool.block_size
