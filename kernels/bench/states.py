"""Cases of recurrent layers, as large as Qwen3-Next's and Granite 4.0 H's.

A decode step reads and writes each row's state once, which is what its bytes count. The states of
many layers take turns, so that none is in a processor's cache.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch

from kernels.bench.case import ReferenceCase
from kernels.cpu import operations as ours
from kernels.inputs import StepRows
from kernels.operations import Operations
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import operations as theirs

_DELTA = GatedDeltaShape(16, 32, 128, 128)
_BY_CHANNEL = GatedDeltaShape(32, 32, 128, 128, decays_channels=True)  # of Kimi Linear
_SCAN = ScanShape(128, 1, 64, 128)
_CHANNELS = (16, 8192)  # of Falcon-Mamba: states, and channels
_WIDTH = 4
_STATES_BYTES = 256 * 2**20

# (kernels, a state) -> results for the tokens' inputs.
_Run = Callable[[Operations, torch.Tensor], torch.Tensor]


def state_cases(dtype: torch.dtype) -> Iterator[ReferenceCase]:
    """Yield cases of one and many decoding rows, and of a prompt chunk."""
    for rows, queries in ((1, 1), (16, 1), (1, 256)):
        step = _step(rows, queries)
        name = f"decode {rows}" if queries == 1 else f"prefill {queries}"
        yield _delta(f"delta rule {name}", dtype, step, _DELTA)
        yield _delta(f"delta rule by channel {name}", dtype, step, _BY_CHANNEL)
        yield _scan(f"selective scan {name}", dtype, step)
        yield _channels(f"channel scan {name}", dtype, step)
        yield _conv(f"short convolution {name}", dtype, step)
        yield _norm(f"gated norm {name}", dtype, rows * queries)


def _step(rows: int, queries: int) -> StepRows:
    slots = torch.arange(rows, dtype=torch.int32)
    ends = torch.arange(rows + 1, dtype=torch.int32) * queries
    return StepRows(slots, ends, slots * 0 + 5, torch.zeros(rows * queries, dtype=torch.int32))


def _delta(name: str, dtype: torch.dtype, step: StepRows, layer: GatedDeltaShape) -> ReferenceCase:
    rows, tokens = step.slots.numel(), step.token_ids.numel()
    heads, shape = layer.value_heads, (layer.key_dim, layer.value_dim)
    decays = heads * layer.num_decays
    mixed, gates = (torch.randn(tokens, n).to(dtype) for n in (layer.channels, heads + decays))
    log_a, dt_bias = torch.randn(heads), torch.randn(decays)

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.gated_delta(mixed, gates, log_a, dt_bias, state, step, layer)

    # S^T k, S^T q, product and sum of the update, and the decay.
    flops = 8.0 * tokens * heads * shape[0] * shape[1]
    return _alternating_case(name, run, torch.randn(rows, heads, *shape), mixed.nbytes, flops)


def _scan(name: str, dtype: torch.dtype, step: StepRows) -> ReferenceCase:
    rows, tokens = step.slots.numel(), step.token_ids.numel()
    heads, shape = _SCAN.heads, (_SCAN.state_size, _SCAN.head_dim)
    mixed, steps = (torch.randn(tokens, n).to(dtype) for n in (_SCAN.channels, heads))
    log_a, dt_bias, skip = torch.randn(3, heads)

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.selective_scan(mixed, steps, log_a, dt_bias, skip, state, step, _SCAN)

    flops = 5.0 * tokens * heads * shape[0] * shape[1]
    return _alternating_case(name, run, torch.randn(rows, heads, *shape), mixed.nbytes, flops)


def _channels(name: str, dtype: torch.dtype, step: StepRows) -> ReferenceCase:
    rows, tokens = step.slots.numel(), step.token_ids.numel()
    size, channels = _CHANNELS
    x, steps = torch.randn(2, tokens, channels).to(dtype)
    write, read = torch.randn(2, tokens, size).to(dtype)
    rates, skip = -torch.rand(size, channels), torch.randn(channels)

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.channel_scan(x, steps, write, read, rates, skip, state, step)

    flops = 6.0 * tokens * size * channels
    return _alternating_case(name, run, torch.randn(rows, size, channels), 3.0 * x.nbytes, flops)


def _conv(name: str, dtype: torch.dtype, step: StepRows) -> ReferenceCase:
    rows, tokens, channels = step.slots.numel(), step.token_ids.numel(), _DELTA.channels
    x, weight = torch.randn(tokens, channels).to(dtype), torch.randn(_WIDTH, channels).to(dtype)

    def run(kind: Operations, state: torch.Tensor) -> torch.Tensor:
        return kind.short_conv(x, weight, None, state, step, True)

    state = torch.randn(rows, _WIDTH - 1, channels).to(dtype)
    return _alternating_case(name, run, state, 2.0 * x.nbytes)


def _norm(name: str, dtype: torch.dtype, tokens: int) -> ReferenceCase:
    heads, dim = _DELTA.value_heads, _DELTA.value_dim
    x, gate = torch.randn(tokens, heads, dim).to(dtype), torch.randn(tokens, heads * dim).to(dtype)
    weight = torch.randn(dim).to(dtype)
    return ReferenceCase(
        name,
        lambda: ours.gated_rms_norm(x, gate, weight, 1e-6, False),
        lambda: theirs.gated_rms_norm(x, gate, weight, 1e-6, False),
        3.0 * x.nbytes,
    )


def _alternating_case(
    name: str, run: _Run, state: torch.Tensor, other_bytes: float, flops: float = 0.0
) -> ReferenceCase:
    """Successive calls use successive layers, each with its own state."""
    layers = max(1, _STATES_BYTES // (2 * state.nbytes)) if state.nbytes > 2**20 else 1
    own, twins = ([state.clone() for _ in range(layers)] for _ in range(2))
    turns = itertools.cycle(own), itertools.cycle(twins)
    return ReferenceCase(
        name,
        lambda: run(ours, next(turns[0])),
        lambda: run(theirs, next(turns[1])),
        2.0 * state.nbytes + other_bytes,
        flops,
    )
