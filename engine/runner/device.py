"""Which device, in which dtype, on how many threads."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.crowd import is_crowd
from engine.errors import ModelLoadError

logger = logging.getLogger(__name__)

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

_CACHE_CODES = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8_e4m3": torch.float8_e4m3fn,
}

# Below this the weights stay in a core's share of the last-level cache.
_SMALL_MODEL_BYTES = 64 * 2**20


def choose_device(name: str, rank: int = 0) -> torch.device:
    """The device asked for; ``auto`` is a GPU where there is one: that of the process's rank, and
    this thread's from now on.

    Raises:
        ModelLoadError: a GPU is asked for and there is none.
    """
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise ModelLoadError("device 'cuda' was requested, but torch finds no GPU")
    if not has_gpu or name == "cpu":
        return torch.device("cpu")
    if rank:
        torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def divide_machine(config: EngineConfig) -> EngineConfig:
    """The config of a process among others that serve the same model on this machine, ranks of one
    model or engines of their own: on a CPU they divide its cores.

    Raises:
        ModelLoadError: there are fewer GPUs than processes.
    """
    ranks, engines = config.ranks_here, config.num_replicas
    if ranks * engines == 1:
        return config
    if choose_device(config.device).type == "cuda":
        found = torch.cuda.device_count()
        if found < ranks * engines:
            sizes = {
                "data_parallel_size": engines,
                "pipeline_parallel_size": config.pipeline_parallel_size,
                "tensor_parallel_size": config.tensor_parallel_size,
            }
            asked = " of ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)
            if config.nodes is not None:
                asked += f" on {config.nodes.size} nodes"
            raise ModelLoadError(f"{asked}: torch finds {found} GPUs")
        return config
    count = config.num_threads or max(1, usable_threads() // (ranks * engines))
    return msgspec.structs.replace(config, num_threads=count)


def choose_dtype(name: str, checkpoint: str | None, device: torch.device) -> torch.dtype:
    """The dtype asked for. ``auto`` is the checkpoint's on a GPU; on a CPU it is bfloat16, whatever
    the checkpoint's, where weights in it are multiplied faster, and float32 elsewhere.

    Raises:
        ModelLoadError: the checkpoint's dtype is none that can be computed in.
    """
    if name == "auto":
        if device.type == "cuda":
            name = checkpoint or "bfloat16"
        else:
            name = "bfloat16" if _multiplies_bfloat16() else "float32"
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelLoadError(f"dtype {name[:40]!r} is not supported (known: {', '.join(_DTYPES)})")
    return dtype


def cache_codes(name: str) -> torch.dtype | None:
    """The codes in which a KV cache of this name holds keys and values; None: it has the model's
    dtype."""
    return _CACHE_CODES.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def set_threads(num_threads: int | None, weights_bytes: int, *, shares_cores: bool = False) -> int:
    """Set the threads of the tensor library, for the whole process; told in a log line.

    By default one for each physical core this process may run on, or fewer where torch was told
    so (OMP_NUM_THREADS): hyper-threads that share a core slow matrix products down. A small model
    leaves one core to the process that speaks HTTP: its operations take microseconds, and a
    thread that must wait for a core at the end of each costs more than it computes. Not so where
    nobody is waited for who has not begun: with ``shares_cores``, which is true of the native
    kernels' team; see ``StepThreads``.
    """
    most = usable_threads()
    count = num_threads or (most if shares_cores else default_threads(most, weights_bytes))
    torch.set_num_threads(count)
    logger.info("tensor threads: %d", count)
    return count


def usable_threads() -> int:
    """Threads that find a core each, or fewer where torch was told so (OMP_NUM_THREADS)."""
    return min(torch.get_num_threads(), _physical_cores())


class StepThreads:
    """How many threads compute a step.

    The next token of a few sequences is worth all cores. The tokens of some tens keep the process
    that speaks HTTP busy too: a small model then gains little by the last core, and loses much
    whenever a thread is put off it in the middle of an operation. With more sequences than that the
    step is what all wait for, and the last core is idle for most of it.

    Args:
        most: threads of a step of few sequences, or of many; the number that is set now.
        crowded: threads of a step in between.
    """

    def __init__(self, most: int, crowded: int) -> None:
        self._most, self._crowded = most, crowded
        self._now = most

    def use(self, num_rows: int) -> None:
        """A step of so many sequences is about to be computed by this thread."""
        count = self._crowded if is_crowd(num_rows) else self._most
        if count != self._now:
            torch.set_num_threads(count)
            self._now = count


def default_threads(num_cores: int, weights_bytes: int) -> int:
    """Threads for a model of this size that leaves a core to others if it is small."""
    return max(1, num_cores - 1) if weights_bytes < _SMALL_MODEL_BYTES else num_cores


def _multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products in bfloat16, or there are native kernels
    that widen such weights as they read them: half the bytes of float32."""
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    from kernels.cpu.linear import is_available  # it may compile them: for who has a use for them

    return is_available()


def _physical_cores() -> int:
    """Distinct cores among the CPUs this process may use."""
    try:
        cpus = os.sched_getaffinity(0)
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except (AttributeError, OSError):  # not Linux, or not told
        return os.cpu_count() or 1
