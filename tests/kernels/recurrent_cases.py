"""Layers with a state from token to token: random ones, and texts cut into steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from kernels.inputs import StepRows
from kernels.operations import Operations
from kernels.recurrent import GatedDeltaShape, ScanShape

LINES = 7  # the last is padding's
_TOKENS = 100 * LINES

# Computes the chosen tokens, [n] int64, of the operands of a whole crowd.
Layer = Callable[[Operations, torch.Tensor, torch.Tensor, StepRows], torch.Tensor]


class Case(NamedTuple):
    """A layer over the tokens of a crowd."""

    layer: Layer
    state: torch.Tensor  # [LINES, ...], of no meaning


def step_rows(rows: Sequence[tuple[int, int, int]]) -> StepRows:
    """Of each row: its slot, where it starts, how many tokens it has."""
    slots, starts, lengths = torch.tensor(rows, dtype=torch.int32).unbind(1)
    ends = torch.cat((torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).to(torch.int32)))
    return StepRows(slots.clone(), ends, starts.clone(), torch.zeros(int(ends[-1])).int())


def delta_case(shape: GatedDeltaShape, dtype: torch.dtype) -> Case:
    mixed = torch.randn(_TOKENS, shape.channels).to(dtype)
    gates = torch.randn(_TOKENS, 2 * shape.value_heads + 3).to(dtype)[:, 3:]  # rows lie apart
    log_a, dt_bias = torch.randn(2, shape.value_heads)

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
    """What comes out at each (slot, position), and the states left behind.

    Texts are told apart by their slots: a slot's text has the tokens ``100 * slot`` and on.
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
    """As ``run_steps``, of texts that end with tokens on trial.

    ``tried``: of each text its slot, how many tokens come before, are on trial, and of these stay.
    The first are fed; the others are tried, which leaves every state alone; what stays is settled.
    """
    state = case.state.clone()
    first = [(slot, 0, before) for slot, before, _, _ in tried]
    places = [(slot, p) for slot, begin, count in first for p in range(begin, begin + count)]
    y = case.layer(twin, _tokens(places), state, step_rows(first))
    found = dict(zip(places, y.unbind(), strict=True))
    left = state.clone()
    places = [(slot, n + p) for slot, n, count, _ in tried for p in range(count)]
    on_trial = [(slot, ~before, count) for slot, before, count, _ in tried]
    y = case.layer(twin, _tokens(places), state, step_rows(on_trial))
    assert torch.equal(state, left)
    found |= dict(zip(places, y.unbind(), strict=True))
    settled = [(LINES - 1, -1, 0)]
    for slot, before, count, stay in tried:
        settled += [(slot, before, stay), (LINES - 1, -1, count - stay)]
    settled += [(LINES - 1, -1, 0)] * (len(settled) == len(places))
    case.layer(twin, _tokens(places), state, step_rows(settled))
    return found, state


def _tokens(places: Sequence[tuple[int, int]]) -> torch.Tensor:
    return torch.tensor([100 * slot + max(p, 0) for slot, p in places])


def _apart(x: torch.Tensor) -> torch.Tensor:
    """The same with rows that do not lie side by side."""
    return torch.cat((x, x), dim=1)[:, : x.shape[1]]
