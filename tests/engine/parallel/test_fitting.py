"""The memory plan that fits all ranks."""

from __future__ import annotations

from functools import partial

import pytest

from engine.config import EngineConfig
from engine.kv_cache.states import num_state_lines
from engine.parallel.common_memory import common_memory_plan
from engine.parallel.frames import Loaded
from engine.types import MemoryPlan


def plan(**changes) -> MemoryPlan:
    """A plan of 20 blocks of 4 tokens of 10 bytes each."""
    usual = {
        **{"weights_bytes": 7, "kv_cache_bytes": 800, "free_bytes": 100, "bytes_per_token": 10},
        **{"num_blocks": 20, "block_size": 4, "max_model_len": 64},
    }
    return MemoryPlan(**{**usual, **changes})


def fitted(memory: MemoryPlan, *others: Loaded, stages: int = 1) -> MemoryPlan:
    config = EngineConfig(model="m", pipeline_parallel_size=stages)
    return common_memory_plan(memory, others, partial(num_state_lines, config))


def rank(num_blocks=20, num_states=0, num_snapshots=0) -> Loaded:
    return Loaded(num_blocks, 0, 7, num_states, num_snapshots)


def test_no_more_blocks_than_the_rank_with_the_least_has_room_for():
    found = fitted(plan(), rank(30), rank(12))
    assert (found.num_blocks, found.kv_cache_bytes, found.free_bytes) == (12, 480, 100 + 320)
    assert found.max_model_len == 48


@pytest.mark.parametrize("stages", [1, 2])
def test_no_more_states_either_and_what_they_leave_is_free(stages):
    lines = stages * 8 + 1 + 5
    memory = plan(num_states=8, num_snapshots=5, state_bytes=lines * 100)
    found = fitted(memory, rank(num_states=9, num_snapshots=2), rank(num_states=6), stages=stages)
    assert (found.num_states, found.num_snapshots) == (6, 0)
    assert found.state_bytes == (stages * 6 + 1) * 100
    assert found.free_bytes + found.state_bytes == 100 + memory.state_bytes


def test_stages_without_states_have_room_for_any_number():
    """Rank 0's stage may be one of them; it uses the numbers of the others."""
    found = fitted(plan(), rank(num_states=4, num_snapshots=3), rank(), stages=3)
    assert (found.num_states, found.num_snapshots, found.state_bytes) == (4, 3, 0)
