"""Cases of recurrent layers, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch

from kernels.bench.case import Case
from kernels.inputs import StepRows
from kernels.operations import Operations
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import operations as reference
from kernels.triton import invariant_operations, operations

_WIDTH = 4


def delta_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    queries: int,
    shape: GatedDeltaShape,
) -> Case:
    """The gated delta rule; each row's state read and written once."""
    tokens, heads = rows * queries, shape.value_heads
    mixed = torch.randn(tokens, shape.channels, dtype=dtype, device=device)
    decays = heads * shape.num_decays
    gates = torch.randn(tokens, heads + decays, dtype=dtype, device=device)
    log_a, dt_bias = torch.randn(heads, device=device), torch.randn(decays, device=device)
    step, size = _step(rows, queries, device), shape.key_dim * shape.value_dim

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.gated_delta(mixed, gates, log_a, dt_bias, state, step, shape)

    state = torch.randn(rows, heads, shape.key_dim, shape.value_dim, device=device)
    return _case(name, run, state, mixed.nbytes, 8.0 * tokens * heads * size)


def scan_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    queries: int,
    shape: ScanShape,
) -> Case:
    """The selective scan; each row's state read and written once."""
    tokens, heads = rows * queries, shape.heads
    mixed = torch.randn(tokens, shape.channels, dtype=dtype, device=device)
    steps = torch.randn(tokens, heads, dtype=dtype, device=device)
    log_a, dt_bias, skip = torch.randn(3, heads, device=device)
    step, size = _step(rows, queries, device), shape.state_size * shape.head_dim

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.selective_scan(mixed, steps, log_a, dt_bias, skip, state, step, shape)

    state = torch.randn(rows, heads, shape.state_size, shape.head_dim, device=device)
    return _case(name, run, state, mixed.nbytes, 5.0 * tokens * heads * size)


def channel_case(
    name: str, device: torch.device, dtype: torch.dtype, *, rows: int, queries: int, channels: int
) -> Case:
    """Mamba-1's scan, of 16 states per channel, read and written once."""
    tokens, size = rows * queries, 16
    x, steps = torch.randn(2, tokens, channels, dtype=dtype, device=device)
    write, read = torch.randn(2, tokens, size, dtype=dtype, device=device)
    rates = -torch.rand(size, channels, device=device)
    skip, step = torch.randn(channels, device=device), _step(rows, queries, device)

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.channel_scan(x, steps, write, read, rates, skip, state, step)

    state = torch.randn(rows, size, channels, device=device)
    return _case(name, run, state, 3.0 * x.nbytes, 6.0 * tokens * size * channels)


def conv_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    queries: int,
    channels: int,
) -> Case:
    """A short convolution with SiLU; inputs read and results written once."""
    x = torch.randn(rows * queries, channels, dtype=dtype, device=device)
    weight = torch.randn(_WIDTH, channels, dtype=dtype, device=device)
    step = _step(rows, queries, device)

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.short_conv(x, weight, None, state, step, True)

    state = torch.randn(rows, _WIDTH - 1, channels, dtype=dtype, device=device)
    return _case(name, run, state, 2.0 * x.nbytes)


def _step(rows: int, queries: int, device: torch.device) -> StepRows:
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    ends = torch.arange(rows + 1, dtype=torch.int32, device=device) * queries
    ids = torch.zeros(rows * queries, dtype=torch.int32, device=device)
    return StepRows(slots, ends, slots * 0 + 5, ids)


def _case(
    name: str,
    run: Callable[[Operations, torch.Tensor], torch.Tensor],
    state: torch.Tensor,
    other_bytes: float,
    flops: float = 0.0,
) -> Case:
    """In place: each side has its own state, which equally many tokens have changed."""
    own, twins, walked = (state.clone() for _ in range(3))
    return Case(
        name,
        run=lambda: run(operations, own),
        peers={
            "torch": lambda: run(reference, twins),
            "token by token": lambda: run(invariant_operations, walked),
        },
        bytes_moved=2.0 * state.nbytes + other_bytes,
        flops=flops,
        peers_synchronise=True,
    )
