"""The settings of several processes, GPUs or cores, which ``server/settings.py`` has."""

from __future__ import annotations

from pydantic_settings import BaseSettings

from server.setting import setting

PARALLEL = "Parallelism"


class ParallelSettings(BaseSettings):
    """How a model and its requests are shared out on this machine; see docs/parallel.md."""

    tensor_parallel_size: int = setting(
        1,
        PARALLEL,
        "Processes that the model is shared out to, each with a GPU of this machine, or a part of "
        "a CPU's cores. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    enable_expert_parallel: bool = setting(
        False,
        PARALLEL,
        "With --tensor-parallel-size: share the experts of a mixture out whole, in place of a part "
        "of each.",
    )
    data_parallel_size: int = setting(
        1,
        PARALLEL,
        "Engines that serve the same model, each with all of it, its own KV cache, and as many "
        "GPUs as --tensor-parallel-size says, or a part of a CPU's cores. Requests go where their "
        "prompt is cached, or to the least busy one. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    num_threads: int | None = setting(
        None,
        PARALLEL,
        "CPU threads of each engine, or of each of its ranks; one for each core, divided by their "
        "number, when left out.",
        ge=1,
    )
