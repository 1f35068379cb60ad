"""Decides where prompts are split to snapshot recurrent states, and which snapshot to start from.

    A   [ shared ........ | own of A .... ]      computes all; snapshot at its last full block
    B   [ shared ........ | own of B .. ]        finds the shared blocks but no snapshot there:
                          └─ is split here         makes one in passing
    C   [ shared ........ | own of C ... ]       starts from it

A repeated prompt (a conversation, a prompt sent twice) is thus reused by the second request that
has it, and a common beginning by the third.
"""

from __future__ import annotations

from engine.kv_cache.pool import BlockPool, Prefix
from engine.scheduler.sequence import Sequence
from engine.scheduler.step import StepBuilder
from engine.types import StateCopy


def prefix_with_snapshot(pool: BlockPool, seq: Sequence, prefix: Prefix) -> Prefix:
    """The part of a cached prefix of ``seq`` up to its last snapshot.

    If the prefix goes further, the sequence will make a snapshot at the prefix's end.
    """
    seq.snapshot_point = 0
    if pool.snapshots is None or not prefix.block_ids:
        return prefix
    count = len(prefix.block_ids)
    digests = seq.chain.digests(seq.token_ids, count)
    with_state = pool.snapshots.longest_prefix(digests, count)
    if with_state < count:
        seq.snapshot_point = count * pool.block_size
    return Prefix(0, prefix.block_ids[:with_state])


def plan_restore(pool: BlockPool, step: StepBuilder, seq: Sequence) -> None:
    """Restore the snapshot at the end of the cached blocks with which ``seq`` starts."""
    if pool.snapshots is not None and seq.table.block_ids:
        digests = seq.chain.digests(seq.token_ids, len(seq.table.block_ids))
        line = pool.snapshots.use(digests[len(seq.table.block_ids) - 1])
        step.restores[seq.id] = StateCopy(seq.id, line)


def chunk_end(pool: BlockPool, seq: Sequence, end: int) -> int:
    """Where a row of ``seq`` that could reach ``end`` has to end.

    That is at its next snapshot, or at a block boundary if the row does not reach the end of the
    known tokens.
    """
    if pool.snapshots is None or end - seq.num_computed <= 1:
        return end
    start, size = seq.num_computed, pool.block_size
    for place in (seq.snapshot_point, _last_full(pool, seq)):
        if start < place < end:
            end = place
    whole = end // size * size
    return whole if end < len(seq.token_ids) and whole > start else end


def plan_save(pool: BlockPool, step: StepBuilder, seq: Sequence, end: int) -> None:
    """Save the state of a row that ends at ``end``, if a block ends there and the text goes on."""
    snapshots, size = pool.snapshots, pool.block_size
    if snapshots is None or end % size or end >= len(seq.token_ids):
        return
    digest = seq.chain.digests(seq.token_ids, end // size)[end // size - 1]
    low_priority = end not in (seq.snapshot_point, _last_full(pool, seq))
    line = snapshots.reserve(digest, low_priority=low_priority)
    if line is not None:
        step.saves[seq.id] = StateCopy(seq.id, line)


def cancel_copies(pool: BlockPool, step: StepBuilder, seq: Sequence) -> None:
    """Cancel the state copies of ``seq``, whose row is removed from the step."""
    step.restores.pop(seq.id, None)
    save = step.saves.pop(seq.id, None)
    if save is not None and pool.snapshots is not None:
        pool.snapshots.cancel((save.line,))


def _last_full(pool: BlockPool, seq: Sequence) -> int:
    """The end of the last full block that others can reuse: at least one token follows it."""
    return (len(seq.token_ids) - 1) // pool.block_size * pool.block_size
