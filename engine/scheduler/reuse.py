"""What of a sequence's tokens need not be computed: its leader's blocks, or a cached prefix."""

from __future__ import annotations

from engine.kv_cache.pool import Prefix
from engine.scheduler import snapshots
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState

_MAX_OFFLOAD_WAIT_STEPS = 4  # steps to wait for a block being offloaded; two steps may be in flight


def find_prefix(state: SchedulerState, seq: Sequence) -> Prefix:
    """The cached prefix from which a sequence can continue."""
    prefix = state.pool.match(seq.chain, seq.token_ids, state.window)
    return snapshots.prefix_with_snapshot(state.pool, seq, prefix)


def computed_prefix(state: SchedulerState, seq: Sequence, leader: Sequence | None) -> Prefix:
    """The full blocks that ``seq`` need not compute: its leader's, or those in the cache."""
    if leader is None:
        return Prefix(0, ()) if seq.must_compute_prompt else find_prefix(state, seq)
    full = (seq.num_prompt - 1) // state.pool.block_size
    return Prefix(leader.table.num_freed, leader.table.block_ids[leader.table.num_freed : full])


def usable_leader(state: SchedulerState, seq: Sequence) -> Sequence | None:
    """The leader, if the shared part of its prompt is computed and still held.

    Steps in flight do not count: if one fails and is replayed, the leader may have ended by then.
    """
    leader = seq.leader
    if leader is None or leader.status is not Status.RUNNING:
        return None
    if state.pool.snapshots is not None:
        return None  # its state is past the prompt; use the snapshots it left
    if leader.num_confirmed < leader.num_prompt - 1:
        return None
    window, size = state.window, state.pool.block_size
    if window is None:
        return leader
    # The fork may have to recompute its last block from the start.
    first_seen = (leader.num_prompt - 1) // size * size - window + 1
    return leader if leader.table.num_freed * size <= max(0, first_seen) else None


def should_wait_for_prefix(state: SchedulerState, seq: Sequence, prefix: Prefix) -> bool:
    """Whether to delay ``seq`` by a step because its prefix is about to become longer."""
    pool = state.pool
    if seq.num_offload_waits >= _MAX_OFFLOAD_WAIT_STEPS or not pool.is_next_block_pending(
        seq.chain, seq.token_ids, prefix
    ):
        seq.num_offload_waits = 0
        return False
    seq.num_offload_waits += 1
    pool.touch(prefix)
    return True
