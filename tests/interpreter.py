"""Runs tests that need Triton's interpreter, which must be chosen before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"

unless_interpreted = pytest.mark.skipif(IS_INTERPRETED, reason="this process runs them itself")


def run_interpreted(folder: str, which: str) -> None:
    """Run the tests under ``folder`` in a separate process, and fail as they do.

    Args:
        folder: relative to the project's root.
        which: a marker expression.
    """
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-x", "-m", which]
    done = subprocess.run(
        [*command, folder],
        cwd=ROOT,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def quicken_interpreter() -> None:
    """Save the interpreter most of its time, which goes into types, and leave what it computes,
    except that numbers are rounded to bfloat16 as by a GPU.

    A program is a few thousand operations on small arrays, each of which makes its type anew.
    """
    if not IS_INTERPRETED:
        return
    interpreter = pytest.importorskip("triton.runtime.interpreter")
    _patch_device_functions_once(interpreter)
    builder = interpreter.interpreter_builder
    # A check whose result is told only with ``debug``, which the interpreter's options leave out.
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)
    _make_types_once(interpreter)
    _convert_bfloat16_at_once(interpreter)


def _patch_device_functions_once(interpreter: Any) -> None:
    """Skip the search for functions to patch where it has been made.

    The interpreter patches its own functions into ``triton.language`` when a kernel starts, and at
    each call of a device function looks for more to patch. It finds something only at the first
    call of a function, in the module through which that function sees the language, and the patch
    stays.
    """
    run = interpreter.InterpretedFunction.__call__
    ready: set[Any] = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if function in ready:
            return function.rewrite()(*args, **kwargs)
        ready.add(function)
        return run(function, *args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call


def _make_types_once(interpreter: Any) -> None:
    """Let types and tensors of one shape share what follows from it, which nobody changes."""
    core, find_stored = interpreter.tl.core, interpreter._get_np_dtype
    stored: dict[str, np.dtype] = {}
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    types: dict[tuple[str, tuple[Any, ...]], dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def stored_as(dtype: Any) -> np.dtype:
        if (known := stored.get(dtype.scalar.name)) is None:
            known = stored[dtype.scalar.name] = find_stored(dtype)
        return known

    def block_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, tuple(shape)
        if (known := types.get(key)) is None:
            make_type(self, element_ty, shape)
            types[key] = {n: value for n, value in vars(self).items() if n != "element_ty"}
        else:
            self.__dict__.update(known, element_ty=element_ty)

    def tensor(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        if (known := shapes.get(shape)) is None:
            make_tensor(self, handle, type)
            shapes[shape] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    interpreter._get_np_dtype = stored_as
    core.block_type.__init__ = block_type
    core.tensor.__init__ = tensor


def _convert_bfloat16_at_once(interpreter: Any) -> None:
    """Convert between float32 and bfloat16 by their bits, to the nearest, and if two are, the even.

    The interpreter takes each number apart, for any two types, and cuts off what bfloat16 lacks.
    """
    tl, convert_any = interpreter.tl, interpreter._convert_float

    def convert(numbers: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if source == tl.bfloat16 and target == tl.float32:
            return numbers.astype(np.uint32) << np.uint32(16)
        if source == tl.float32 and target == tl.bfloat16:
            bits = numbers.view(np.uint32)
            nearest = bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
            is_nan = np.isnan(numbers)
            return (np.where(is_nan, bits | 0x400000, nearest) >> np.uint32(16)).astype(np.uint16)
        return convert_any(numbers, source, target, rounding)

    interpreter._convert_float = convert
