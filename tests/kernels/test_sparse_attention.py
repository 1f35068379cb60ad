"""Attention to a selection of positions, by the reference and by the CPU's kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from kernels.attention import BatchGeometry
from kernels.cpu.native import build
from kernels.reference import sparse as reference
from kernels.select import NoKernelsError, select_kernels
from kernels.sparse import IndexQuery
from tests.kernels import sparse_cases
from tests.kernels.sparse_cases import Problem, make_problem

NAMES = [
    "reference",
    pytest.param("cpu", marks=pytest.mark.skipif(build.load() is None, reason="no native library")),
]
BATCHES = {
    "decode": ([1, 1, 1], [300, 0, 20]),
    "all long": ([1, 3], [30, 40]),
    "mixed": ([3, 1, 6, 2, 30], [90, 4, 0, 11, 0]),
    "all short": ([5, 1], [0, 11]),
}


def run(problem: Problem, name: str, *, invariant: bool = False) -> torch.Tensor:
    kernels, _ = select_kernels(name, problem.spec, invariant=invariant)
    state = kernels.attention.plan(problem.geometry, problem.spec)
    assert kernels.attention.selects(state) == (max(problem.ends) > problem.spec.selection.top_k)
    if kernels.attention.selects(state):
        kernels.attention.select(state, problem.index, problem.cache.index_keys)
    return kernels.attention.forward(state, sparse_cases.layer(), problem.query, problem.cache)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_the_definition(name: str, batch: str, dtype: torch.dtype) -> None:
    """Behind the rows' ends the cache holds nan."""
    problem = make_problem(*BATCHES[batch], top_k=12, dtype=dtype)
    actual, expected = run(problem, name), sparse_cases.attend(problem)
    assert actual.dtype is dtype
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 5e-3)


@pytest.mark.parametrize("name", NAMES)
def test_of_equal_scores_the_earlier_positions_are_selected(name: str) -> None:
    problem = make_problem([1, 4], [400, 90], top_k=20, rounded=True, index_dim=4, index_heads=2)
    operations = select_kernels(name, problem.spec)[0].operations
    rows = torch.tensor(problem.rows, dtype=torch.int32)
    ends = torch.tensor(problem.ends, dtype=torch.int32)
    tokens = problem.geometry.device._replace(seq_lens=ends, slots=rows)
    slots = torch.full((5, 20), -1, dtype=torch.int32)
    operations.select_slots(problem.index, problem.cache.index_keys, tokens, 401, slots)
    assert slots.tolist() == [sparse_cases.selected(problem, token) for token in range(5)]


@pytest.mark.parametrize("name", NAMES)
def test_a_negative_zero_equals_zero_and_no_number_is_the_least(name: str) -> None:
    """Weights of 0 and below make both zeros; a fault in a text must not take others along."""
    problem = make_problem([1], [30], top_k=3, rounded=True, index_heads=1)
    query = torch.ones(1, 1, 16)
    keys = problem.cache.index_keys.view(-1, 16)
    slots = _slots(problem)
    keys[slots] = torch.tensor([-1.0, 1.0]).repeat(16)[:31, None].expand(-1, 16)
    keys[slots[0]] = float("nan")
    operations = select_kernels(name, problem.spec)[0].operations
    found = torch.zeros(1, 3, dtype=torch.int32)
    index = IndexQuery(query, torch.full((1, 1), -1.0))
    own = problem.geometry.device
    operations.select_slots(index, problem.cache.index_keys, own, 31, found)
    assert found[0].tolist() == [slots[2], slots[4], slots[6]]


@pytest.mark.parametrize("invariant", [False, True])
def test_a_cpu_selects_the_same_in_any_company(invariant: bool) -> None:
    """The same slots always; with --batch-invariant the same bits in any chunk, too."""
    if build.load() is None:
        pytest.skip("no native library")
    together = make_problem([7, 1, 1], [60, 40, 3], top_k=16)
    whole = run(together, "cpu", invariant=invariant)
    begin = 0
    for row, count in enumerate((7, 1, 1)):
        for length in range(1, count + 1) if invariant else (count,):
            part = slice(begin, begin + length)
            alone = together._replace(
                geometry=_rows(together, row, length, count),
                index=IndexQuery(*(each[part] for each in together.index)),
                query=together.query[part],
                ends=together.ends[part],
            )
            found = run(alone, "cpu", invariant=invariant)
            same = torch.equal if invariant else torch.allclose
            assert same(found, whole[part])
        begin += count


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_index_keys_and_weights_equal_the_definition(name: str, dtype: torch.dtype) -> None:
    problem = make_problem([1], [30], top_k=3)
    operations = select_kernels(name, problem.spec)[0].operations
    random = torch.Generator().manual_seed(0)
    query = torch.randn(7, 5, 24, generator=random).to(dtype)
    key, by = (torch.randn(*shape, generator=random).to(dtype) for shape in ((7, 24), (2, 24)))
    angles = torch.rand(7, 1, 4, generator=random) * 100
    rotation, slots = (angles.cos(), angles.sin()), torch.tensor([3, 0, -1, 17, 5, 9, 30])
    keys, turned = torch.zeros(4, 1, 8, 24, dtype=dtype), query.clone()
    operations.index_rope_store(turned, key, (by[0], by[1]), 1e-6, rotation, keys, slots)
    wide = key.double()
    variance = wide.var(1, correction=0, keepdim=True)
    normed = (wide - wide.mean(1, keepdim=True)) / (variance + 1e-6).sqrt()
    normed = (normed * by[0].double() + by[1].double()).to(dtype)
    near = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.04, "rtol": 0.02}
    for old, new in ((query, turned), (normed.unsqueeze(1), keys.view(-1, 1, 24)[slots])):
        cos, sin = (part.double() for part in rotation)
        first, second = old[..., :4].double(), old[..., 4:8].double()
        expected = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        expected = torch.cat((expected, old[..., 8:].double()), dim=-1)
        stored = slots >= 0
        torch.testing.assert_close(new[stored].double(), expected[stored], **near)
    assert not keys.view(-1, 24)[31].any()  # of a padding token nothing is stored
    x, weight = torch.randn(9, 50, generator=random).to(dtype), torch.randn(6, 50)
    found = operations.index_weights(x, weight)
    torch.testing.assert_close(found.double(), x.double() @ weight.double().T, atol=1e-4, rtol=1e-5)
    assert found.dtype is torch.float32


def test_lengths_are_cut_to_what_is_selected() -> None:
    lens = torch.tensor([0, 3, 12, 13, 99], dtype=torch.int32)
    for name in ("reference", *(["cpu"] if build.load() else [])):
        operations = select_kernels(name, make_problem([1], [9], top_k=3).spec)[0].operations
        assert operations.selected_lengths(lens, 12).tolist() == [0, 3, 12, 12, 12]
    assert reference.selected_lengths(lens, 12).dtype is torch.int32


def test_a_recorded_step_serves_all_lengths_up_to_its_bounds() -> None:
    problem = make_problem([1, 1], [300, 20], top_k=12)
    if build.load() is None:
        pytest.skip("no native library")
    attention = select_kernels("cpu", problem.spec)[0].attention
    short = make_problem([1, 1], [9, 3], top_k=12).geometry
    assert attention.can_replay(problem.geometry, short, problem.spec)
    assert not attention.can_replay(short, problem.geometry, problem.spec)  # nothing is selected


def test_only_latents_are_selected() -> None:
    spec = make_problem([1], [9], top_k=3).spec
    with pytest.raises(NoKernelsError, match="selected in latent attention only"):
        select_kernels("reference", type(spec)(**{**_fields(spec), "value_dim": None}))


def _fields(spec: object) -> dict:
    return {name: getattr(spec, name) for name in spec.__dataclass_fields__}


def _slots(problem: Problem) -> torch.Tensor:
    table, size = problem.geometry.tables[0], problem.spec.block_size
    return torch.tensor([int(table[p // size]) * size + p % size for p in range(problem.ends[-1])])


def _rows(problem: Problem, row: int, length: int, count: int) -> BatchGeometry:
    """The first ``length`` of a row's ``count`` queries alone."""
    whole = problem.geometry
    lens = whole.seq_lens[row : row + 1] - (count - length)
    tables = whole.tables[row : row + 1]
    return BatchGeometry.of(np.array([0, length]), lens, tables, problem.spec.device)
