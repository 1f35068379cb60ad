"""Kernel launches on the pretended device: what is rejected, and what would be compiled."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from kernels.triton import backend, check_products, matmul, operations, quantised
from kernels.triton import launch as launcher
from tests.pretended_gpu.queues import Violation
from tests.pretended_gpu.tensor import DeviceTensor, PretendedGpu

_MOST_PROGRAMS = (2**31 - 1, 2**16 - 1, 2**16 - 1)
# All modules that launch kernels, and those that try products. The latter are imported before the
# interpreter is hidden: otherwise they would try products of a GPU's size for most of a minute.
_LOADED = (backend, check_products, matmul, operations, quantised)
_ALIGNED = 16  # bytes for a pointer; integers that are a multiple of it are specialised


class Launches:
    """Stands in for ``kernels.triton.launch.launch``; the interpreter does the work.

    Args:
        gpu: the device on which kernels run.
    """

    def __init__(self, gpu: PretendedGpu) -> None:
        self._gpu = gpu
        self._launch = launcher.launch
        self.compiled: set[tuple[str, tuple[object, ...]]] = set()

    def modules(self) -> list[Any]:
        """The modules that launch kernels."""
        assert all(part.__name__ in sys.modules for part in _LOADED)
        modules = [module for name, module in sys.modules.items() if name.startswith("kernels.")]
        return [module for module in modules if getattr(module, "launch", None) is self._launch]

    def __call__(self, kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        """Queue a launch."""
        name = kernel.__name__
        for value in args:
            if isinstance(value, torch.Tensor) and not isinstance(value, DeviceTensor):
                raise Violation(f"{name} is given a tensor of the host")
        if any(not 0 <= count <= most for count, most in zip(grid, _MOST_PROGRAMS, strict=False)):
            raise Violation(f"{name}: no grid is as large as {grid}")
        if not all(grid):
            return
        self.compiled.add((name, _specialisation(kernel, args, meta)))
        inner = [value.inner if isinstance(value, DeviceTensor) else value for value in args]
        self._gpu.queues.do(lambda: self._launch(kernel, grid, *inner, **meta))

    def new(self, run: Callable[[], object]) -> set[tuple[str, tuple[object, ...]]]:
        """The specialisations that ``run`` compiles for the first time."""
        before = set(self.compiled)
        run()
        return self.compiled - before


def _specialisation(kernel: Any, args: Sequence[Any], meta: dict[str, Any]) -> tuple[object, ...]:
    """What Triton specialises a kernel on, besides its source."""
    unknown = set(kernel.kwargs["do_not_specialize"] or ())
    unaligned = set(kernel.kwargs["do_not_specialize_on_alignment"] or ())
    parts: list[object] = [*sorted(meta.items())]
    for name, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, DeviceTensor):
            is_aligned = value.inner.data_ptr() % _ALIGNED == 0
            parts.append((value.dtype, name in unaligned or name in unknown or is_aligned))
        elif isinstance(value, int) and not isinstance(value, bool):
            width = 32 if -(2**31) <= value < 2**31 else 64
            own = (value == 1, value % _ALIGNED == 0)
            parts.append((width, None if name in unknown else own))
        else:
            parts.append(type(value))
    return tuple(parts)
