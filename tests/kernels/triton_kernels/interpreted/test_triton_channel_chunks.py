"""Prompts of layers whose decays differ by channel, compared with the recurrence in float64.

Their chunks must hold for decays that forget a state at once beside others that keep it.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from kernels.inputs import StepRows
from kernels.recurrent import GatedDeltaShape
from kernels.triton import channel_delta_chunks, operations
from tests.kernels.recurrent_cases import step_rows

# Slot, start and number of tokens: from zero, from the stored state, padding, and on trial.
ROWS = [
    (0, 0, 0),
    (1, 7, 1),
    (2, 0, 17),
    (3, 5, 63),
    (4, ~9, 64),
    (5, 2, 65),
    (6, 0, 1),
    (7, 3, 200),
]
ROWS += [(8, -1, 1), (9, 0, 65)]
TOKENS = sum(count for *_, count in ROWS)
ALPHAS = {
    "kept": torch.full((1,), -30.0),  # a decay by e^-1e-13
    "forgotten": torch.tensor([50.0, -5.0]),  # every other channel by e^-50
    "all": torch.tensor([-30.0, -8.0, 0.0, 3.0, 50.0, 300.0]),  # in turn and at random
}


@pytest.mark.parametrize(
    ("alphas", "keys", "shape"),
    [
        pytest.param("all", 1.0, GatedDeltaShape(1, 2, 24, 20, True, True), id="all"),
        pytest.param("forgotten", 1e-3, GatedDeltaShape(1, 1, 40, 8, True, True), id="forgotten"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("kept", 1e-3, GatedDeltaShape(1, 1, 16, 16, True, True)),
                ("kept", 1.0, GatedDeltaShape(2, 2, 20, 40, False, True)),
                ("all", 1e-3, GatedDeltaShape(2, 4, 72, 36, True, True)),
                ("all", 1.0, GatedDeltaShape(1, 1, 24, 20, True, True, -5.0)),
                ("all", 1.0, GatedDeltaShape(1, 1, 24, 20, False, True, -80.0)),
                ("all", 1.0, GatedDeltaShape(1, 2, 24, 20, True, False, -5.0)),
            )
        ),
    ],
)
def test_delta_rules(alphas: str, keys: float, shape: GatedDeltaShape) -> None:
    _check_delta_rule(alphas, keys, shape, torch.float32, 1e-5)


@pytest.mark.slow
def test_all_channels_in_one_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that has little memory for the sums of a loop."""
    monkeypatch.setattr(channel_delta_chunks, "has_tensor_memory", lambda _: True)
    shape = GatedDeltaShape(1, 2, 72, 36, True, True)
    _check_delta_rule("all", 1e-3, shape, torch.float32, 1e-5)


@pytest.mark.parametrize("keys", [1.0, pytest.param(1e-2, marks=pytest.mark.slow)])
def test_states_are_as_exact_as_sixteen_bits(keys: float) -> None:
    """Results are bfloat16, which the interpreter does not even round."""
    shape = GatedDeltaShape(1, 1, 24, 20, True, True)
    _check_delta_rule("all", keys, shape, torch.bfloat16, 1e-4)


@pytest.mark.parametrize("alphas", ["all", pytest.param("forgotten", marks=pytest.mark.slow)])
def test_channel_scans(alphas: str) -> None:
    channels, size, rows = 40, 12, step_rows(ROWS)
    x, steps = torch.randn(2, TOKENS, channels)
    steps += _chosen(ALPHAS[alphas], channels)
    write, read = torch.randn(2, TOKENS, size)
    rates, skip = -torch.randn(size, channels).exp(), torch.randn(channels)
    state = torch.randn(len(ROWS), size, channels)
    expected = _channel_scan(x, steps, write, read, rates, skip, state, rows)
    y = operations.channel_scan(x, steps, write, read, rates, skip, state, rows)
    _check(y, state, *expected)


def test_single_tokens_are_not_chunked(monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    for module in ("channel_delta_chunks", "channel_scan_chunks"):
        monkeypatch.setattr(
            f"kernels.triton.{module}.launch", lambda kernel, *_, **__: launched.append(kernel)
        )
    rows, shape = (
        step_rows([(i, 3, 1) for i in range(20)]),
        GatedDeltaShape(1, 1, 8, 8, False, True),
    )
    mixed, gates, x = (torch.randn(20, width) for width in (24, 9, 8))
    ones, state = torch.ones(8), torch.randn(20, 1, 8, 8)
    operations.gated_delta(mixed, gates, ones[:1], ones, state, rows, shape)
    operations.channel_scan(x, x, x, x, -state[0, 0].exp(), ones, state[:, 0].clone(), rows)
    assert not launched


def _check_delta_rule(
    alphas: str, keys: float, shape: GatedDeltaShape, dtype: torch.dtype, tolerance: float
) -> None:
    """``keys``: how far they are from one another."""
    rows, heads = step_rows(ROWS), shape.value_heads
    mixed = torch.randn(TOKENS, shape.channels)
    begin, end = (n * shape.key_heads * shape.key_dim for n in (1, 2))
    mixed[:, begin:end] = mixed[:1, begin:end] + keys * (mixed - mixed[:1])[:, begin:end]
    gates = torch.randn(TOKENS, heads * (1 + shape.num_decays))
    gates[:, heads:] += _chosen(ALPHAS[alphas], heads * shape.num_decays)
    log_a, dt_bias = 0.1 * torch.randn(heads), torch.randn(heads * shape.num_decays)
    state = torch.randn(len(ROWS), heads, shape.key_dim, shape.value_dim)
    mixed, gates = mixed.to(dtype), gates.to(dtype)
    expected = _delta_rule(mixed, gates, log_a, dt_bias, state, rows, shape)
    y = operations.gated_delta(mixed, gates, log_a, dt_bias, state, rows, shape)
    _check(y, state, *expected, tolerance)


def _chosen(values: torch.Tensor, width: int) -> torch.Tensor:
    """Values [TOKENS, width] that differ by channel, and by token if there are more than two."""
    if len(values) <= 2:
        return values.repeat(width)[:width].expand(TOKENS, width)
    return values[torch.randint(len(values), (TOKENS, width))]


def _delta_rule(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: GatedDeltaShape,
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, group, keys = shape.value_heads, shape.value_heads // shape.key_heads, shape.key_heads
    q, k, v = mixed.double().split([keys * shape.key_dim] * 2 + [heads * shape.value_dim], dim=1)
    v = v.unflatten(1, (heads, -1))
    q, k = (
        each * (each.square().sum(-1, keepdim=True) + 1e-6).rsqrt()
        for each in (part.unflatten(1, (keys, -1)).repeat_interleave(group, 1) for part in (q, k))
    )
    beta = gates[:, :heads].double().sigmoid() * (1 + shape.allows_negative)
    raw = (gates[:, heads:].double() + dt_bias.double()).unflatten(1, (heads, -1))
    rate = log_a.double().exp()[:, None]
    logs = -rate * functional.softplus(raw)
    if shape.least_log_decay:
        logs = shape.least_log_decay * (rate * raw).sigmoid()
    decay, y, states = logs.exp(), torch.zeros_like(v), state.double()
    for slot, start, begin, end in _spans(rows):
        s = states[slot].clone() if start > 0 or start < -1 else torch.zeros_like(states[slot])
        for t in range(begin, end):
            s = s * decay[t, :, :, None]
            u = beta[t, :, None] * (v[t] - torch.einsum("hkv,hk->hv", s, k[t]))
            s = s + k[t, :, :, None] * u[:, None]
            y[t] = torch.einsum("hkv,hk->hv", s, q[t]) * shape.key_dim**-0.5
        if start >= 0:
            states[slot] = s
    return y, states


def _channel_scan(
    x: torch.Tensor,
    steps: torch.Tensor,
    write: torch.Tensor,
    read: torch.Tensor,
    rates: torch.Tensor,
    skip: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
) -> tuple[torch.Tensor, torch.Tensor]:
    x, write, read = x.double(), write.double(), read.double()
    dt = functional.softplus(steps.double())
    decay, y, states = (rates.double() * dt[:, None]).exp(), torch.zeros_like(x), state.double()
    for slot, start, begin, end in _spans(rows):
        s = states[slot].clone() if start > 0 or start < -1 else torch.zeros_like(states[slot])
        for t in range(begin, end):
            s = s * decay[t] + write[t, :, None] * (dt[t] * x[t])
            y[t] = read[t] @ s + skip * x[t]
        if start >= 0:
            states[slot] = s
    return y, states


def _spans(rows: StepRows) -> list[tuple[int, int, int, int]]:
    bounds = rows.query_start.tolist()
    return list(zip(rows.slots.tolist(), rows.starts.tolist(), bounds, bounds[1:], strict=False))


def _check(
    y: torch.Tensor,
    state: torch.Tensor,
    expected: torch.Tensor,
    states: torch.Tensor,
    tolerance: float = 1e-5,
) -> None:
    """Compare each row's results and state on its own: the rows' sizes differ."""
    assert y.isfinite().all()
    by_dtype = tolerance if y.dtype == torch.float32 else 2e-2
    for slot, start, begin, end in _spans(step_rows(ROWS)):
        if start != -1:
            assert _error(y[begin:end], expected[begin:end]) < by_dtype, slot
        assert _error(state[slot], states[slot]) < tolerance, slot


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm().clamp(min=1e-6))
