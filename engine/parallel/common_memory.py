"""The memory plan that fits on all ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from engine.parallel.frames import Loaded
from engine.types import MemoryPlan


def common_memory_plan(
    memory: MemoryPlan, others: Sequence[Loaded], num_lines: Callable[[int, int], int]
) -> MemoryPlan:
    """Limit rank 0's plan to the blocks and states that every rank has room for.

    Ranks whose layers are not recurrent have room for any number of states.

    Args:
        memory: rank 0's plan.
        others: what the other ranks have room for.
        num_lines: the lines per layer that a number of sequences and a number of snapshots take.
    """
    num_blocks = min(memory.num_blocks, *(told.num_blocks for told in others))
    num_host_blocks = min(memory.num_host_blocks, *(told.num_host_blocks for told in others))
    block_bytes = memory.bytes_per_token * memory.block_size
    saved = (memory.num_blocks - num_blocks) * block_bytes
    keeping = [told for told in (memory, *others) if told.num_states]
    num_states = min((told.num_states for told in keeping), default=0)
    num_snapshots = min((told.num_snapshots for told in keeping), default=0)
    line_bytes = memory.state_bytes // num_lines(memory.num_states, memory.num_snapshots)
    state_bytes = line_bytes * num_lines(num_states, num_snapshots)
    saved += memory.state_bytes - state_bytes
    return msgspec.structs.replace(
        memory,
        num_blocks=num_blocks,
        kv_cache_bytes=num_blocks * block_bytes,
        free_bytes=memory.free_bytes + saved,
        max_model_len=min(memory.max_model_len, num_blocks * memory.block_size),
        num_host_blocks=num_host_blocks,
        host_bytes=num_host_blocks * block_bytes,
        num_states=num_states,
        num_snapshots=num_snapshots,
        state_bytes=state_bytes,
    )
