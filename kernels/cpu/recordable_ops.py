"""Torch's own operations that a recorded program supports: copies, sums, products and bounds.

Their results have the same bits in any implementation: each value is computed in float32, or is
exact, and rounded once. Other operations are not supported.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from kernels.cpu.bindings import COUNT, DTYPE_CODES, RecordCall, pointer

_aten = torch.ops.aten
_ADD, _MULTIPLY, _MINIMUM, _MAXIMUM = range(4)  # as in native/arithmetic.cpp
_MAX_DIMS = 3


class OpRecorder(NamedTuple):
    """Where operations are recorded."""

    empty: Callable[[Sequence[int], torch.dtype], torch.Tensor]  # allocates a tensor of the program
    record: RecordCall


class _Operands(ctypes.Structure):
    """``Operands`` of native/arithmetic.cpp."""

    _fields_ = (
        ("sizes", COUNT * _MAX_DIMS),
        ("x", COUNT * 2),
        ("y", COUNT * 3),
        ("out", COUNT * 2),
    )


def record_op(
    scribe: OpRecorder, operation: Any, arguments: Sequence[Any], options: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the tensor that will have the operation's result once the program has run; None if
    the operation is not supported."""
    holds = _RECORDABLE_OPS.get(operation)
    return None if holds is None else holds(scribe, *arguments, **options)


def _embedding(
    scribe: OpRecorder, table: torch.Tensor, ids: torch.Tensor, *_: Any, **__: Any
) -> torch.Tensor | None:
    if ids.dtype is not torch.int64 or not (ids.is_contiguous() and table.is_contiguous()):
        return None
    found = scribe.empty((*ids.shape, table.shape[1]), table.dtype)
    row_bytes = table[0].nbytes
    operands = table.data_ptr(), ids.data_ptr(), ids.numel(), row_bytes, found.data_ptr()
    scribe.record("quire_rows", operands)
    return found


def _copy(
    scribe: OpRecorder, target: torch.Tensor, source: torch.Tensor, *_: Any
) -> torch.Tensor | None:
    alike = target.shape == source.shape and target.dtype == source.dtype
    if not (alike and _has_contiguous_rows(target) and _has_contiguous_rows(source)):
        return None
    return _record_copy(scribe, source, target)


def _clone(scribe: OpRecorder, x: torch.Tensor, **_: Any) -> torch.Tensor | None:
    return (
        _record_copy(scribe, x, scribe.empty(x.shape, x.dtype)) if _has_contiguous_rows(x) else None
    )


def _pad(
    scribe: OpRecorder, x: torch.Tensor, pad: Sequence[int], value: float = 0
) -> torch.Tensor | None:
    """Pad each row with zeros."""
    if len(pad) != 2 or pad[0] or pad[1] < 0 or value or not _has_contiguous_rows(x):
        return None
    width = x.shape[-1]
    padded = scribe.empty((*x.shape[:-1], width + pad[1]), x.dtype)
    _record_copy(scribe, x, padded[..., :width], num_zeros=pad[1])
    return padded


def _cat(scribe: OpRecorder, parts: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor | None:
    """Concatenate matrices by columns."""
    first = parts[0]
    alike = all(part.ndim == 2 and part.dtype == first.dtype for part in parts)
    if dim not in (1, -1) or not alike or not all(map(_has_contiguous_rows, parts)):
        return None
    widths = [part.shape[1] for part in parts]
    joined = scribe.empty((len(first), sum(widths)), first.dtype)
    for part, place in zip(parts, joined.split(widths, dim=1), strict=True):
        _record_copy(scribe, part, place)
    return joined


def _has_contiguous_rows(x: torch.Tensor) -> bool:
    """Return whether everything after the first dimension is contiguous."""
    return x.ndim > 0 and len(x) > 0 and x[0].is_contiguous()


def _record_copy(
    scribe: OpRecorder, source: torch.Tensor, target: torch.Tensor, num_zeros: int = 0
) -> torch.Tensor:
    """Copy rows to ``target``, whose rows have the same size, and write ``num_zeros`` zeros
    after each."""
    size = source.itemsize
    read = source.data_ptr(), source.stride(0) * size, len(source), source[0].nbytes
    written = target.data_ptr(), target.stride(0) * size, num_zeros * size
    scribe.record("quire_copy_rows", (*read, *written))
    return target


def _clamp_min(
    scribe: OpRecorder, x: torch.Tensor, least: float | None = None, most: float | None = None
) -> torch.Tensor | None:
    if x.dtype is not torch.int64 or least is None or most is not None or not x.is_contiguous():
        return None
    bounded = scribe.empty(x.shape, x.dtype)
    scribe.record("quire_at_least", (x.data_ptr(), int(least), x.numel(), bounded.data_ptr()))
    return bounded


def _clamp_inplace(
    scribe: OpRecorder, x: torch.Tensor, least: float | None = None, most: float | None = None
) -> torch.Tensor | None:
    if not x.is_floating_point():
        return None
    if least is not None and _record_binary(_MAXIMUM, scribe, x, least, x) is None:
        return None
    return x if most is None else _record_binary(_MINIMUM, scribe, x, most, x)


def _add(
    scribe: OpRecorder, x: torch.Tensor, y: torch.Tensor | float, alpha: float = 1
) -> torch.Tensor | None:
    return _record_out_of_place(_ADD, scribe, x, y) if _is_tensor_add(y, alpha) else None


def _add_inplace(
    scribe: OpRecorder, x: torch.Tensor, y: torch.Tensor | float, alpha: float = 1
) -> torch.Tensor | None:
    return _record_binary(_ADD, scribe, x, y, x) if _is_tensor_add(y, alpha) else None


def _is_tensor_add(y: torch.Tensor | float, alpha: float) -> bool:
    """Return whether ``y`` is a tensor: torch rounds a number before adding, but not before
    multiplying."""
    return isinstance(y, torch.Tensor) and alpha == 1


def _multiply(scribe: OpRecorder, x: torch.Tensor, y: torch.Tensor | float) -> torch.Tensor | None:
    return _record_out_of_place(_MULTIPLY, scribe, x, y)


def _multiply_inplace(
    scribe: OpRecorder, x: torch.Tensor, y: torch.Tensor | float
) -> torch.Tensor | None:
    return _record_binary(_MULTIPLY, scribe, x, y, x)


def _record_out_of_place(
    kind: int, scribe: OpRecorder, x: torch.Tensor, y: torch.Tensor | float
) -> torch.Tensor | None:
    if torch.result_type(x, y) != x.dtype:
        return None
    return _record_binary(kind, scribe, x, y, scribe.empty(x.shape, x.dtype))


def _record_binary(
    kind: int, scribe: OpRecorder, x: torch.Tensor, y: torch.Tensor | float, out: torch.Tensor
) -> torch.Tensor | None:
    """Combine ``x`` and ``y``, a number or broadcastable to the shape of ``x``, into ``out``."""
    other = y if isinstance(y, torch.Tensor) else None
    dtype = x.dtype if other is None else other.dtype
    if x.dtype not in DTYPE_CODES or dtype not in DTYPE_CODES or not 0 < x.ndim <= _MAX_DIMS:
        return None
    if other is not None:
        if torch.broadcast_shapes(x.shape, other.shape) != x.shape:
            return None
        other = other.expand(x.shape)
    of_x, of_y, of_out = (_strides(x if of is None else of) for of in (x, other, out))
    if of_x[2] != 1 or of_out[2] != 1 or of_y[2] not in (0, 1):
        return None
    sizes = (1,) * (_MAX_DIMS - x.ndim) + tuple(x.shape)
    operands = _Operands(sizes, of_x[:2], of_y, of_out[:2])
    scribe.record(
        "quire_arithmetic",
        (
            *(kind, ctypes.byref(operands), DTYPE_CODES[x.dtype], x.data_ptr()),
            *(DTYPE_CODES[dtype], pointer(other)),
            *(0.0 if isinstance(y, torch.Tensor) else float(y), out.data_ptr()),
        ),
    )
    return out


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Return three strides; a dimension of size 1 may have any."""
    own = [1 if size == 1 else step for size, step in zip(x.shape, x.stride(), strict=True)]
    return (1,) * (_MAX_DIMS - x.ndim) + tuple(own)


_RECORDABLE_OPS: dict[Any, Callable[..., torch.Tensor | None]] = {
    _aten.embedding.default: _embedding,
    _aten.copy_.default: _copy,
    _aten.clone.default: _clone,
    _aten.constant_pad_nd.default: _pad,
    _aten.cat.default: _cat,
    _aten.clamp.default: _clamp_min,
    _aten.clamp_.default: _clamp_inplace,
    _aten.add.Tensor: _add,
    _aten.add_.Tensor: _add_inplace,
    _aten.mul.Tensor: _multiply,
    _aten.mul_.Tensor: _multiply_inplace,
}
