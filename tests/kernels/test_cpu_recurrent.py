"""Native kernels of stateful layers, for each kind of processor that this one can emulate.

They are compared with the reference, and with themselves in steps split differently.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import get_args

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kernels.activations import OutputGateKind
from kernels.cpu import operations
from kernels.cpu.native import build
from kernels.cpu.program import Recorder, Workspace
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import operations as reference
from tests.kernels import cpu_targets
from tests.kernels.recurrent_cases import (
    Case,
    channel_case,
    conv_case,
    delta_case,
    run_on_trial,
    run_steps,
    scan_case,
    step_rows,
)

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])

delta_cases = st.builds(
    partial,
    st.just(delta_case),
    st.builds(
        lambda key_heads, group, *rest: GatedDeltaShape(key_heads, key_heads * group, *rest),
        st.integers(1, 2),
        st.integers(1, 3),
        st.sampled_from([1, 8, 24, 64, 128]),
        st.sampled_from([1, 8, 16, 40, 64, 128, 144]),
        st.booleans(),
        st.booleans(),
        st.sampled_from([0.0, -5.0]),
    ),
    dtypes,
)
scan_cases = st.builds(
    partial,
    st.just(scan_case),
    st.builds(
        lambda groups, share, *rest: ScanShape(groups * share, groups, *rest),
        st.integers(1, 2),
        st.integers(1, 3),
        st.sampled_from([1, 8, 40, 64, 80]),
        st.sampled_from([1, 8, 16, 24, 128]),
        st.sampled_from([(0.0, float("inf")), (0.1, 0.9)]),
    ),
    dtypes,
)
channel_cases = st.builds(
    partial,
    st.just(channel_case),
    st.sampled_from([1, 15, 16, 100, 256, 700]),
    st.sampled_from([1, 8, 16, 24]),
    dtypes,
)
conv_cases = st.builds(
    partial,
    st.just(conv_case),
    st.sampled_from([1, 15, 16, 100, 256, 700]),
    st.integers(2, 5),
    dtypes,
    st.sampled_from(["plain", "silu", "gated"]),
    st.booleans(),
)


@st.composite
def steps(draw: st.DrawFn) -> list[list[tuple[int, int, int]]]:
    """Texts of several slots, each split at random, in steps with some of them and padding rows."""
    planned: list[list[tuple[int, int, int]]] = [[] for _ in range(6)]
    for slot in range(draw(st.integers(1, 5))):
        pieces = draw(st.lists(st.integers(1, 5), min_size=1, max_size=4))
        first = draw(st.integers(0, 2))
        for i, count in enumerate(pieces):
            planned[first + i].append((slot, sum(pieces[:i]), count))
    if draw(st.booleans()):
        planned[0].append((6, -1, 1))
    return [step for step in planned if step]


@pytest.mark.parametrize("way", ["vectors", *cpu_targets.STAND_INS])
@given(make=st.one_of(delta_cases, scan_cases, channel_cases, conv_cases), steps=steps())
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_layers_with_a_state(
    way: str,
    make: Callable[[], Case],
    steps: list[list[tuple[int, int, int]]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Equal to the reference up to rounding, and to each text alone in one step bit for bit."""
    case = make()
    with monkeypatch.context() as patch:
        cpu_targets.use(way, patch)
        found, state = run_steps(case, operations, steps)
        lengths = {slot: start + count for step in steps for slot, start, count in step}
        whole = [[(slot, 0, length)] for slot, length in lengths.items() if slot != 6]
        alone, left = run_steps(case, operations, whole)
    assert all(torch.equal(found[place], result) for place, result in alone.items())
    assert torch.equal(state, left)
    expected, twins_state = run_steps(case, reference, whole)
    tolerance = TOLERANCE[next(iter(found.values())).dtype]
    results = (torch.stack([values[at] for at in expected]) for values in (alone, expected))
    assert error(*results) < tolerance
    assert error(state, twins_state) < TOLERANCE[state.dtype]


@pytest.mark.parametrize("way", ["vectors", *cpu_targets.STAND_INS])
@given(
    make=st.one_of(delta_cases, scan_cases, channel_cases, conv_cases),
    tried=st.lists(
        st.integers(1, 5).flatmap(
            lambda count: st.tuples(st.integers(1, 4), st.just(count), st.integers(1, count))
        ),
        min_size=1,
        max_size=5,
    ),
)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_tokens_on_trial_have_the_same_bits(
    way: str,
    make: Callable[[], Case],
    tried: list[tuple[int, int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As if each token had come alone; rejected tokens leave no trace."""
    case, of_slots = make(), [(slot, *each) for slot, each in enumerate(tried)]
    with monkeypatch.context() as patch:
        cpu_targets.use(way, patch)
        found, state = run_on_trial(case, operations, of_slots)
        whole = [[(slot, 0, before + count) for slot, before, count, _ in of_slots]]
        expected, _ = run_steps(case, operations, whole)
        stays = [[(slot, 0, before + stay) for slot, before, _, stay in of_slots]]
        _, left = run_steps(case, operations, stays)
    assert all(torch.equal(found[place], value) for place, value in expected.items())
    assert torch.equal(state, left)


@pytest.mark.parametrize("way", ["vectors", *cpu_targets.STAND_INS])
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 4),
    dim=st.sampled_from([1, 8, 40, 128, 1030]),
    has_weights=st.booleans(),
    gates_first=st.booleans(),
    dtype=dtypes,
)
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_gates(
    way: str,
    rows: int,
    heads: int,
    dim: int,
    has_weights: bool,
    gates_first: bool,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x = torch.randn(rows, heads, dim).to(dtype)
    gate = (torch.randn(rows, heads * dim + 5) * 6).to(dtype)[:, 5:]  # rows are not contiguous
    weight = torch.randn(*([heads] if has_weights else []), dim).to(dtype)
    wide = x.float(), gate.float(), weight.float()
    with monkeypatch.context() as patch:
        cpu_targets.use(way, patch)
        normed = operations.gated_rms_norm(x, gate, weight, 1e-5, gates_first)
        made = {
            (kind, count): operations.apply_gate(x.flatten(1), gate[:, :count], kind)
            for kind in get_args(OutputGateKind)
            for count in (1, heads * dim)
        }
    assert normed.dtype == dtype
    expected = reference.gated_rms_norm(*wide, 1e-5, gates_first)
    assert error(normed, expected) < TOLERANCE[dtype]
    for (kind, count), gated in made.items():
        by = gate[:, :count].float()
        expected = reference.apply_gate(x.flatten(1).float(), by, kind)
        assert gated.dtype == dtype
        assert error(gated, expected) < TOLERANCE[dtype]


def test_time_steps_far_below_one_keep_their_places() -> None:
    """log(1 + e^x) for very negative x, which would be lost in the sum with 1."""
    shape = ScanShape(1, 1, 16, 16)
    mixed, steps = torch.randn(1, shape.channels), torch.tensor([[-30.0]])
    zero, state = torch.zeros(1), torch.zeros(1, 1, 16, 16)
    first = step_rows([(0, 0, 1)])
    twin = reference.selective_scan(mixed, steps, zero, zero, zero, state.clone(), first, shape)
    ours = operations.selective_scan(mixed, steps, zero, zero, zero, state, first, shape)
    assert twin.abs().max() > 0
    assert (ours - twin).norm() < 1e-5 * twin.norm()


def test_a_layer_with_a_state_is_part_of_a_program() -> None:
    """The program reads and overwrites the state on each run."""
    shape = GatedDeltaShape(1, 2, 16, 16)
    x, gates = torch.randn(3, shape.channels), torch.randn(3, 4)
    weight, norm = torch.randn(4, shape.channels), torch.randn(16)
    log_a, dt_bias = torch.randn(2, 2)
    gate = torch.randn(3, 32)
    rows = step_rows([(0, 5, 1), (1, 0, 1), (2, 9, 1)])
    begin = torch.randn(3, 3, shape.channels), torch.randn(3, 2, 16, 16)

    def layer(conv: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        mixed = operations.short_conv(x, weight, None, conv, rows, True)
        y = operations.gated_delta(mixed, gates, log_a, dt_bias, state, rows, shape)
        normed = operations.gated_rms_norm(y, gate, norm, 1e-6, False)
        return operations.apply_gate(normed, gate, "sigmoid")

    recorded = [part.clone() for part in begin]
    program, result = Recorder(Workspace())(lambda: layer(*recorded))
    assert all(map(torch.equal, recorded, begin))
    computed = [part.clone() for part in begin]
    for _ in range(3):
        x.copy_(torch.randn(x.shape))
        expected = layer(*computed)
        program()
        assert torch.equal(result, expected)
        assert all(map(torch.equal, recorded, computed))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The error relative to a norm of at least 1; nan if anything is nan."""
    wide = expected.double()
    return float((found.double() - wide).norm() / wide.norm().clamp(min=1.0))
