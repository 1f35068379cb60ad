"""Launches like earlier ones, without Triton's own search for the compiled kernel.

Before each launch Triton binds the arguments by name, describes each of them, and joins the
descriptions to a text by which it finds what it has compiled: on a step that is not captured, this
takes the host longer than everything else. Here a tuple is looked up instead, of what Triton
specialises a kernel on. It tells apart at least what Triton does, so a launch that is not known,
or that is of a form not described here, goes Triton's way.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from triton.runtime.errors import OutOfResources

logger = logging.getLogger(__name__)

_DEFAULT_STAGES = 3  # Triton's
_ALIGNMENT = 16  # bytes of a pointer; integers that are a multiple of it are specialised on
_INT32_MIN, _INT32_END, _INT64_END = -(2**31), 2**31, 2**63

Grid = tuple[int, ...]
Constants = tuple[Any, ...]


class _Known(NamedTuple):
    """A compiled kernel, and the values of the parameters behind the positional arguments."""

    compiled: Any
    constants: Constants


class KnownLaunches:
    """The launches so far. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Known] = {}
        # By kernel, number of positional arguments, and names of the others: the parameters behind
        # the positional ones, or None if a launch has to go Triton's way.
        self._forms: dict[Hashable, tuple[str, ...] | None] = {}

    def launch(
        self, kernel: Any, device: int, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any]
    ) -> None:
        """Launch ``kernel``, a ``triton.jit`` function, as ``kernel[grid](*args, **meta)`` does.

        Args:
            kernel: what to launch.
            device: the current CUDA device.
            grid: one to three numbers of programs, none of them 0.
            args: the first arguments.
            meta: arguments that are compiled in, and options such as ``num_warps``.
        """
        described = describe(args)
        if described is None:
            launch_fitting(kernel, grid, args, meta)
            return
        names, values = tuple(meta), tuple(meta.values())
        # Of equal values of different types, such as 1 and True, Triton compiles both.
        # By a kernel's function: the hash of the kernel is that of its source.
        key = (kernel.fn, device, names, values, *map(type, values), *described)
        known = self._known.get(key)
        if known is not None:
            known.compiled[(*grid, 1, 1)[:3]](*args, *known.constants)
            return
        compiled = launch_fitting(kernel, grid, args, meta)
        behind = self._parameters_behind(kernel, len(args), names)
        if behind is not None and compiled is not None:
            self._known[key] = _Known(compiled, tuple(meta[name] for name in behind))

    def _parameters_behind(
        self, kernel: Any, num_args: int, names: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        """Return the parameters behind the positional ones; None if this is no usual launch.

        Usually the positional ones are values, and the others, all of them named, are compiled in.
        """
        form = kernel.fn, num_args, names
        if form not in self._forms:
            values, behind = kernel.params[:num_args], kernel.params[num_args:]
            is_usual = (
                not kernel.pre_run_hooks
                and not any(parameter.is_constexpr for parameter in values)
                and all(each.is_constexpr and each.name in names for each in behind)
            )
            self._forms[form] = tuple(each.name for each in behind) if is_usual else None
        return self._forms[form]


def launch_fitting(kernel: Any, grid: Grid, args: tuple[Any, ...], meta: dict[str, Any]) -> Any:
    """Launch with as many stages as a GPU's shared memory holds: results do not depend on them.

    Returns:
        What was compiled.

    Raises:
        OutOfResources: it does not fit with one stage, either.
    """
    stages = meta.get("num_stages", _DEFAULT_STAGES)
    while True:
        try:
            return kernel[grid](*args, **meta)
        except OutOfResources as error:
            if error.name != "shared memory" or stages == 1:
                raise
            fewer = fitting_stages(stages, error.required, error.limit)
            logger.debug("%s: %d stages instead of %d, %s", kernel.__name__, fewer, stages, error)
            stages = fewer
            meta = {**meta, "num_stages": stages}


def fitting_stages(stages: int, required: int, limit: int) -> int:
    """Return how many stages may fit in ``limit`` bytes where too many take ``required``."""
    return max(1, min(stages - 1, stages * limit // required))


def describe(args: tuple[Any, ...]) -> list[Hashable] | None:
    """Return what Triton may specialise a kernel on; None if an argument is of another kind."""
    found: list[Hashable] = []
    for value in args:
        if value is None:
            found.append(None)
        elif isinstance(value, torch.Tensor):
            found.append(value.dtype)
            found.append(value.data_ptr() % _ALIGNMENT == 0)
        elif type(value) is int:
            if _INT32_MIN <= value < _INT32_END:
                width = 32
            else:
                width = 64 if value < _INT64_END else -64
            found.append((width, value == 1, value % _ALIGNMENT == 0))
        elif type(value) is float:
            found.append(float)
        else:
            return None
    return found
