"""Runs pooling requests through a whole engine core and returns their vectors."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.pooling import PoolingParams
from engine.types import Request


def load(directory: Path, *, step_tokens: int = 64, **changes: Any) -> EngineCore:
    """An engine in float32 on one thread, with small blocks."""
    changes.setdefault("dtype", "float32")
    return EngineCore.load(
        EngineConfig(
            model=str(directory),
            device="cpu",
            num_threads=1,
            cache=CacheConfig(block_size=4, num_blocks=256),
            scheduler=SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=step_tokens),
            **changes,
        )
    )


def embed(
    core: EngineCore, prompts: Sequence[Sequence[int]], params: PoolingParams
) -> dict[int, np.ndarray]:
    """The vector of each prompt, in order; checks that nothing is left behind."""
    for index, prompt in enumerate(prompts):
        core.add(Request(id=str(index), prompt_token_ids=tuple(prompt), pooling=params))
    found: dict[int, np.ndarray] = {}
    while core.has_work:
        output = core.step()
        assert not output.errors
        for request_id, vector in output.embeddings.items():
            found[int(request_id)] = np.frombuffer(vector, "<f4")
    assert core.stats.blocks.held == 0
    return found
