"""Decode steps so small that a program has one tile of keys, which it reads before its turn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from kernels.attention import BatchGeometry
from kernels.chunked import ChunkedAttention
from kernels.triton import decode, plan
from kernels.triton.backend import TritonAttention
from kernels.triton.work import UNIT
from tests.kernels.triton_kernels.interpreted.oracle import Problem, attend, make_problem

PAST = [0, UNIT - 2, UNIT - 1, UNIT, 17 * UNIT + 5, 8 * UNIT - 1]


@pytest.fixture(autouse=True)
def _many_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: 400)


def run(problem: Problem) -> torch.Tensor:
    backend = TritonAttention()
    state = backend.plan(problem.geometry, problem.spec)
    return backend.forward(state, problem.layer, problem.query, problem.cache)


def error(problem: Problem) -> float:
    expected = attend(problem)
    return float((run(problem).double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 1, 64, 16), (1, 4, 80, 32), (2, 7, 96, 64), (1, 16, 128, 128), (3, 2, 128, 64)],
)
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks", "cache_dtype"),
    [
        (None, None, False, None),
        (37, None, True, None),
        (150, 20.0, False, torch.int8),
        (None, 20.0, True, torch.float8_e4m3fn),
    ],
)
def test_texts_equal_the_definition(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    cache_dtype: torch.dtype | None,
) -> None:
    """Among rows with several queries, which have no units."""
    problem = make_problem(
        [3, *(1 for _ in PAST), 2],
        [10, *PAST, 0],
        num_kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        sinks=torch.linspace(-2, 6, kv_heads * group) if has_sinks else None,
        cache_dtype=cache_dtype,
    )
    assert error(problem) < 2e-5


@pytest.mark.parametrize("seed", range(60))
def test_parts_are_of_nearly_the_same_size_and_one_for_a_program(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(seed)
    programs, heads = int(random.integers(1, 80)), int(random.choice([1, 2, 5]))
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: programs)
    queries = random.choice([1, 1, 1, 4], random.integers(1, 20))
    lengths = random.integers(1, random.choice([20, 40]) * UNIT, queries.size)
    lengths = np.maximum(lengths, queries)
    tables = np.zeros((queries.size, 40), np.int64)
    starts = np.concatenate(([0], np.cumsum(queries)))
    geometry = BatchGeometry.of(starts, lengths, tables, torch.device("cpu"))
    bounds = plan.WorkBounds.of(geometry, 1, tiles_only=False, split_size=UNIT)
    made = plan.plan_attention(bounds, geometry.device, (None,), 1, heads)
    if not (queries == 1).any():
        assert not made.units
        return
    parts = made.units[None].parts.numpy()
    units = np.where(queries == 1, -(-lengths // UNIT), 0)
    # A share's size, or a little more.
    share = max(-(-units.sum() * heads // programs), 1)
    sizes = range(share, share + (1 if share < 8 else share // 32) + 1)
    fitting = [size for size in sizes if (-(-units // size)).sum() * heads <= programs]
    assert (parts[-1] >= 0) == bool(fitting)
    if fitting:
        assert (np.diff(parts) == -(-units // fitting[0])).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    problem = make_problem([1] * len(PAST), PAST, head_dim=128, block_size=64, dtype=dtype)
    assert error(problem) < (2e-3 if dtype == torch.float16 else 2e-2)


@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("programs", [400, 3])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_the_steps_tokens_are_read_after_the_turn(
    num_drafts: int,
    programs: int,
    block_size: int,
    cache_dtype: torch.dtype | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prior kernels store them, and only when these have ended they are there. Drafts are rows of
    the same sequence."""
    problem = make_problem(
        [1 + num_drafts] * len(PAST), PAST, block_size=block_size, cache_dtype=cache_dtype
    )
    stored = StoredAtTheTurn(problem, PAST, num_drafts)
    problem = with_a_row_for_each_query(problem)
    expected = attend(problem)
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: programs)
    stored.install(monkeypatch)
    assert (run(problem).double() - expected).norm() < 2e-5 * expected.norm()


@pytest.mark.slow
def test_drafts_of_rows_with_lines_of_their_own_are_read_after_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on ranks that are told of rows only."""
    problem = make_problem([4] * len(PAST), PAST, block_size=64)
    stored = StoredAtTheTurn(problem, PAST, 3)
    problem = with_a_row_for_each_query(problem)
    expected = attend(problem)
    known = problem.geometry
    lines = np.arange(known.slots.size, dtype=np.int32)
    on_device = known.device._replace(
        slots=torch.from_numpy(lines), tables=known.device.tables[known.device.slots.long()]
    )
    problem = replace(problem, geometry=replace(known, slots=lines, device=on_device))
    stored.install(monkeypatch)
    assert (run(problem).double() - expected).norm() < 2e-5 * expected.norm()


def test_drafts_in_chunks_of_a_context_are_read_after_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk = 4 * UNIT
    past = [2 * chunk + 10, chunk - 2, chunk + UNIT - 2, 5]
    problem = make_problem([4] * len(past), past, block_size=64)
    stored = StoredAtTheTurn(problem, past, 3)
    problem = with_a_row_for_each_query(problem)
    spec = replace(problem.spec, chunk_size=chunk)
    layer = replace(problem.layer, chunk_size=chunk)
    backend = ChunkedAttention(TritonAttention())
    state = backend.plan(problem.geometry, spec)
    expected = backend.forward(state, layer, problem.query, problem.cache)
    assert expected.isfinite().all()
    stored.install(monkeypatch)
    made = backend.forward(state, layer, problem.query, problem.cache)
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("lengths", [[65, 4, 4, 4, 4], [39] * 5])
def test_a_captured_grid_computes_all_parts(
    lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Captured for rows of up to 4 tokens each: sequences that share blocks may have more."""
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: 264)
    problem = make_problem([1] * len(lengths), [length - 1 for length in lengths], block_size=4)
    # The host knows bounds, the device the lengths.
    bounds = np.full(len(lengths), 4, np.int32)
    problem = replace(problem, geometry=replace(problem.geometry, seq_lens=bounds))
    expected = attend(
        replace(problem, geometry=replace(problem.geometry, seq_lens=np.array(lengths)))
    )
    backend = TritonAttention()
    state = backend.plan(problem.geometry, problem.spec)
    made = backend.forward(state, problem.layer, problem.query, problem.cache)
    assert (made.double() - expected).norm() < 2e-5 * expected.norm()
    assert not state.units[None].arrivals.any()


class StoredAtTheTurn:
    """Keys and values of a step's tokens, which are in the cache when a program's turn has come.

    Args:
        problem: a row for each sequence.
        past: tokens of each sequence before the step.
        num_drafts: tokens of each sequence in the step, but for one.
    """

    def __init__(self, problem: Problem, past: list[int], num_drafts: int) -> None:
        block_size, tables = problem.cache.keys.shape[2], problem.geometry.tables
        self._places = [
            (int(tables[line, slot // block_size]), slice(None), slot % block_size)
            for line, before in enumerate(past)
            for slot in range(before, before + 1 + num_drafts)
        ]
        self._tensors = [each for each in problem.cache if each is not None]
        self._stored = [[part[place].clone() for place in self._places] for part in self._tensors]

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have each program begin without them."""
        row_of_item = decode._row_of_item

        def begin_program(*given: Any) -> Any:
            self._write(is_there=False)
            return row_of_item(*given)

        monkeypatch.setattr(decode, "_row_of_item", begin_program)
        monkeypatch.setattr(decode, "wait_for_prior_kernels", lambda: self._write(is_there=True))

    def _write(self, *, is_there: bool) -> None:
        for tensor, rows in zip(self._tensors, self._stored, strict=True):
            poison = float("nan") if tensor.is_floating_point() else 0
            for place, row in zip(self._places, rows, strict=True):
                tensor[place] = row if is_there else torch.full_like(row, poison)


def with_a_row_for_each_query(problem: Problem) -> Problem:
    """As drafts are verified by kernels for single queries."""
    known = problem.geometry
    counts = np.diff(known.query_start)
    behind = [count - 1 - place for count in counts for place in range(count)]
    lens = np.repeat(known.seq_lens, counts) - np.array(behind)
    lines, starts = np.repeat(known.slots, counts), np.arange(counts.sum() + 1)
    on_device = known.device._replace(
        query_start=torch.from_numpy(starts).int(),
        seq_lens=torch.from_numpy(lens).int(),
        slots=torch.from_numpy(lines).int(),
    )
    tables = np.repeat(known.tables, counts, axis=0)
    geometry = BatchGeometry(starts, lens, lines, tables, on_device)
    return replace(problem, geometry=geometry)


def test_of_a_source_nothing_is_read_before_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its keys and values may be stored in the same step."""
    problem = make_problem([1, 1], [40, 70])
    problem = replace(problem, layer=replace(problem.layer, reads_source=True))
    expected = attend(problem)
    true = [tensor.clone() for tensor in problem.cache.tensors()]
    row_of_unit = decode._row_of_item

    def begin_program(*given: Any) -> Any:
        for tensor in problem.cache.tensors():
            tensor.fill_(float("nan"))
        return row_of_unit(*given)

    def take_turn() -> None:
        for tensor, values in zip(problem.cache.tensors(), true, strict=True):
            tensor.copy_(values)

    monkeypatch.setattr(decode, "_row_of_item", begin_program)
    monkeypatch.setattr(decode, "wait_for_prior_kernels", take_turn)
    assert (run(problem).double() - expected).norm() < 2e-5 * expected.norm()
