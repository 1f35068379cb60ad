"""Paged attention on a CPU, compared with its definition in float64 over poisoned caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import BatchGeometry
from kernels.cpu.backend import CpuAttention
from kernels.cpu.native import build
from kernels.select import select_kernels
from tests.kernels.neighbours import side_by_side
from tests.kernels.triton_kernels.interpreted.oracle import Problem, attend, make_problem

CPU = torch.device("cpu")
# Relative to the outputs' norm, which may be a tenth of that of the values they average.
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 6e-3}

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")


def run(problem: Problem) -> torch.Tensor:
    backend = CpuAttention()
    assert backend.refuse(problem.spec) is None
    state = backend.plan(problem.geometry, problem.spec)
    return backend.forward(state, problem.layer, problem.query, problem.cache)


def check(problem: Problem) -> None:
    expected = attend(problem)
    error = (run(problem).double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[problem.spec.dtype]


@given(
    rows=st.lists(
        st.tuples(st.integers(1, 80) | st.just(1), st.integers(0, 150)), min_size=1, max_size=5
    ),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 10),
    head_dim=st.sampled_from([8, 24, 64, 72, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 8, 16, 24, 128]),
    window=st.none() | st.integers(1, 200),
    softcap=st.none() | st.just(20.0),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    cache_dtype=st.sampled_from([None, torch.int8, torch.float8_e4m3fn]),
    has_neighbours=st.booleans(),
    is_bidirectional=st.booleans(),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_mixed_batches_equal_the_definition(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    has_slopes: bool,
    dtype: torch.dtype,
    cache_dtype: torch.dtype | None,
    has_neighbours: bool,
    is_bidirectional: bool,
    seed: int,
) -> None:
    """Decode rows, chunks with and without a past, and odd lengths, in one batch.

    A layer's blocks are adjacent, or interleaved with those of others.
    """
    sinks = torch.linspace(-2, 6, kv_heads * group) if has_sinks else None
    problem = make_problem(
        [queries for queries, _ in rows],
        [past for _, past in rows],
        num_kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        dtype=dtype,
        sinks=sinks,
        slopes=torch.linspace(0, 0.5, kv_heads * group) if has_slopes else None,
        cache_dtype=cache_dtype,
        is_bidirectional=is_bidirectional,
        seed=seed,
    )
    check(replace(problem, cache=side_by_side(problem.cache)) if has_neighbours else problem)


@pytest.mark.parametrize(
    ("kv_heads", "group"), [(1, 1), (1, 20), (2, 9), (3, 5), (7, 3), (8, 4), (20, 1)]
)
@pytest.mark.parametrize(("block_size", "head_dim"), [(16, 64), (8, 40)])
@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize("has_neighbours", [False, True])
def test_single_queries_of_all_head_counts(
    kv_heads: int,
    group: int,
    block_size: int,
    head_dim: int,
    window: int | None,
    has_neighbours: bool,
) -> None:
    """Heads that fill half a tile, a tile, or many; blocks of a tile's size, and others."""
    problem = make_problem(
        [1] * 6,
        [0, 15, 16, 150, 333, 520],
        num_kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=30.0 if group % 2 else None,
        dtype=torch.bfloat16,
        sinks=torch.linspace(-2, 6, kv_heads * group),
    )
    check(replace(problem, cache=side_by_side(problem.cache)) if has_neighbours else problem)


@pytest.mark.parametrize("factor", [0.0, 1e-3, 60.0])
def test_queries_of_any_size(factor: float) -> None:
    """Either all tokens have equal weight, or one has all of it: weights from the smallest to 1."""
    problem = make_problem([1, 1], [40, 700], group=4, dtype=torch.bfloat16)
    check(replace(problem, query=problem.query * factor))


@pytest.mark.parametrize(("group", "head_dim", "value_dim"), [(16, 576, 512), (5, 24, 8)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_parts_of_keys(
    group: int, head_dim: int, value_dim: int, dtype: torch.dtype
) -> None:
    """Latent attention: decode rows in one split and in two, chunks with and without a past."""
    problem = make_problem(
        [1, 1, 9, 70, 1],
        [0, 600, 70, 0, 33],
        num_kv_heads=1,
        group=group,
        head_dim=head_dim,
        value_dim=value_dim,
        dtype=dtype,
    )
    check(problem)


CACHE_DTYPES = [None, torch.int8, torch.float8_e4m3fn]


@pytest.mark.parametrize("window", [None, 600])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
@pytest.mark.parametrize("has_slopes", [False, True])
def test_long_rows_are_split_and_joined(
    window: int | None, dtype: torch.dtype, cache_dtype: torch.dtype | None, has_slopes: bool
) -> None:
    """Lengths around the split size, one split to several, beside short rows and a chunk."""
    problem = make_problem(
        [1, 1, 1, 1, 3],
        [511, 512, 3, 1100, 1021],
        group=3,
        window=window,
        slopes=torch.linspace(0.001, 0.1, 6) if has_slopes else None,
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    check(problem)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES)
def test_a_row_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, cache_dtype: torch.dtype | None
) -> None:
    """Decode rows alone and in a batch, on one thread and two; a chunk whole and split in two."""
    problem = make_problem(
        [1, 1, 1, 150], [1300, 20, 513, 40], group=2, dtype=dtype, cache_dtype=cache_dtype
    )
    crowd = run(problem)
    geometry = problem.geometry
    threads = torch.get_num_threads()
    for row in range(3):
        alone = BatchGeometry.of(
            np.array([0, 1]), geometry.seq_lens[[row]], geometry.tables[[row]], CPU
        )
        single = replace(problem, geometry=alone, query=problem.query[row : row + 1])
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(run(single)[0], crowd[row])
    torch.set_num_threads(threads)
    cut = 71
    halves = []
    for begin, end in ((3, 3 + cut), (3 + cut, 153)):
        lens = geometry.seq_lens[[3]] - (153 - end)
        part = BatchGeometry.of(np.array([0, end - begin]), lens, geometry.tables[[3]], CPU)
        halves.append(run(replace(problem, geometry=part, query=problem.query[begin:end])))
    assert torch.equal(torch.cat(halves), crowd[3:])


def test_a_broken_row_harms_no_other() -> None:
    problem = make_problem([1, 20, 1], [60, 0, 30])
    healthy = run(problem)
    block = problem.geometry.tables[0, 0]
    problem.cache.keys[block] = float("nan")
    broken = run(problem)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], healthy[1:])


@pytest.mark.parametrize("part", ["key_scales", "value_scales"])
@pytest.mark.parametrize("cache_dtype", CACHE_DTYPES[1:])
def test_a_broken_row_of_codes_harms_no_other(part: str, cache_dtype: torch.dtype) -> None:
    """Also with integer products, which have no nan."""
    problem = make_problem([1, 20, 1], [60, 0, 30], dtype=torch.bfloat16, cache_dtype=cache_dtype)
    healthy = run(problem)
    getattr(problem.cache, part)[problem.geometry.tables[0, 0]] = float("nan")
    broken = run(problem)
    assert broken[0].isnan().all()
    assert torch.equal(broken[1:], healthy[1:])


def test_refusals() -> None:
    spec = make_problem([1], [1]).spec
    backend = CpuAttention()
    assert backend.refuse(spec) is None
    assert "multiple of 8" in (backend.refuse(replace(spec, head_dim=68)) or "")
    assert "evenly" in (backend.refuse(replace(spec, num_heads=3)) or "")
    assert "float16" in (backend.refuse(replace(spec, dtype=torch.float16)) or "")
    assert select_kernels("auto", spec)[0].name == "cpu"
    chosen, refusals = select_kernels("auto", replace(spec, dtype=torch.float16))
    assert chosen.name == "reference"
    assert refusals[-1] == ("cpu", "no kernel for torch.float16")


def test_without_a_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> None:
        raise build.BuildError("no C++ compiler")

    monkeypatch.setattr(build, "open_library", refuse)
    chosen, refusals = select_kernels("auto", make_problem([1], [1]).spec)
    assert chosen.name == "reference"
    assert refusals[-1] == ("cpu", "no C++ compiler")
