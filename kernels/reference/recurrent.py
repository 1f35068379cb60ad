"""Recurrent layers, computed one token at a time.

``kernels.recurrent`` describes rows and states. All sums are float32, and a token's result does not
depend on how its text was cut into steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from kernels.activations import OutputGateKind
from kernels.inputs import StepRows
from kernels.recurrent import GatedDeltaShape, ScanShape

_L2_EPS = 1e-6
_GATES: dict[OutputGateKind, Callable[[torch.Tensor], torch.Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": functional.silu,
    "softplus": functional.softplus,
}


def short_conv(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
    activates: bool,
) -> torch.Tensor:
    """Causal depthwise convolution over each row's tokens, followed by SiLU if it ``activates``.

    Args:
        x: [n, channels]; rows may be strided.
        weight: [width, channels], the newest token's last: Hugging Face's, transposed.
        bias: [channels] or None.
        state: [lines, width - 1, channels] of x's dtype: a row's last inputs, oldest first; updated
            in place.
        rows: the step's; ``token_ids`` is not read.

    Returns:
        [n, channels] contiguous, of x's dtype.
    """
    width = weight.shape[0]
    y = x.new_empty(x.shape)
    for line, begin, end, start in _spans(rows):
        history = _initial_state(state, line, start)
        inputs = torch.cat((history, x[begin:end]))
        total = torch.zeros_like(x[begin:end], dtype=torch.float32)
        for tap in range(width):
            total += inputs[tap : tap + end - begin].float() * weight[tap].float()
        total = total if bias is None else total + bias.float()
        y[begin:end] = functional.silu(total) if activates else total
        if start >= 0:
            state[line] = inputs[end - begin :]
    return y


def gated_conv(
    fused: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    rows: StepRows,
) -> torch.Tensor:
    """``c * short_conv(b * x)``: a short convolution between two gates (LFM2).

    Args:
        fused: [n, 3 * channels]: b, c, x concatenated. ``b * x`` is rounded to their dtype, which
            the state holds.
        weight, bias, state, rows: as for ``short_conv``.

    Returns:
        [n, channels].
    """
    b, c, x = fused.chunk(3, dim=-1)
    return c * short_conv(b * x, weight, bias, state, rows, False)


def gated_delta(
    mixed: torch.Tensor,
    gates: torch.Tensor,
    log_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    rows: StepRows,
    shape: GatedDeltaShape,
) -> torch.Tensor:
    """The gated delta rule (Yang et al. 2024, Gated Delta Networks), token by token; with decays by
    channel Kimi Delta Attention (Kimi Team 2025).

    With q and k normalised to length 1 (eps 1e-6 added to the sum of squares), q scaled by
    ``key_dim ** -0.5``, ``g = -exp(log_a) * softplus(alpha + dt_bias)`` and ``beta`` a sigmoid,
    doubled if ``shape.allows_negative``, for each value head::

        S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  y = S^T q

    where g is a number, or one for each line of S if ``shape.decays_channels``. If
    ``shape.least_log_decay`` is not 0, g is that times ``sigmoid(exp(log_a) * (alpha + dt_bias))``
    (Kimi Delta Attention with a safe gate).

    Args:
        mixed: [n, shape.channels]: queries, keys, values, each head by head.
        gates: [n, value_heads * (1 + shape.num_decays)]: beta before its sigmoid, then alpha, head
            by head; rows may be strided.
        log_a: [value_heads] float32.
        dt_bias: [value_heads * shape.num_decays] float32.
        state: [lines, value_heads, key_dim, value_dim] float32, updated in place.
        rows: the step's; ``token_ids`` is not read.
        shape: of the layer.

    Returns:
        [n, value_heads, value_dim] of mixed's dtype.
    """
    keys, group = shape.key_heads * shape.key_dim, shape.value_heads // shape.key_heads
    split = mixed.float().split((keys, keys, shape.value_heads * shape.value_dim), dim=-1)
    query, key = (
        _l2_normalise(part.unflatten(-1, (shape.key_heads, shape.key_dim))).repeat_interleave(
            group, 1
        )
        for part in split[:2]
    )
    query = query * shape.key_dim**-0.5
    value = split[2].unflatten(-1, (shape.value_heads, shape.value_dim))
    raw_beta, alpha = gates.float().tensor_split((shape.value_heads,), dim=-1)
    beta = torch.sigmoid(raw_beta) * (2.0 if shape.allows_negative else 1.0)
    raw = (alpha + dt_bias.float()).unflatten(-1, (shape.value_heads, -1))
    rate = log_a.float().exp()[:, None]
    if shape.least_log_decay:
        decay = torch.exp(shape.least_log_decay * torch.sigmoid(rate * raw))
    else:
        decay = torch.exp(-rate * functional.softplus(raw))
    y = torch.empty_like(value)
    for line, begin, end, start in _spans(rows):
        s = _initial_state(state, line, start)
        for t in range(begin, end):
            s = s * decay[t, :, :, None]
            recalled = (s * key[t, :, :, None]).sum(1)
            correction = beta[t, :, None] * (value[t] - recalled)
            s = s + key[t, :, :, None] * correction[:, None]
            y[t] = (s * query[t, :, :, None]).sum(1)
        if start >= 0:
            state[line] = s
    return y.to(mixed.dtype)


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
    """The selective state space of Mamba-2 (Dao & Gu 2024), token by token.

    With ``dt = softplus(time_step + dt_bias)``, clamped to ``shape.time_step_limit``, each head
    computes::

        S <- exp(-exp(log_a) dt) S + B (dt x)^T;  y = S^T C + skip x

    Args:
        mixed: [n, shape.channels]: x head by head, then B and C group by group.
        time_steps: [n, heads]; rows may be strided.
        log_a, dt_bias, skip: [heads] float32.
        state: [lines, heads, state_size, head_dim] float32, updated in place.
        rows: the step's; ``token_ids`` is not read.
        shape: of the layer.

    Returns:
        [n, heads, head_dim] of mixed's dtype.
    """
    inner, shared = shape.heads * shape.head_dim, shape.groups * shape.state_size
    split = mixed.float().split((inner, shared, shared), dim=-1)
    x = split[0].unflatten(-1, (shape.heads, shape.head_dim))
    write, read = (
        part.unflatten(-1, (shape.groups, shape.state_size)).repeat_interleave(
            shape.heads // shape.groups, 1
        )
        for part in split[1:]
    )
    dt = functional.softplus(time_steps.float() + dt_bias.float()).clamp(*shape.time_step_limit)
    decay = torch.exp(-log_a.float().exp() * dt)
    y = torch.empty_like(x)
    for line, begin, end, start in _spans(rows):
        s = _initial_state(state, line, start)
        for t in range(begin, end):
            new = write[t, :, :, None] * (dt[t, :, None] * x[t])[:, None]
            s = s * decay[t, :, None, None] + new
            y[t] = (s * read[t, :, :, None]).sum(1) + skip.float()[:, None] * x[t]
        if start >= 0:
            state[line] = s
    return y.to(mixed.dtype)


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
    """The selective state space of Mamba-1 (Gu & Dao 2023), token by token.

    With ``dt = softplus(time_step)``, each channel with its states S computes::

        S <- exp(rates dt) S + write dt x;  y = S^T read + skip x

    Args:
        x: [n, channels] contiguous.
        time_steps: [n, channels]; rows may be strided.
        write, read: [n, state_size], shared by all channels; rows may be strided.
        rates: [state_size, channels] float32, below 0.
        skip: [channels] float32.
        state: [lines, state_size, channels] float32, updated in place.
        rows: the step's; ``token_ids`` is not read.

    Returns:
        [n, channels] of x's dtype.
    """
    wide, into, out_of = x.float(), write.float(), read.float()
    dt = functional.softplus(time_steps.float())
    y = torch.empty_like(wide)
    for line, begin, end, start in _spans(rows):
        s = _initial_state(state, line, start)
        for t in range(begin, end):
            s = s * torch.exp(rates * dt[t]) + into[t, :, None] * (dt[t] * wide[t])
            y[t] = (s * out_of[t, :, None]).sum(0) + skip * wide[t]
        if start >= 0:
            state[line] = s
    return y.to(x.dtype)


def gated_rms_norm(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    gates_first: bool,
) -> torch.Tensor:
    """RMS norm of each head, gated by SiLU, computed in float32.

    Args:
        x: [n, heads, dim] contiguous.
        gate: [n, heads * dim]; rows may be strided.
        weight: [dim], or [heads, dim].
        eps: added to the mean square.
        gates_first: ``norm(x * silu(gate))`` (Mamba-2), or else ``norm(x) * silu(gate)``
            (Qwen3-Next); both norms include the weight.

    Returns:
        [n, heads * dim] of x's dtype.
    """
    wide, factor = x.float(), functional.silu(gate.float()).view(x.shape)
    wide = wide * factor if gates_first else wide
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps) * weight.float()
    return (normed if gates_first else normed * factor).to(x.dtype).flatten(1)


def apply_gate(x: torch.Tensor, gate: torch.Tensor, kind: OutputGateKind) -> torch.Tensor:
    """``x * kind(gate)``, computed in float32.

    Args:
        x: [n, dim].
        gate: [n, dim], or [n, 1] for all of a row's values; rows may be strided.
        kind: of the gate.

    Returns:
        [n, dim] of x's dtype.
    """
    return (x.float() * _GATES[kind](gate.float())).to(x.dtype)


def _spans(rows: StepRows) -> Iterator[tuple[int, int, int, int]]:
    """Yield each row's line, first token, end of its tokens, and start position."""
    bounds = rows.query_start.tolist()
    yield from zip(rows.slots.tolist(), bounds, bounds[1:], rows.starts.tolist(), strict=False)


def _initial_state(state: torch.Tensor, line: int, start: int) -> torch.Tensor:
    """Return the state that a row with this start begins with."""
    return state[line].clone() if start > 0 or start < -1 else torch.zeros_like(state[line])


def _l2_normalise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _L2_EPS)
