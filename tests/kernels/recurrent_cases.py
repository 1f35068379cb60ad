"""Layers with a recurrent state: random layers, and texts split into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kernels.inputs import StepRows
from kernels.operations import Operations
from kernels.recurrent import GatedDeltaShape, ScanShape

LINES = 7  # the last one is for padding
_TOKENS = 100 * LINES

# Computes the chosen tokens, [n] int64, from the operands of a whole batch.
Layer = Callable[[Operations, torch.Tensor, torch.Tensor, StepRows], torch.Tensor]


class Case(NamedTuple):
    """A layer with the operands of a batch of tokens."""

    layer: Layer
    state: torch.Tensor  # [LINES, ...], initially arbitrary


def step_rows(rows: Sequence[tuple[int, int, int]]) -> StepRows:
    """Build the rows of a step; each is (slot, start, number of tokens)."""
    slots, starts, lengths = torch.tensor(rows, dtype=torch.int32).unbind(1)
    ends = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)))
    return StepRows(slots.clone(), ends, starts.clone(), torch.zeros(int(ends[-1])).int())


def delta_case(shape: GatedDeltaShape, dtype: torch.dtype) -> Case:
    mixed = torch.randn(_TOKENS, shape.channels).to(dtype)
    num_decays = shape.value_heads * shape.num_decays
    gates = torch.randn(_TOKENS, shape.value_heads + num_decays + 3).to(dtype)[:, 3:]  # strided
    log_a, dt_bias = torch.randn(shape.value_heads), torch.randn(num_decays)

    def layer(
        twin: Operations, tokens: torch.Tensor, state: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        some = mixed[tokens], _apart(gates[tokens])
        return twin.gated_delta(*some, log_a, dt_bias, state, rows, shape)

    return Case(layer, torch.randn(LINES, shape.value_heads, shape.key_dim, shape.value_dim))


def scan_case(shape: ScanShape, dtype: torch.dtype) -> Case:
    mixed = torch.randn(_TOKENS, shape.channels).to(dtype)
    time_steps = torch.randn(_TOKENS, shape.heads + 3).to(dtype)[:, 3:]
    log_a, dt_bias, skip = torch.randn(3, shape.heads)

    def layer(
        twin: Operations, tokens: torch.Tensor, state: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        some = mixed[tokens], _apart(time_steps[tokens])
        return twin.selective_scan(*some, log_a, dt_bias, skip, state, rows, shape)

    return Case(layer, torch.randn(LINES, shape.heads, shape.state_size, shape.head_dim))


def channel_case(channels: int, state_size: int, dtype: torch.dtype) -> Case:
    x, steps = torch.randn(2, _TOKENS, channels).to(dtype)
    shared = torch.randn(_TOKENS, 2 * state_size + 3).to(dtype)[:, 3:]  # not contiguous
    rates, skip = -torch.randn(state_size, channels).exp(), torch.randn(channels)

    def layer(
        twin: Operations, tokens: torch.Tensor, state: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        write, read = _apart(shared[tokens]).chunk(2, dim=1)
        some = x[tokens], _apart(steps[tokens]), write, read
        return twin.channel_scan(*some, rates, skip, state, rows)

    return Case(layer, torch.randn(LINES, state_size, channels))


def conv_case(channels: int, width: int, dtype: torch.dtype, kind: str, has_bias: bool) -> Case:
    """``kind``: plain, silu or gated."""
    x = torch.randn(_TOKENS, channels * (3 if kind == "gated" else 1)).to(dtype)
    weight = torch.randn(width, channels).to(dtype)
    bias = torch.randn(channels).to(dtype) if has_bias else None

    def layer(
        twin: Operations, tokens: torch.Tensor, state: torch.Tensor, rows: StepRows
    ) -> torch.Tensor:
        some = _apart(x[tokens])
        if kind == "gated":
            return twin.gated_conv(some, weight, bias, state, rows)
        return twin.short_conv(some, weight, bias, state, rows, kind == "silu")

    return Case(layer, torch.randn(LINES, width - 1, channels).to(dtype))


def run_steps(
    case: Case, twin: Operations, steps: Sequence[Sequence[tuple[int, int, int]]]
) -> tuple[dict[tuple[int, int], torch.Tensor], torch.Tensor]:
    """The outputs at each (slot, position), and the final states.

    Texts are identified by their slots: a slot's text has the tokens from ``100 * slot`` on.
    """
    state = case.state.clone()
    found = {}
    for step in steps:
        places = [(slot, p) for slot, start, count in step for p in range(start, start + count)]
        y = case.layer(twin, _tokens(places), state, step_rows(step))
        found |= dict(zip(places, y.unbind(), strict=True))
    return found, state


def run_on_trial(
    case: Case, twin: Operations, tried: Sequence[tuple[int, int, int, int]]
) -> tuple[dict[tuple[int, int], torch.Tensor], torch.Tensor]:
    """As ``run_steps``, for texts that end with tokens on trial.

    ``tried``: for each text its slot, the number of tokens before the trial, on trial, and
    accepted. The first are computed as usual; the others on trial, which leaves every state
    unchanged; then the accepted ones are settled.
    """
    state = case.state.clone()
    first = [(slot, 0, before) for slot, before, _, _ in tried]
    places = [(slot, p) for slot, begin, count in first for p in range(begin, begin + count)]
    y = case.layer(twin, _tokens(places), state, step_rows(first))
    found = dict(zip(places, y.unbind(), strict=True))
    left = state.clone()
    places = [(slot, n + p) for slot, n, count, _ in tried for p in range(count)]
    on_trial = [(slot, ~before, count) for slot, before, count, _ in tried]
    longest = max(count for _, _, count, _ in tried)
    rows = step_rows(on_trial)._replace(longest=longest)
    y = case.layer(twin, _tokens(places), state, rows)
    assert torch.equal(state, left)
    found |= dict(zip(places, y.unbind(), strict=True))
    settled = [(LINES - 1, -1, 0)]
    for slot, before, count, stay in tried:
        settled += [(slot, before, stay), (LINES - 1, -1, count - stay)]
    settled += [(LINES - 1, -1, 0)] * (len(settled) == len(places))
    longest = max(stay for _, _, _, stay in tried)
    case.layer(twin, _tokens(places), state, step_rows(settled)._replace(longest=longest))
    return found, state


def _tokens(places: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([100 * slot + max(p, 0) for slot, p in places])


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same values with non-contiguous rows."""
    return torch.cat((x, x), dim=1)[:, : x.shape[1]]
