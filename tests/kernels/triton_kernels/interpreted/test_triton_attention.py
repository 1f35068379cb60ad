"""Paged attention by the kernels against its definition in float64, over poisoned caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention import BatchGeometry
from kernels.reference.attention import ReferenceAttention
from kernels.select import select_kernels
from kernels.triton.backend import TritonAttention
from kernels.triton.decode import decode_attention
from kernels.triton.decode_plan import SPLIT_SIZE, plan_decode
from kernels.triton.prefill import prefill_attention
from tests.kernels.triton_kernels.interpreted.oracle import Problem, attend, make_problem

CPU = torch.device("cpu")


def run(problem: Problem) -> torch.Tensor:
    backend = TritonAttention()
    assert backend.refuse(problem.spec) is None
    state = backend.plan(problem.geometry, problem.spec)
    return backend.forward(state, problem.layer, problem.query, problem.cache)


def check(problem: Problem, tolerance: float = 2e-5) -> None:
    expected = attend(problem)
    error = (run(problem).double() - expected).norm() / expected.norm()
    assert error < tolerance


SHAPES = [
    # kv heads, group, head_dim, block_size
    (2, 1, 64, 16),
    (1, 4, 80, 32),
    (2, 7, 96, 64),
    (1, 16, 128, 128),
    (1, 2, 256, 16),
    (2, 3, 32, 64),
]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 20.0)])
def test_mixed_batches_equal_the_definition(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Decode rows, chunks with and without a past, and odd lengths, in one batch."""
    check(
        make_problem(
            [1, 13, 1, 70, 2, 1],
            [0, 90, 66, 0, 63, 127],
            num_kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            window=window,
            softcap=softcap,
            seed=group,
        )
    )


@pytest.mark.parametrize("window", [None, 600])
def test_long_rows_are_split_and_merged(window: int | None) -> None:
    """Lengths around the split size, one split to several, beside short rows."""
    past = [SPLIT_SIZE - 1, SPLIT_SIZE, 3, 2 * SPLIT_SIZE + 76]
    problem = make_problem([1] * 4, past, num_kv_heads=1, group=3, block_size=64, window=window)
    check(problem)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    # The interpreter cuts float32 to bf16 instead of rounding, hence the wide bound.
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    check(make_problem([1, 40, 1], [50, 30, 600], dtype=dtype), tolerance)


def test_equals_the_reference_backend() -> None:
    problem = make_problem([1, 17, 33], [30, 0, 20], group=4, window=20)
    backend = ReferenceAttention()
    state = backend.plan(problem.geometry, problem.spec)
    expected = backend.forward(state, problem.layer, problem.query, problem.cache)
    torch.testing.assert_close(run(problem), expected, rtol=1e-4, atol=1e-5)


def test_sinks_take_their_share() -> None:
    """One split, several, and a chunk."""
    problem = make_problem([1, 1, 20], [30, 600, 10], num_kv_heads=2, group=2)
    sinks = torch.tensor([-1.0, 0.0, 3.0, 8.0])
    state = TritonAttention().plan(problem.geometry, problem.spec)
    output = torch.full(problem.query.shape, float("nan"))
    assert state.prefill is not None
    cache, layer = problem.cache, problem.layer
    decode_attention(state.decode[None], layer, problem.query, cache, output, sinks)
    assert output[2:].isnan().all()
    prefill_attention(state.prefill, layer, problem.query, cache, output, sinks)
    expected = attend(problem, sinks)
    assert (output.double() - expected).norm() / expected.norm() < 2e-5


def test_a_row_has_the_same_bits_in_any_batch() -> None:
    """Decode rows alone and in a crowd; a chunk whole and cut in two."""
    problem = make_problem([1, 1, 1, 150], [700, 20, 513, 40], group=2)
    crowd = run(problem)
    geometry = problem.geometry
    for row in range(3):
        alone = BatchGeometry.of(
            np.array([0, 1]), geometry.seq_lens[[row]], geometry.tables[[row]], CPU
        )
        single = replace(problem, geometry=alone, query=problem.query[row : row + 1])
        assert torch.equal(run(single)[0], crowd[row])
    cut = 71
    halves = []
    for begin, end in ((3, 3 + cut), (3 + cut, 153)):
        lens = geometry.seq_lens[[3]] - (153 - end)
        part = BatchGeometry.of(np.array([0, end - begin]), lens, geometry.tables[[3]], CPU)
        halves.append(run(replace(problem, geometry=part, query=problem.query[begin:end])))
    assert torch.equal(torch.cat(halves), crowd[3:])


def test_padding_rows_of_a_captured_batch_are_zero() -> None:
    """A plan with more capacity than splits and rows without slots, as a graph has it."""
    problem = make_problem([1, 1], [30, 600])
    tables = problem.geometry.device.tables
    plan = plan_decode(
        torch.tensor([0, 1, 2], dtype=torch.int32),
        torch.tensor([31, 601, 0], dtype=torch.int32),
        torch.cat((tables, tables[:1])),
        None,
        capacity=9,
    )
    query = torch.cat((problem.query, problem.query[:1]))
    output = torch.full(query.shape, float("nan"))
    decode_attention(plan, problem.layer, query, problem.cache, output)
    expected = attend(problem)
    assert (output[:2].double() - expected).norm() / expected.norm() < 2e-5
    assert (output[2] == 0).all()


def test_refusals() -> None:
    spec = make_problem([1], [1]).spec
    backend = TritonAttention()
    assert backend.refuse(spec) is None
    assert "512" in (backend.refuse(replace(spec, head_dim=512)) or "")
    assert "evenly" in (backend.refuse(replace(spec, num_heads=3)) or "")
    assert "CPU" in (backend.refuse(replace(spec, device=torch.device("cuda"))) or "")
    chosen, refusals = select_kernels("triton", spec)
    assert (chosen.name, refusals) == ("triton", [])
