"""How the kernels are started; the only place that starts one.

On Hopper and later, kernels of one stream overlap at their ends (CUDA C++ Programming Guide,
"Programmatic Dependent Launch and Synchronization"):

    kernel A   ▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓
    kernel B         ░░░░░░░░░▓▓▓▓▓▓▓▓▓▓     ░ in its place, reading what no kernel writes
    kernel C                  ░░░░░░░░░░▓▓▓▓▓▓▓▓

The programs of one take their places as soon as all of the one before have theirs, and not when
that has ended and its memory is flushed: a decode step is hundreds of kernels of a few
microseconds. So every kernel calls ``await_turn``, in all its programs, before it touches what
another may write. It has then ended only when all before it have, and to wait for the last is to
wait for all of them. Kernels of libraries are started as ever.
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

# Triton decides this once, when a kernel is defined; it cannot change afterwards.
INTERPRETED: bool = knobs.runtime.interpret
_COMPILED: tl.constexpr = tl.constexpr(not INTERPRETED)
_FIRST_TO_OVERLAP = (9, 0)

_INTERPRETED_PROGRAMS = 2
_LEAST_DOT = 16


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
    """Start ``kernel`` on a grid; an empty grid starts nothing.

    Every launch goes through here, so that a test can compile for a device that is not there
    (``tests/kernels/triton_kernels/aot``) what would have been launched.
    """
    if not all(grid):
        return
    if _COMPILED.value and _overlaps(torch.cuda.current_device()):
        meta["launch_pdl"] = True
    kernel[grid](*args, **meta)


@triton.jit
def await_turn():
    """Let the programs of the next kernel take their places, and wait for the kernels before."""
    if _COMPILED and cuda_capability_geq(9, 0):
        gdc_launch_dependents()
        gdc_wait()


@functools.cache
def _overlaps(device: int) -> bool:
    """Whether kernels of a CUDA device may take their places early."""
    return torch.cuda.get_device_capability(device) >= _FIRST_TO_OVERLAP


def refuse_device(device: torch.device) -> str | None:
    """Why kernels cannot run on tensors of this device, or None when they can."""
    if INTERPRETED:
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 runs on the CPU only"
    if device.type != "cuda":
        return "no CUDA device (TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "the GPU is older than compute capability 8.0"
    return None


def persistent_programs(device: torch.device, programs_a_processor: int) -> int:
    """Size of a grid whose programs take work until none is left.

    ``programs_a_processor``: no more than fit a multiprocessor together. One that has to wait for
    its place would begin its share when the others have done theirs.
    """
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return programs_a_processor * torch.cuda.get_device_properties(device).multi_processor_count


def power_of_2(number: int) -> int:
    """The smallest power of two that is not less."""
    return 1 << max(number - 1, 0).bit_length()


def dot_width(number: int) -> int:
    """The same of what a matrix product has along one side, which is at least 16 for its units.

    The interpreter multiplies less, a GPU's compiler refuses it.
    """
    return max(_LEAST_DOT, power_of_2(number))
