"""Choose the device, the dtype and the number of threads."""

from __future__ import annotations

import functools
import logging
import os
from pathlib import Path

import msgspec
import torch

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.runner import gpus

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

_FIRST_WITH_BFLOAT16 = (8, 0)  # of compute capabilities

# Below this size the weights fit in a core's share of the last-level cache.
_SMALL_MODEL_BYTES = 64 * 2**20


def choose_device(name: str, rank: int = 0) -> torch.device:
    """Return the device for ``name``; ``auto`` prefers a GPU, and says why it does not take one.

    A GPU is the one of this process's rank, and becomes the current device of this thread.

    Raises:
        ModelLoadError: a GPU was requested and there is none, or the GPU does not work.
    """
    if name == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        reason = gpus.missing_reason()
        if name == "cuda":
            told = "device 'cuda' was requested, but torch finds no GPU"
            raise ModelLoadError(told if reason is None else f"{told}: {reason}")
    else:
        reason = gpus.unsupported_reason(rank)
        if reason is None:
            device = torch.device("cuda", rank)
            if rank:
                torch.cuda.set_device(rank)
            gpus.check_works(device)
            return device
        if name == "cuda":
            raise ModelLoadError(f"device 'cuda' was requested, but {reason}")
    if reason is not None:
        _warn_of_cpu(reason)
    return torch.device("cpu")


@functools.cache
def _warn_of_cpu(reason: str) -> None:
    """Warn once: who has a GPU does not expect this."""
    logger.warning("running on the CPU: %s; --device cpu chooses it without this warning", reason)


def divide_machine(config: EngineConfig) -> EngineConfig:
    """Return the config of one process among several that serve the model on this machine.

    The processes are ranks of one model or separate engines. On a CPU they divide its cores.

    Raises:
        ModelLoadError: there are fewer GPUs than processes.
    """
    ranks, engines = config.ranks_per_node, config.num_replicas
    if ranks * engines == 1:
        return config
    # Looking at a GPU that is another process's would take memory there.
    if config.device != "cpu" and torch.cuda.is_available():
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
    """Return the dtype for ``name``.

    ``auto`` is the checkpoint's dtype on a GPU, but float16 in place of bfloat16 on those that
    only emulate the latter. On a CPU, whatever the checkpoint has, it is bfloat16 where matrix
    products are faster with bfloat16 weights, and float32 elsewhere.

    Raises:
        ModelLoadError: the checkpoint's dtype is not one to compute in.
    """
    if name == "auto":
        if device.type == "cuda":
            name = _gpu_dtype(checkpoint or "bfloat16", device)
        else:
            name = "bfloat16" if _has_fast_bfloat16() else "float32"
    dtype = _DTYPES.get(name.removeprefix("torch."))
    if dtype is None:
        raise ModelLoadError(f"dtype {name[:40]!r} is not supported (known: {', '.join(_DTYPES)})")
    return dtype


def cache_codes(name: str) -> torch.dtype | None:
    """Return the dtype of the KV cache's codes; None: keys and values keep the model's dtype."""
    return _CACHE_CODES.get(name)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")


def set_threads(num_threads: int | None, weights_bytes: int, *, shares_cores: bool = False) -> int:
    """Set torch's number of threads for the whole process, and log it.

    The default is one thread for each physical core this process may run on, or fewer if torch was
    configured so (OMP_NUM_THREADS): hyper-threads that share a core slow matrix products down. For
    a small model one core is left to the HTTP process: its operations take microseconds, and a
    thread that has to wait for a core at the end of each operation costs more than it contributes.
    With ``shares_cores`` all cores are used, because the native kernels' thread team does not wait
    for a thread that has not begun.
    """
    most = usable_threads()
    count = num_threads or (most if shares_cores else default_threads(most, weights_bytes))
    torch.set_num_threads(count)
    logger.info("tensor threads: %d", count)
    return count


def usable_threads() -> int:
    """Return how many threads get a core each, at most torch's setting (OMP_NUM_THREADS)."""
    return min(torch.get_num_threads(), _physical_cores())


def default_threads(num_cores: int, weights_bytes: int) -> int:
    """Return the number of threads; a small model leaves one core free."""
    return max(1, num_cores - 1) if weights_bytes < _SMALL_MODEL_BYTES else num_cores


def _gpu_dtype(checkpoint: str, device: torch.device) -> str:
    """Return the name of the dtype for a checkpoint's on a GPU."""
    is_wide = checkpoint.removeprefix("torch.") == "bfloat16"
    if not is_wide or torch.cuda.get_device_capability(device) >= _FIRST_WITH_BFLOAT16:
        return checkpoint
    _warn_of_float16(torch.cuda.get_device_name(device))
    return "float16"


@functools.cache
def _warn_of_float16(gpu: str) -> None:
    """Warn once: this may overflow."""
    logger.warning(
        "the checkpoint's bfloat16 becomes float16, since %s computes in the latter only. Numbers "
        "over 65,504 become infinite, and requests that need them fail; --dtype float32 has them",
        gpu,
    )


def _has_fast_bfloat16() -> bool:
    """Return whether bfloat16 weights are faster than float32 ones here.

    They are if the processor has bfloat16 product instructions, or if native kernels widen the
    weights as they read them, which halves the bytes read.
    """
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return True
    from kernels.cpu.linear import is_available  # may compile them, so import only on use

    return is_available()


def _physical_cores() -> int:
    """Count the distinct cores among the CPUs this process may use."""
    try:
        cpus = os.sched_getaffinity(0)
        topology = "/sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
        return len({Path(topology.format(cpu)).read_text() for cpu in cpus})
    except (AttributeError, OSError):  # not Linux, or no topology
        return os.cpu_count() or 1
