"""What the config leaves open about steps, decided for a model on its device."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig, SchedulerConfig
from engine.types import EngineInfo


def step_limits(config: EngineConfig, info: EngineInfo) -> SchedulerConfig:
    """The scheduler's limits on this device, for this model."""
    limits = config.scheduler.on(info.device)
    if info.memory.num_states:
        most = min(limits.max_num_seqs, info.memory.num_states)
        limits = msgspec.structs.replace(limits, max_num_seqs=most)
    if _is_pipelined(config):
        # Several passes of a step would wait for all stages between them.
        return msgspec.structs.replace(
            limits, num_micro_batches=config.pipeline_parallel_size, max_step_passes=1
        )
    if not info.whole_prompts:
        return limits
    tokens = max(limits.step_tokens, info.max_model_len)
    return msgspec.structs.replace(
        limits, max_num_batched_tokens=tokens, fits_running=False, whole_prompts=True
    )


def num_row_lines(config: EngineConfig, num_states: int) -> int:
    """How many lines the runner's tables have for rows, of so many sequences that may have a state;
    0: none has. A step that other stages compute holds its rows, though they may be removed
    meanwhile."""
    lines_a_row = 2 if config.pipeline_parallel_size > 1 else 1
    return lines_a_row * (num_states or config.scheduler.max_num_seqs)


def num_steps_ahead(config: EngineConfig, info: EngineInfo) -> int:
    """How many steps may be under way at once.

    As many as a pipeline has stages. Else two where steps are launched ahead of results: on a GPU.
    On a CPU they are computed at their launch: it gains nothing there, and tokens are told a step
    late.
    """
    overlap = config.scheduler.overlap
    if _is_pipelined(config):
        return config.pipeline_parallel_size
    return 2 if (info.device.startswith("cuda") if overlap is None else overlap) else 1


def whole_cells(info: EngineInfo) -> int | None:
    """The side of an image's cell in pixels, where all its tokens are computed by one step."""
    rules = info.images
    return rules.cell if rules is not None and rules.sees_both_ways else None


def _is_pipelined(config: EngineConfig) -> bool:
    """Whether stages work on several steps at once; not where no step is to be planned ahead."""
    return config.pipeline_parallel_size > 1 and config.scheduler.overlap is not False
