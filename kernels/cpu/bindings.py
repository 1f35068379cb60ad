"""Declarations of the native library's functions, and their argument types.

While a program is recorded (``kernels/cpu/program.py``), calls are noted instead of made.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import torch

from kernels.activations import ActivationKind, OutputGateKind
from kernels.cpu.native import build
from kernels.moe import GatedActivationKind

POINTER, COUNT, CODE, REAL = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
FLAG = ctypes.c_bool

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1}  # as in native/simd.h
# As in native/gating.h.
GATING_CODES: dict[GatedActivationKind, int] = {
    "silu": 0,
    "gelu": 1,
    "gelu_tanh": 2,
    "clamped_swiglu": 3,
    "clamped_silu": 4,
}
# As in native/activations.cpp.
ACTIVATION_CODES: dict[ActivationKind, int] = {
    **{"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "relu2": 4},
}
# As in native/gates.cpp.
GATE_CODES: dict[OutputGateKind, int] = {"sigmoid": 0, "silu": 1, "softplus": 2}
CODE_KINDS = {torch.int8: 1, torch.float8_e4m3fn: 2}  # as in native/cache_codes.h

_PRODUCT = (POINTER, COUNT, COUNT)  # activations, rows, inputs
# Bias, y, outputs, whether y is float32, gating or null, whether AMX may be used.
_RESULT = (POINTER, POINTER, COUNT, FLAG, POINTER, FLAG)
_ROWS = (COUNT, *[POINTER] * 3)  # of a step; see kernels/inputs.py
# Bias, outputs, scale and cap of scores, whether AMX may be used, token ids, finite.
_LIKELIEST = (POINTER, COUNT, REAL, REAL, FLAG, POINTER, POINTER)
_NORM_ROPE_STORE = (
    *(CODE, POINTER, POINTER, REAL),
    *[POINTER] * 3,
    *[COUNT] * 6,
    *[POINTER] * 3,
)
# Batch, scale, cap, window, chunk, sinks, ends, slopes, block layout, queries, keys, values and
# results.
_ATTENTION = (POINTER, REAL, REAL, COUNT, COUNT, *[POINTER] * 3, COUNT, *[POINTER] * 4)

SIGNATURES: dict[str, tuple[type, ...]] = {
    "quire_attention": _ATTENTION,
    "quire_attention_codes": (*_ATTENTION, CODE, POINTER, POINTER),
    "quire_rms_norm": (CODE, POINTER, COUNT, POINTER, COUNT, COUNT, COUNT, REAL, POINTER),
    "quire_add_rms_norm": (CODE, POINTER, POINTER, POINTER, COUNT, COUNT, REAL, POINTER),
    "quire_layer_norm": (CODE, POINTER, POINTER, POINTER, COUNT, COUNT, REAL, POINTER),
    "quire_activate": (CODE, CODE, POINTER, COUNT, COUNT, COUNT, POINTER),
    "quire_xielu": (CODE, POINTER, POINTER, COUNT, COUNT, COUNT, POINTER),
    "quire_softcap": (POINTER, COUNT, REAL),
    "quire_gate_mul": (CODE, CODE, REAL, REAL, POINTER, COUNT, COUNT, POINTER),
    "quire_rope_tables": (POINTER, POINTER, REAL, COUNT, COUNT, POINTER, POINTER),
    "quire_temperatures": (POINTER, COUNT, COUNT, REAL, COUNT, POINTER),
    "quire_norm_rope": (
        *(CODE, POINTER, POINTER, COUNT, REAL),
        *(POINTER, POINTER, COUNT, COUNT, COUNT, POINTER),
    ),
    "quire_norm_rope_store": _NORM_ROPE_STORE,
    "quire_norm_rope_store_codes": (*_NORM_ROPE_STORE, CODE, POINTER, POINTER),
    "quire_route": (
        *(CODE, CODE, POINTER, POINTER, COUNT, COUNT),
        *(POINTER, POINTER, POINTER, COUNT, POINTER, POINTER),
    ),
    "quire_experts": (CODE, *[POINTER] * 10, COUNT),
    "quire_panel_experts": (*[POINTER] * 8, COUNT),
    "quire_panel_heads": (POINTER, POINTER, *[COUNT] * 5, POINTER),
    "quire_latent_rope_store": (
        *(CODE, POINTER, POINTER, COUNT, POINTER, REAL, POINTER, POINTER, POINTER),
        *[COUNT] * 4,
        POINTER,
    ),
    "quire_index_rope_store": (CODE, *[POINTER] * 5, *[COUNT] * 4, POINTER),
    "quire_index_weights": (CODE, POINTER, COUNT, COUNT, POINTER, COUNT, POINTER),
    "quire_places_behind": (POINTER, COUNT, COUNT, COUNT, POINTER),
    "quire_selected_lengths": (POINTER, COUNT, COUNT, POINTER),
    "quire_select_slots": (
        *(CODE, POINTER, POINTER, COUNT, COUNT),
        *(*[POINTER] * 4, *[COUNT] * 4, POINTER),
    ),
    "quire_add_adapters": (
        *(CODE, POINTER, POINTER, POINTER),
        *[COUNT] * 3,
        *(POINTER, POINTER, POINTER, COUNT, POINTER),
    ),
    "quire_short_conv": (
        *(CODE, CODE, POINTER, COUNT, POINTER, POINTER, POINTER),
        *(*_ROWS, COUNT, COUNT, POINTER),
    ),
    "quire_gated_delta": (
        *(CODE, POINTER, POINTER, COUNT, POINTER, POINTER, POINTER),
        *(*_ROWS, *[COUNT] * 4, FLAG, FLAG, REAL, POINTER),
    ),
    "quire_channel_scan": (
        *(CODE, POINTER, *[POINTER, COUNT] * 3, *[POINTER] * 3),
        *(*_ROWS, COUNT, COUNT, POINTER),
    ),
    "quire_selective_scan": (
        *(CODE, POINTER, POINTER, COUNT, *[POINTER] * 4),
        *(*_ROWS, *[COUNT] * 4, REAL, REAL, POINTER),
    ),
    "quire_gated_rms_norm": (
        *(CODE, POINTER, POINTER, COUNT, POINTER),
        *(*[COUNT] * 4, REAL, FLAG, POINTER),
    ),
    "quire_apply_gate": (CODE, POINTER, POINTER, COUNT, CODE, COUNT, COUNT, COUNT, POINTER),
    "quire_copy_blocks": (POINTER, POINTER, POINTER, COUNT, COUNT, COUNT),
    "quire_arithmetic": (CODE, POINTER, CODE, POINTER, CODE, POINTER, REAL, POINTER),
    "quire_at_least": (POINTER, COUNT, COUNT, POINTER),
    "quire_copy_rows": (POINTER, COUNT, COUNT, COUNT, POINTER, COUNT, COUNT),
    "quire_rows": (POINTER, POINTER, COUNT, COUNT, POINTER),
    "quire_build_inputs": (COUNT, *[POINTER] * 6, COUNT, COUNT, *[POINTER] * 5),
    "quire_feed_back": (POINTER, POINTER, POINTER, COUNT, POINTER, POINTER, COUNT),
    "quire_accept_drafts": (*[POINTER] * 3, COUNT, *[POINTER] * 3),
    "quire_pass_on": (POINTER, COUNT, POINTER, POINTER, COUNT, POINTER, COUNT, POINTER, POINTER),
    "quire_sample": (POINTER, POINTER, POINTER, POINTER, COUNT, POINTER, POINTER),
    "quire_candidates": (*[POINTER] * 5, COUNT, COUNT, POINTER),
    "quire_dense": (*_PRODUCT, POINTER, *_RESULT),
    "quire_dense_likeliest": (*_PRODUCT, POINTER, *_LIKELIEST),
    "quire_screened_likeliest": (
        *(*_PRODUCT, *[POINTER] * 7, COUNT),
        *(REAL, REAL, FLAG, POINTER, POINTER),
    ),
    "quire_dense_rows": (CODE, POINTER, POINTER, COUNT, COUNT, COUNT, POINTER),
    "quire_int8": (*_PRODUCT, POINTER, POINTER, POINTER, *_RESULT),
    "quire_int8_likeliest": (*_PRODUCT, POINTER, POINTER, POINTER, *_LIKELIEST),
    "quire_int8_rows": (CODE, POINTER, POINTER, POINTER, COUNT, COUNT, COUNT, POINTER),
    "quire_int4": (*_PRODUCT, *[POINTER] * 4, *_RESULT),
    "quire_grouped": (*_PRODUCT, *[POINTER] * 5, COUNT, COUNT, REAL, FLAG, *_RESULT),
    "quire_grouped_rows": (
        *(CODE, *[POINTER] * 5, COUNT, REAL, FLAG, POINTER),
        *(COUNT, COUNT, COUNT, POINTER),
    ),
}

RecordCall = Callable[[str, tuple[Any, ...]], None]  # receives a function's name and its arguments

# Notes calls instead of making them while a program is recorded.
call_recorder: ContextVar[RecordCall | None] = ContextVar("recording", default=None)


def function(name: str) -> Callable[..., None]:
    """Return a function of the library; tensors are passed as ``data_ptr()``, all of them
    contiguous.

    Raises:
        BuildError: there is no library; ``kernels.select`` checks this before.
    """
    note = call_recorder.get()
    if note is None:
        return _bind(name)
    return lambda *arguments: note(name, arguments)


@functools.cache
def _bind(name: str) -> Callable[..., None]:
    found: Any = getattr(build.open_library(), name)
    found.argtypes, found.restype = SIGNATURES[name], None
    return found


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return the address of a tensor's data; a null pointer for None."""
    return None if tensor is None else tensor.data_ptr()
