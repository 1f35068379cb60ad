"""The part of ``server/settings.py`` for running on several processes, GPUs or cores."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings

from engine.config import NodesConfig
from server.setting import setting

PARALLEL = "Parallelism"


class ParallelSettings(BaseSettings):
    """How a model and its requests are distributed over one or more machines.

    See docs/parallel.md.
    """

    tensor_parallel_size: int = setting(
        1,
        PARALLEL,
        "Processes that share each layer of the model, each with a GPU or a part of the CPU's "
        "cores. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    pipeline_parallel_size: int = setting(
        1,
        PARALLEL,
        "Stages of consecutive layers to cut the model into, each with --tensor-parallel-size "
        "processes. Stages work on different requests at the same time. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    enable_expert_parallel: bool = setting(
        False,
        PARALLEL,
        "With --tensor-parallel-size: give each process whole experts instead of a part of each.",
    )
    data_parallel_size: int = setting(
        1,
        PARALLEL,
        "Engines that serve the same model, each with its own copy, KV cache and GPUs, or a part "
        "of the CPU's cores. A request goes to the engine that has its prompt cached, or to the "
        "least busy one. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    num_threads: int | None = setting(
        None,
        PARALLEL,
        "CPU threads of each engine, or of each of its ranks. Default: the cores, divided evenly.",
        ge=1,
    )
    nnodes: int = setting(
        1,
        PARALLEL,
        "Machines to spread one model over, with equally many processes on each. Only the first "
        "has the API. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    node_rank: int = setting(
        0,
        PARALLEL,
        "Number of this machine among them. 0 is the first, which has the API.",
        ge=0,
        le=63,
    )
    master_addr: str | None = setting(
        None,
        PARALLEL,
        "Address of the first machine on the network between them, where it waits for the others.",
    )
    master_port: int = setting(
        29500, PARALLEL, "Port on which the first machine waits for the others.", ge=1, le=65535
    )
    node_secret_file: Path | None = setting(
        None,
        PARALLEL,
        "File with the secret that all machines share, at least 16 bytes, so that no other can "
        "join; `openssl rand -hex 32` makes one.",
    )
    node_timeout_s: float = setting(
        600.0,
        PARALLEL,
        "Seconds that machines wait for each other when the server or its engine starts. 0 waits "
        "forever.",
        ge=0,
    )

    def nodes_config(self) -> NodesConfig | None:
        """The engine's config of the machines; None if there is only this one."""
        if self.nnodes == 1:
            return None
        return NodesConfig(
            size=self.nnodes,
            rank=self.node_rank,
            master_addr=self.master_addr or "",
            master_port=self.master_port,
            secret_file=str((self.node_secret_file or Path()).absolute()),
            timeout_s=self.node_timeout_s,
        )
