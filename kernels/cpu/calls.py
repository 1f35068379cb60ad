"""The functions of the native library, declared, and what their arguments are made of."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from typing import Any

import torch

from kernels.cpu.native import build

POINTER, COUNT, CODE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in native/simd.h

_SIGNATURES: dict[str, tuple[type, ...]] = {
    "quire_attention": (POINTER, REAL, REAL, COUNT, *[POINTER] * 5),
    "quire_rms_norm": (CODE, POINTER, POINTER, COUNT, COUNT, COUNT, REAL, POINTER),
    "quire_add_rms_norm": (CODE, POINTER, POINTER, POINTER, COUNT, COUNT, REAL, POINTER),
    "quire_silu_mul": (CODE, POINTER, COUNT, COUNT, POINTER),
    "quire_norm_rope_store": (
        *(CODE, POINTER, POINTER, REAL),
        *[POINTER] * 3,
        *[COUNT] * 5,
        *[POINTER] * 3,
    ),
    "quire_add_adapters": (
        *(CODE, POINTER, POINTER, POINTER),
        *[COUNT] * 3,
        *(POINTER, POINTER, POINTER, COUNT, POINTER),
    ),
    "quire_copy_blocks": (POINTER, POINTER, POINTER, COUNT, COUNT),
    "quire_build_inputs": (COUNT, *[POINTER] * 6, COUNT, COUNT, *[POINTER] * 4),
    "quire_feed_back": (POINTER, POINTER, POINTER, COUNT, POINTER, POINTER, COUNT),
    "quire_sample": (POINTER, POINTER, POINTER, POINTER, COUNT, POINTER, POINTER),
}


@functools.cache
def function(name: str) -> Callable[..., None]:
    """A function of the library; tensors go in as ``data_ptr()``, all of them contiguous.

    Raises:
        BuildError: there is no library; ``kernels.select`` finds that out before.
    """
    found: Any = getattr(build.open_library(), name)
    found.argtypes, found.restype = _SIGNATURES[name], None
    return found


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Where a tensor's data begin; None is a null pointer."""
    return None if tensor is None else tensor.data_ptr()
