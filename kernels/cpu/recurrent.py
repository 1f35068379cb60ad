"""Recurrent layers, by ``native/recurrent.cpp``, ``short_conv.cpp`` and ``gates.cpp``.

For the contract see ``kernels.reference.recurrent``.
"""

from __future__ import annotations

import torch

from kernels.activations import OutputGateKind
from kernels.cpu.bindings import DTYPE_CODES, GATE_CODES, function, pointer
from kernels.inputs import StepRows
from kernels.recurrent import GatedDeltaShape, ScanShape

_PLAIN, _SILU, _GATED = range(3)  # ConvKind of native/short_conv.cpp


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
    activates: bool,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent``."""
    return _conv(_SILU if activates else _PLAIN, x, weight, bias, state, rows)


def gated_conv(
    fused: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent``; the convolution's input is rounded to the state's
    dtype, and the result once, after its gate."""
    return _conv(_GATED, fused, weight, bias, state, rows)


def gated_delta(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: GatedDeltaShape,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent``."""
    mixed, gates = mixed.contiguous(), _with_contiguous_rows(gates)
    y = mixed.new_empty((mixed.shape[0], shape.value_heads, shape.value_dim))
    function("quire_gated_delta")(
        DTYPE_CODES[mixed.dtype],
        mixed.data_ptr(),
        gates.data_ptr(),
        gates.stride(0),
        log_a.data_ptr(),
        dt_bias.data_ptr(),
        state.data_ptr(),
        *_pointers(rows),
        *shape,
        y.data_ptr(),
    )
    return y


def selective_scan(
    mixed: torch.Tensor,
    time_steps: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: ScanShape,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent``."""
    mixed, time_steps = mixed.contiguous(), _with_contiguous_rows(time_steps)
    y = mixed.new_empty((mixed.shape[0], shape.heads, shape.head_dim))
    function("quire_selective_scan")(
        DTYPE_CODES[mixed.dtype],
        mixed.data_ptr(),
        time_steps.data_ptr(),
        time_steps.stride(0),
        log_a.data_ptr(),
        dt_bias.data_ptr(),
        skip.data_ptr(),
        state.data_ptr(),
        *_pointers(rows),
        *shape[:-1],
        *shape.time_step_limit,
        y.data_ptr(),
    )
    return y


def channel_scan(
    x: torch.Tensor,
    time_steps: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
) -> torch.Tensor:
    """See ``kernels.reference.recurrent``."""
    x, time_steps = x.contiguous(), _with_contiguous_rows(time_steps)
    write, read = _with_contiguous_rows(write), _with_contiguous_rows(read)
    y = torch.empty_like(x)
    function("quire_channel_scan")(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        time_steps.data_ptr(),
        time_steps.stride(0),
        write.data_ptr(),
        write.stride(0),
        read.data_ptr(),
        read.stride(0),
        rates.data_ptr(),
        skip.data_ptr(),
        state.data_ptr(),
        *_pointers(rows),
        *rates.shape,
        y.data_ptr(),
    )
    return y


def gated_rms_norm(
    x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor, eps: float, gates_first: bool
) -> torch.Tensor:
    """See ``kernels.reference.recurrent``."""
    x, gate = x.contiguous(), _with_contiguous_rows(gate)
    num_rows, heads, dim = x.shape
    y = x.new_empty((num_rows, heads * dim))
    function("quire_gated_rms_norm")(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        weight.data_ptr(),
        weight.numel() // dim,
        num_rows,
        heads,
        dim,
        eps,
        gates_first,
        y.data_ptr(),
    )
    return y


def apply_gate(x: torch.Tensor, gate: torch.Tensor, kind: OutputGateKind) -> torch.Tensor:
    """See ``kernels.reference.recurrent``."""
    x, gate = x.contiguous(), _with_contiguous_rows(gate)
    y = torch.empty_like(x)
    function("quire_apply_gate")(
        DTYPE_CODES[x.dtype],
        x.data_ptr(),
        gate.data_ptr(),
        gate.stride(0),
        GATE_CODES[kind],
        x.shape[0],
        x.shape[1],
        gate.shape[1],
        y.data_ptr(),
    )
    return y


def _conv(
    kind: int,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
) -> torch.Tensor:
    x = _with_contiguous_rows(x)
    width, channels = weight.shape
    y = x.new_empty((x.shape[0], channels))
    function("quire_short_conv")(
        DTYPE_CODES[x.dtype],
        kind,
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        pointer(bias),
        state.data_ptr(),
        *_pointers(rows),
        channels,
        width,
        y.data_ptr(),
    )
    return y


def _with_contiguous_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with contiguous rows; strided rows are read in place."""
    return x if x.stride(1) == 1 else x.contiguous()


def _pointers(rows: StepRows) -> tuple[int, int, int, int]:
    """Return the number of rows, and the addresses of the fields that are read."""
    slots, query_start, starts = rows.slots, rows.query_start, rows.starts
    return slots.numel(), slots.data_ptr(), query_start.data_ptr(), starts.data_ptr()
