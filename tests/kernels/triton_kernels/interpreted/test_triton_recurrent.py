"""Kernels of stateful layers, compared with the reference in steps split in several ways."""

from __future__ import annotations

import itertools

import pytest
import torch

from kernels.activations import OutputGateKind
from kernels.recurrent import CHUNK, MIN_CHUNKED_TOKENS, GatedDeltaShape, ScanShape
from kernels.reference import operations as reference
from kernels.triton import invariant_operations, operations
from tests.kernels.recurrent_cases import (
    LINES,
    Case,
    channel_case,
    conv_case,
    delta_case,
    run_on_trial,
    run_steps,
    scan_case,
    step_rows,
)

Steps = list[list[tuple[int, int, int]]]  # rows: slot, start, number of tokens

STEPS = [
    [(5, 0, 1), (2, 0, 4), (0, 0, 2)],
    [(2, 4, 1), (5, 1, 5)],
    [(0, 2, 2), (5, 6, 1), (2, 5, 4), (6, -1, 1)],
    [(5, 7, 1), (6, -1, 1), (0, 4, 1), (6, -1, 1)],  # one token each
]
# With rows that are split into chunks: some into several, one that ends a token short of a chunk,
# and one with the minimum number of tokens.
PROMPTS = [
    [(5, 0, 40), (2, 0, MIN_CHUNKED_TOKENS - 1), (0, 0, CHUNK), (1, 0, 100)],
    [(2, MIN_CHUNKED_TOKENS - 1, MIN_CHUNKED_TOKENS), (5, 40, 1)],
    [
        (6, -1, 1),
        (0, CHUNK, 36),
        (5, 41, 58),
        (2, 2 * MIN_CHUNKED_TOKENS - 1, CHUNK - 1),
        (6, -1, 1),
    ],
]
UNLIMITED = (0.0, float("inf"))


CASES = {
    "delta": (delta_case, GatedDeltaShape(1, 3, 24, 20, allows_negative=True)),
    "delta, equal heads": (delta_case, GatedDeltaShape(2, 2, 16, 16)),
    "delta, decays by channel": (
        delta_case,
        GatedDeltaShape(1, 2, 24, 20, decays_channels=True),
    ),
    "scan": (scan_case, ScanShape(4, 2, 20, 24, (0.1, 0.9))),
    "scan, any step": (scan_case, ScanShape(2, 1, 16, 16, UNLIMITED)),
    "channels": (channel_case, 40, 12),
}
# Many tokens one by one, which the interpreter takes seconds for; see test_triton_channel_chunks.
SLOW = ("channels",)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(pytest.param(name, STEPS, id=f"{name}-short") for name in CASES),
        *(
            pytest.param(
                name,
                PROMPTS,
                id=f"{name}-prompts",
                marks=pytest.mark.slow if name in SLOW else (),
            )
            for name in CASES
        ),
    ],
)
def test_recurrences(name: str, dtype: torch.dtype, steps: Steps) -> None:
    kind, *shape = CASES[name]
    check(kind(*shape, dtype), dtype, steps)


@pytest.mark.parametrize("by_channel", [False, True])
def test_bounded_decays(by_channel: bool) -> None:
    shape = GatedDeltaShape(1, 2 - by_channel, 8, 8, False, by_channel, -5.0)
    rows = [(3, 0, MIN_CHUNKED_TOKENS + 1), (1, 5, 1)]
    check(delta_case(shape, torch.float32), torch.float32, [rows])


@pytest.mark.parametrize("alpha", [-30.0, 1.0, 60.0])
def test_a_key_that_comes_again_and_again(alpha: float) -> None:
    """Keys are nearly identical; per token the state is kept, decayed, or all but forgotten."""
    shape, tokens = GatedDeltaShape(1, 1, 16, 16, allows_negative=True), CHUNK + 30
    mixed = torch.randn(tokens, shape.channels)
    mixed[:, 16:32] = mixed[0, 16:32] + 1e-3 * torch.randn(tokens, 16)
    gates = torch.cat((torch.randn(tokens, 1) + 1, torch.full((tokens, 1), alpha)), dim=1)
    ones, rows = torch.ones(1), step_rows([(0, 1, tokens)])
    state = torch.randn(1, 1, 16, 16)
    sides = []
    for twin in (operations, reference):
        own = state.clone()
        sides.append((twin.gated_delta(mixed, gates, ones, ones, own, rows, shape), own))
    for found, expected in zip(*sides, strict=True):
        close(found, expected, 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        delta_case(GatedDeltaShape(1, 3, 24, 20), torch.float32),
        delta_case(GatedDeltaShape(1, 2, 24, 20, decays_channels=True), torch.float32),
        scan_case(ScanShape(4, 2, 20, 24, UNLIMITED), torch.float32),
        channel_case(40, 16, torch.float32),
        conv_case(20, 4, torch.float32, "silu", True),
        conv_case(20, 3, torch.float32, "gated", False),
    ],
    ids=["delta", "delta by channel", "scan", "channels", "conv", "gated"],
)
@pytest.mark.parametrize(
    "tried",
    [
        [(2, 3, 4, 1), (5, 1, 5, 5), (0, 9, 2, 2), (3, 2, 3, 2)],
        [(2, 3, 2, 1), (5, 1, 2, 2), (0, 9, 2, 1)],  # settling rows could have one token each
        [
            (1, 2, MIN_CHUNKED_TOKENS + 4, 3),
            (4, 5, MIN_CHUNKED_TOKENS + 1, MIN_CHUNKED_TOKENS),
            (3, MIN_CHUNKED_TOKENS, 2, 1),
        ],  # in chunks
    ],
    ids=["some", "two", "many"],
)
def test_tokens_on_trial_leave_nothing_but_what_stays(case: Case, tried: list) -> None:
    sides = [run_on_trial(case, twin, tried) for twin in (operations, reference)]
    for place, value in sides[1][0].items():
        close(sides[0][0][place], value, 1e-4)
    close(sides[0][1], sides[1][1], 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        delta_case(GatedDeltaShape(1, 3, 24, 20), torch.float32),
        scan_case(ScanShape(4, 2, 20, 24, UNLIMITED), torch.float32),
        channel_case(40, 16, torch.float32),
    ],
    ids=["delta", "scan", "channels"],
)
def test_padding_has_finite_results(case: Case, monkeypatch) -> None:
    """They go through the rest of a model beside those of texts, whatever memory held before."""
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *a, **more: empty(*a, **more).fill_(torch.nan))
    monkeypatch.setattr(torch, "empty_like", lambda x: torch.full_like(x, torch.nan))
    rows = [(2, 1, 3), (LINES - 1, -1, 9)]
    found, _ = run_steps(case, operations, [rows])
    assert all(each.isfinite().all() for each in found.values())


@pytest.mark.slow
def test_chunks_are_found_among_many_rows() -> None:
    """More rows than are scanned together; prompts among single tokens."""
    long = {3: 20, 255: 70, 256: 64, 299: 17}
    rows = step_rows([(i, 7 * (i % 2), long.get(i, 1)) for i in range(300)])
    tokens, one = int(rows.query_start[-1]), torch.randn(1)
    state, gates = torch.randn(300, 1, 16, 16), torch.randn(tokens, 2)
    delta, scan = GatedDeltaShape(1, 1, 16, 16), ScanShape(1, 1, 16, 16)
    mixed = torch.randn(tokens, delta.channels)
    for name, given in (
        ("gated_delta", (mixed, gates, one, one, state, rows, delta)),
        ("selective_scan", (mixed, gates[:, :1], one, one, one, state, rows, scan)),
    ):
        sides = []
        for twin in (operations, reference):
            own = [each.clone() if each is state else each for each in given]
            sides.append((getattr(twin, name)(*own), own[-3]))
        for found, expected in zip(*sides, strict=True):
            close(found, expected, 1e-4)


@pytest.mark.parametrize(
    "case",
    [
        delta_case(GatedDeltaShape(1, 2, 16, 16), torch.float32),
        scan_case(ScanShape(2, 1, 16, 16), torch.float32),
        channel_case(40, 16, torch.float32),
    ],
    ids=["delta", "scan", "channels"],
)
def test_invariant_tokens_have_the_same_bits_in_any_cut(case: Case) -> None:
    whole, state = run_steps(case, invariant_operations, [[(0, 0, 90)]])
    for cut in (1, 40, 70):
        steps = [[(0, 0, cut), (1, 0, 3)], [(1, 3, 30), (0, cut, 90 - cut)]]
        parts, cut_state = run_steps(case, invariant_operations, steps)
        assert all(torch.equal(parts[place], value) for place, value in whole.items())
        assert torch.equal(cut_state[0], state[0])


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
    kinds: tuple[OutputGateKind, ...] = ("sigmoid", "softplus") if gates_first else ("silu",)
    for by, kind in itertools.product((gate, gate[:, :1]), kinds):
        given = x.flatten(1), by, kind
        close(operations.apply_gate(*given), reference.apply_gate(*given), tolerance)


def check(case: Case, dtype: torch.dtype, steps: Steps = STEPS) -> None:
    found, state = run_steps(case, operations, steps)
    expected, twins_state = run_steps(case, reference, steps)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    for place, value in expected.items():
        if place[1] >= 0:
            close(found[place], value, tolerance)
    close(state, twins_state, tolerance)


def close(found: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Compares norms, since the interpreter truncates float32 to bf16 instead of rounding."""
    assert found.dtype == expected.dtype
    difference = (found.double() - expected.double()).norm()
    assert difference < tolerance * expected.double().norm().clamp(min=1.0)
