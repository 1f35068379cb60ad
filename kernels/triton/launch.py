"""Launching kernels; this is the only place that does.

On Hopper and later, consecutive kernels of a stream overlap (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"):

    kernel A   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    kernel B         ░░░░░░░░░▓▓▓▓▓▓▓▓▓▓     ░ resident, reading only what no kernel writes
    kernel C                  ░░░░░░░░░░▓▓▓▓▓▓▓▓

A kernel's programs become resident as soon as all programs of the previous kernel are, without
waiting for its end and the flush of its memory: a decode step is hundreds of kernels of a few
microseconds. Every kernel therefore calls ``wait_for_prior_kernels``, in all its programs, before
it touches memory that another may write. A kernel then ends only after all kernels before it, so
waiting for the last one is waiting for all. Library kernels are launched as usual.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.language.target_info import cuda_capability_geq

from kernels.triton.known_launches import KnownLaunches

# Triton decides this once, when a kernel is defined.
INTERPRETED: bool = knobs.runtime.interpret
_COMPILED: tl.constexpr = tl.constexpr(not INTERPRETED)
_MIN_PDL_CAPABILITY = (9, 0)
_MIN_FLOAT8_CAPABILITY = (8, 9)
_TENSOR_MEMORY = 10  # major compute capability
_launches = KnownLaunches()

_INTERPRETED_PROGRAMS = 2
_MIN_DOT = 16
_HOPPER_SHARED_BYTES = 228 << 10
_DRIVERS_SHARED_BYTES = 1 << 10  # of each program (CUDA C++ Programming Guide, "Shared Memory")
_KEPT_SHARED_BYTES = 3 << 10  # by the driver, and for sums across warps


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Launch ``kernel`` on a grid; an empty grid launches nothing.

    Every launch goes through here, so that a test can compile what would have been launched for a
    device that is not present (``tests/kernels/triton_kernels/aot``).
    """
    if not all(grid):
        return
    if not _COMPILED.value:
        kernel[grid](*args, **meta)
        return
    device = torch.cuda.current_device()
    if _supports_pdl(device):
        meta["launch_pdl"] = True
    _launches.launch(kernel, device, grid, args, meta)


@triton.jit
def wait_for_prior_kernels():
    """Let the next kernel's programs become resident, and wait for the kernels before."""
    if _COMPILED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def prefetch(places):
    """Request memory into the L2 cache, where later writes by other kernels are seen as well.

    Unlike a read it may come before ``wait_for_prior_kernels``.
    """
    if _COMPILED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
            "=r,l",
            [places.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@functools.cache
def _supports_pdl(device: int) -> bool:
    """Return whether kernels of a CUDA device may become resident early."""
    return torch.cuda.get_device_capability(device) >= _MIN_PDL_CAPABILITY


def device_unsupported_reason(device: torch.device) -> str | None:
    """Return why kernels cannot run on tensors of this device, or None if they can."""
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 runs on the CPU only"
    if device.type != "cuda":
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def persistent_programs(device: torch.device, programs_per_sm: int) -> int:
    """Return the grid size for programs that take work until none is left.

    ``programs_per_sm``: at most what fits in a multiprocessor together. A program that has to
    wait for others to end would begin its share when theirs is done.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return programs_per_sm * torch.cuda.get_device_properties(device).multi_processor_count


def shared_memory_bytes(device: torch.device) -> int:
    """Return the shared memory of a multiprocessor: 100 KB on consumers' GPUs, 164 KB on an A100,
    228 KB on Hopper, which also stands for what is no GPU."""
    if device.type != "cuda":
        return _HOPPER_SHARED_BYTES
    return torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor


def fits(device: torch.device, num_bytes: int) -> bool:
    """Return whether one program may have so much shared memory."""
    return num_bytes <= shared_memory_bytes(device) - _DRIVERS_SHARED_BYTES


def stages_that_fit(device: torch.device, most: int, stage_bytes: int) -> int:
    """Return how many tiles in flight fit in the shared memory of one program, up to ``most``."""
    room = shared_memory_bytes(device) - _KEPT_SHARED_BYTES
    return max(1, min(most, room // stage_bytes))


def has_group_products(device: torch.device) -> bool:
    """Return whether groups of warps multiply while they do something else (wgmma), which Hopper
    alone does: so does what is no GPU."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def has_tensor_memory(device: torch.device) -> bool:
    """Return whether sums of products lie in memory of their own: 512 columns of a multiprocessor,
    on data centres' Blackwell."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == _TENSOR_MEMORY


def converts_float8(device: torch.device) -> bool:
    """Return whether there are instructions for float8, as for what is no GPU."""
    return (
        device.type != "cuda" or torch.cuda.get_device_capability(device) >= _MIN_FLOAT8_CAPABILITY
    )


def power_of_2(number: int) -> int:
    """Return the smallest power of two that is at least ``number``."""
    return 1 << max(number - 1, 0).bit_length()


def dot_width(number: int) -> int:
    """Return the same for one side of a matrix product, which matrix units require to be at least
    16.

    The interpreter accepts less; a GPU's compiler does not.
    """
    return max(_MIN_DOT, power_of_2(number))
