"""Kernels of layers with a state, against their twins, in steps cut in several ways."""

from __future__ import annotations

import pytest
import torch

from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import operations as reference
from kernels.triton import operations
from tests.kernels.recurrent_cases import (
    Case,
    conv_case,
    delta_case,
    run_steps,
    scan_case,
    step_rows,
)

STEPS = [
    [(5, 0, 1), (2, 0, 4), (0, 0, 2)],
    [(2, 4, 1), (5, 1, 5)],
    [(0, 2, 2), (5, 6, 1), (2, 5, 4), (6, -1, 1)],
    [(5, 7, 1), (6, -1, 1), (0, 4, 1), (6, -1, 1)],  # one token each
]
UNLIMITED = (0.0, float("inf"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (delta_case, (GatedDeltaShape(1, 3, 24, 20, allows_negative=True),)),
        (delta_case, (GatedDeltaShape(2, 2, 16, 16),)),
        (scan_case, (ScanShape(4, 2, 20, 24, (0.1, 0.9)),)),
        (scan_case, (ScanShape(2, 1, 16, 16, UNLIMITED),)),
    ],
)
def test_recurrences(kind, shape: tuple, dtype: torch.dtype) -> None:
    check(kind(*shape, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["plain", "silu", "gated"])
@pytest.mark.parametrize(("channels", "width", "has_bias"), [(20, 4, False), (600, 3, True)])
def test_convolutions(
    dtype: torch.dtype, kind: str, channels: int, width: int, has_bias: bool
) -> None:
    check(conv_case(channels, width, dtype, kind, has_bias), dtype)


def test_a_token_finds_its_row_among_many() -> None:
    x, weight = torch.randn(300, 8), torch.randn(3, 8)
    rows = [(i, 7 * (i % 2), 1 + (i == 140)) for i in range(299)]
    states = [torch.randn(300, 2, 8)]
    states.append(states[0].clone())
    results = [
        twin.short_conv(x, weight, None, state, step_rows(rows), False)
        for twin, state in zip((operations, reference), states, strict=True)
    ]
    torch.testing.assert_close(*results)
    assert torch.equal(*states)


@pytest.mark.parametrize("gates_first", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dim", [20, 128])
def test_gates(gates_first: bool, dtype: torch.dtype, dim: int) -> None:
    x, gate = torch.randn(5, 3, dim).to(dtype), torch.randn(5, 3 * dim + 5).to(dtype)[:, 5:]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for weight in (torch.randn(dim).to(dtype), torch.randn(3, dim).to(dtype)):
        given = x, gate, weight, 1e-5, gates_first
        close(operations.gated_rms_norm(*given), reference.gated_rms_norm(*given), tolerance)
    for by in (gate, gate[:, :1]):
        given = x.flatten(1), by, gates_first
        close(operations.apply_gate(*given), reference.apply_gate(*given), tolerance)


def check(case: Case, dtype: torch.dtype) -> None:
    found, state = run_steps(case, operations, STEPS)
    expected, twins_state = run_steps(case, reference, STEPS)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for place, value in expected.items():
        if place[1] >= 0:
            close(found[place], value, tolerance)
    close(state, twins_state, tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """By their norms: the interpreter cuts float32 to bf16 instead of rounding."""
    assert found.dtype == expected.dtype
    difference = (found.double() - expected.double()).norm()
    assert difference < tolerance * expected.double().norm().clamp(min=1.0)
