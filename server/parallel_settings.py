"""The settings of several processes, GPUs or cores, which ``server/settings.py`` has."""

from __future__ import annotations

from pathlib import Path

from pydantic_settings import BaseSettings

from engine.config import NodesConfig
from server.setting import setting

PARALLEL = "Parallelism"


class ParallelSettings(BaseSettings):
    """How a model and its requests are shared out, on this machine or several; see
    docs/parallel.md."""

    tensor_parallel_size: int = setting(
        1,
        PARALLEL,
        "Processes that each layer is shared out to, each with a GPU, or a part of a CPU's cores. "
        "See docs/parallel.md.",
        ge=1,
        le=64,
    )
    pipeline_parallel_size: int = setting(
        1,
        PARALLEL,
        "Stages of consecutive layers that the model is cut into, each of as many processes as "
        "--tensor-parallel-size says; they work on the tokens of different requests at once. See "
        "docs/parallel.md.",
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
        "GPUs as the model has ranks, or a part of a CPU's cores. Requests go where their prompt "
        "is cached, or to the least busy one. See docs/parallel.md.",
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
    nnodes: int = setting(
        1,
        PARALLEL,
        "Machines that the processes of one model lie on, as many on each. All but the first have "
        "nothing else: no API. See docs/parallel.md.",
        ge=1,
        le=64,
    )
    node_rank: int = setting(
        0, PARALLEL, "Which of them this machine is; 0 is the first, and has the API.", ge=0, le=63
    )
    master_addr: str | None = setting(
        None,
        PARALLEL,
        "Address of the first machine on the network between them, where it waits for the others.",
    )
    master_port: int = setting(
        29500, PARALLEL, "Port at which it waits for the others.", ge=1, le=65535
    )
    node_secret_file: Path | None = setting(
        None,
        PARALLEL,
        "File of a secret that all machines have, 16 bytes or more, so that nobody else can join; "
        "`openssl rand -hex 32` makes one.",
    )
    node_timeout_s: float = setting(
        600.0,
        PARALLEL,
        "Seconds that machines wait for one another at a start, of the server or of its engine. 0 "
        "waits for ever.",
        ge=0,
    )

    def nodes_config(self) -> NodesConfig | None:
        """What the engine is told of the machines; None: there is this one."""
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
