"""Limits that depend on the model: of a step, on its device too, and of a context."""

from __future__ import annotations

import msgspec

from engine.config import EngineConfig, SchedulerConfig
from engine.errors import ModelLoadError
from engine.types import EngineInfo

# The most tokens of a captured step with prompts.
MAX_CAPTURED_TOKENS = 2048


def step_limits(config: EngineConfig, info: EngineInfo) -> SchedulerConfig:
    """The scheduler's limits for this model on its device."""
    limits = config.scheduler.for_device(info.device)
    if info.memory.num_states:
        most = min(limits.max_num_seqs, info.memory.num_states)
        limits = msgspec.structs.replace(limits, max_num_seqs=most)
    if _is_pipelined(config):
        # With several passes, a step would wait for all stages after each pass.
        return msgspec.structs.replace(
            limits, num_micro_batches=config.pipeline_parallel_size, max_step_passes=1
        )
    if not info.unchunked_prefill:
        return limits
    tokens = max(limits.step_tokens, info.max_model_len)
    return msgspec.structs.replace(
        limits,
        max_num_batched_tokens=tokens,
        adaptive_token_budget=False,
        prompt_step_s=None,
        unchunked_prefill=True,
    )


def num_row_lines(config: EngineConfig, num_states: int) -> int:
    """How many lines the runner's row tables have.

    A step in flight through pipeline stages keeps its rows' lines even if they are removed
    meanwhile, and each of the others may be full of newcomers.

    Args:
        config: the engine's configuration.
        num_states: sequences that may have a recurrent state; 0: the model has none.
    """
    return config.pipeline_parallel_size * (num_states or config.scheduler.max_num_seqs)


def max_steps_in_flight(config: EngineConfig, info: EngineInfo) -> int:
    """How many steps may be in flight at once.

    With a pipeline, one per stage. Otherwise two on a GPU, where steps are launched ahead of
    results. On a CPU one, since a step is computed when it is launched: overlap would gain nothing
    there and deliver tokens a step late.
    """
    overlap = config.scheduler.overlap
    if _is_pipelined(config):
        return config.pipeline_parallel_size
    return 2 if (info.device.startswith("cuda") if overlap is None else overlap) else 1


def atomic_image_cell(info: EngineInfo) -> int | None:
    """The side of an image cell in pixels if images must be computed in one step, else None."""
    rules = info.images
    return rules.cell if rules is not None and rules.is_bidirectional else None


def _is_pipelined(config: EngineConfig) -> bool:
    """Whether several steps may be in flight in the pipeline; false if overlap is turned off."""
    return config.pipeline_parallel_size > 1 and config.scheduler.overlap is not False


def check_max_model_len(asked: int | None, longest: int) -> None:
    """Raise ModelLoadError for a context other than what a model of ``longest`` tokens has."""
    if asked is not None and not 0 < asked <= longest:
        raise ModelLoadError(
            f"max_model_len {asked:,} is out of range: this model's context is {longest:,} tokens"
        )
