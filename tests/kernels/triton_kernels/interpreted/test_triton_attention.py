"""Paged attention by the kernels, compared with its definition in float64 over poisoned caches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kernels.attention import BatchGeometry, DeviceGeometry
from kernels.reference.attention import ReferenceAttention
from kernels.select import select_kernels
from kernels.triton import decode, plan, prefill
from kernels.triton.backend import TritonAttention
from kernels.triton.work import SPLIT_SIZE, UNIT
from tests.kernels.triton_kernels.interpreted.oracle import Problem, attend, make_problem

CPU = torch.device("cpu")


def run(problem: Problem, *, invariant: bool = False) -> torch.Tensor:
    backend = TritonAttention(invariant=invariant)
    assert backend.refuse(problem.spec) is None
    state = backend.plan(problem.geometry, problem.spec)
    return backend.forward(state, problem.layer, problem.query, problem.cache)


def check(problem: Problem, tolerance: float = 2e-5) -> None:
    assert error(run(problem), problem) < tolerance


def error(output: torch.Tensor, problem: Problem) -> float:
    expected = attend(problem)
    return float((output.double() - expected).norm() / expected.norm())


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


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (20, 20.0)])
@pytest.mark.parametrize(("group", "head_dim"), [(2, 64), (5, 256), (3, 512)])
def test_queries_that_look_ahead_equal_the_definition(
    window: int | None, softcap: float | None, group: int, head_dim: int
) -> None:
    """The tokens of an image see all of it; tiles of queries mix image and text."""
    problem = make_problem(
        [90, 1, 13, 70],
        [0, 66, 90, 63],
        group=group,
        head_dim=head_dim,
        window=window,
        softcap=softcap,
        dtype=torch.float16 if head_dim > 256 else torch.float32,
        is_bidirectional=True,
        seed=head_dim + (window or 0),
    )
    tolerance = 2e-3 if head_dim > 256 else 2e-5
    check(problem, tolerance)
    assert "batch-invariant" in (TritonAttention(invariant=True).refuse(problem.spec) or "")


def test_slopes_are_refused() -> None:
    spec = make_problem([1], [3], slopes=torch.linspace(0, 0.5, 4)).spec
    assert "ALiBi" in (TritonAttention().refuse(spec) or "")


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", [None, torch.int8])
@pytest.mark.parametrize(("head_dim", "window", "softcap"), [(512, None, None), (320, 37, 20.0)])
def test_the_widest_heads_equal_the_definition(
    head_dim: int, window: int | None, softcap: float | None, cache_dtype: torch.dtype | None
) -> None:
    """Two programs compute half of a value each; also for halves that a head does not fill."""
    problem = make_problem(
        [1, 13, 1, 70, 2, 1],
        [0, 90, SPLIT_SIZE + 66, 0, 63, 127],
        num_kv_heads=2,
        group=3,
        head_dim=head_dim,
        block_size=64,
        window=window,
        softcap=softcap,
        dtype=torch.float16,
        cache_dtype=cache_dtype,
    )
    check(problem, 2e-3)
    assert error(run(problem, invariant=True), problem) < 2e-3


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("head_dim", "cache_dtype"), [(64, None), (64, torch.int8), (320, None)])
def test_blocks_behind_a_window_are_somebody_elses(
    head_dim: int, cache_dtype: torch.dtype | None, invariant: bool
) -> None:
    """They have been given back, and may hold what a broken text has left there."""
    window, block_size, past = 37, 16, (150, 331)
    problem = make_problem(
        [1, 70],
        list(past),
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        cache_dtype=cache_dtype,
        dtype=torch.float16,
    )
    expected = attend(problem)
    stored = problem.cache.tensors()[2:] or problem.cache.tensors()
    for row, before in enumerate(past):
        for block in problem.geometry.tables[row, : (before - window + 1) // block_size]:
            for tensor in stored:
                tensor[block] = float("nan")
    actual = run(problem, invariant=invariant)
    assert (actual.double() - expected).norm() < 2e-3 * expected.norm()


@pytest.mark.parametrize(("head_dim", "block_size"), [(64, 128), (128, 64)])
@pytest.mark.parametrize("window", [None, 37, 64, 150])
@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_whole_tiles_are_copied_without_what_is_nobodys(
    head_dim: int,
    block_size: int,
    window: int | None,
    is_bidirectional: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By descriptors of rows (prefill.py): the ends of sequences hold what is no number, and so do
    the blocks behind a window."""
    monkeypatch.setattr(prefill, "COPIES_TILES", True)
    described, describe = [], prefill.tiles_of
    monkeypatch.setattr(
        prefill, "tiles_of", lambda *given: described.append(given) or describe(*given)
    )
    past = [0, 331, 64, 107, 127]
    problem = make_problem(
        [3, 75, 64, 2, 1],
        past,
        group=3,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=None if window else 20.0,
        dtype=torch.float16,
        is_bidirectional=is_bidirectional,
    )
    expected = attend(problem)
    for row, before in enumerate(past):
        behind = max(before - (window or before) + 1, 0) // block_size
        for block in problem.geometry.tables[row, :behind]:
            for tensor in problem.cache.tensors():
                tensor[block] = float("nan")
    assert (run(problem).double() - expected).norm() < 2e-3 * expected.norm()
    assert len(described) == 2


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("programs", [1, 3, 7, 20, 50])
def test_shares_and_parts_cut_rows_anywhere(
    programs: int, window: int | None, has_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row may be one program's, several's, or end where a share ends; padding has no keys."""
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: programs)
    past = [UNIT - 1, UNIT, 3, 8 * UNIT + 12, -1, 4 * UNIT - 1, 90, 0]
    queries = [1, 1, 1, 1, 1, 1, 9, 1]
    sinks = torch.randn(6) if has_sinks else None
    problem = make_problem(
        queries, past, num_kv_heads=2, group=3, block_size=64, window=window, sinks=sinks
    )
    state = TritonAttention().plan(problem.geometry, problem.spec)
    # Seven rows of two heads.
    assert (int(state.units[window].parts[-1]) >= 7) == (programs >= 14)
    backend, expected = TritonAttention(), attend(problem)
    for _ in range(2):  # a layer leaves the plan as it was
        output = backend.forward(state, problem.layer, problem.query, problem.cache)
        assert not output[4].any()
        assert (output.double() - expected).norm() < 2e-5 * expected.norm()
        assert not state.units[window].arrivals.any()


@pytest.mark.parametrize("searched", [1, 2, 4])
def test_many_rows_are_searched_piece_by_piece(
    searched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "persistent_programs", lambda *_: 6)
    monkeypatch.setattr(decode, "_SEARCHED", searched)
    check(make_problem([1, 4, 1, 1, 1], [200, 0, 70, 0, 130], num_kv_heads=2, group=2))


@pytest.mark.parametrize("cache_dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    ("head_dim", "block_size", "window", "softcap", "dtype", "tolerance"),
    [
        (80, 16, None, None, torch.float32, 2e-5),
        (96, 64, 37, None, torch.float16, 2e-3),
        (256, 32, None, 20.0, torch.float32, 2e-5),
    ],
)
def test_codes_are_read_with_their_scales(
    cache_dtype: torch.dtype,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    dtype: torch.dtype,
    tolerance: float,
) -> None:
    problem = make_problem(
        [1, 13, 2, 1],
        [0, 90, 63, SPLIT_SIZE + 20],
        group=3,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        sinks=torch.linspace(-2, 6, 6),
        dtype=dtype,
        cache_dtype=cache_dtype,
    )
    check(problem, tolerance)
    invariant = run(problem, invariant=True)
    assert error(invariant, problem) < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    # The interpreter truncates float32 to bf16 instead of rounding, hence the wide bound.
    tolerance = 2e-3 if dtype == torch.float16 else 2e-2
    check(make_problem([1, 40, 1], [50, 30, 600], dtype=dtype), tolerance)


@pytest.mark.parametrize("softcap", [None, 20.0])
def test_equals_the_reference_backend(softcap: float | None) -> None:
    """With sinks, in one split, in several, and in chunks."""
    problem = make_problem(
        [1, 17, 33, 1], [30, 0, 20, 600], group=4, softcap=softcap, sinks=torch.arange(-3.0, 5.0)
    )
    backend = ReferenceAttention()
    state = backend.plan(problem.geometry, problem.spec)
    expected = backend.forward(state, problem.layer, problem.query, problem.cache)
    torch.testing.assert_close(run(problem), expected, rtol=1e-4, atol=1e-5)
    check(problem)


@pytest.mark.usefixtures("matrix_units")
def test_a_row_has_the_same_bits_in_any_batch() -> None:
    problem = make_problem([1, 1, 1, 15], [700, 20, 513, 40], group=2)
    crowd = run(problem, invariant=True)
    geometry = problem.geometry
    for row in range(3):
        alone = BatchGeometry.of(
            np.array([0, 1]), geometry.seq_lens[[row]], geometry.tables[[row]], CPU
        )
        single = replace(problem, geometry=alone, query=problem.query[row : row + 1])
        assert torch.equal(run(single, invariant=True)[0], crowd[row])


def cut(problem: Problem, ends: list[int]) -> list[torch.Tensor]:
    """The results of the row's chunks that end before these queries."""
    parts, begin = [], 0
    geometry, past = problem.geometry, int(problem.geometry.seq_lens[0]) - len(problem.query)
    for end in ends:
        lens = np.array([past + end])
        part = BatchGeometry.of(np.array([0, end - begin]), lens, geometry.tables, CPU)
        chunk = replace(problem, geometry=part, query=problem.query[begin:end])
        parts.append(run(chunk, invariant=True))
        begin = end
    return parts


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("seed", range(8))
def test_invariant_queries_have_the_same_bits_in_any_chunk(seed: int) -> None:
    """A prompt whole, in random chunks, and its last queries one by one, as in decode."""
    random = np.random.default_rng(seed)
    length = int(random.integers(100, 220))
    problem = make_problem(
        [length],
        [int(random.integers(0, 90))],
        num_kv_heads=1,
        group=int(random.choice([1, 2, 3, 8])),
        window=[None, 20, 100][seed % 3],
        softcap=[None, 9.0][seed % 2],
        dtype=[torch.float32, torch.float16][seed // 2 % 2],
        sinks=None,
        seed=seed,
    )
    whole = run(problem, invariant=True)
    assert error(whole, problem) < 2e-3
    chunks = np.sort(random.choice(np.arange(1, length - 5), 4, replace=False)).tolist()
    for ends in ([*chunks, length], [length - 3, length - 2, length - 1, length]):
        assert torch.equal(torch.cat(cut(problem, ends)), whole)


def test_invariant_batches_are_captured_and_padded() -> None:
    problem = make_problem([1, 3], [30, 300])
    tables = np.zeros((4, 1), np.int32)
    bounds = BatchGeometry.of(np.array([0, 1, 4, 5, 6]), np.ones(4), tables, CPU)
    backend = TritonAttention(invariant=True)
    assert backend.can_replay(bounds, problem.geometry, problem.spec)
    assert not backend.can_replay(problem.geometry, bounds, problem.spec)
    actual = problem.geometry.device
    device = DeviceGeometry(
        torch.tensor([0, 1, 4, 5, 6], dtype=torch.int32),
        torch.cat((actual.seq_lens, torch.zeros(2, dtype=torch.int32))),
        torch.cat((actual.slots, torch.zeros(2, dtype=torch.int32))),
        actual.tables,
    )
    state = backend.plan(captured(bounds, device), problem.spec)
    query = torch.cat((problem.query, problem.query[:2]))
    output = backend.forward(state, problem.layer, query, problem.cache)
    assert error(output[:4], problem) < 2e-5
    assert (output[4:] == 0).all()


def captured(bounds: BatchGeometry, device: DeviceGeometry) -> BatchGeometry:
    """The batch for capturing a CUDA graph: bounds on the host, any batch on the device."""
    return replace(bounds, device=device)


def test_a_captured_batch_serves_those_that_fit() -> None:
    """Bounds only on the host; rows in any lines of the tables; padding rows are 0."""
    backend = TritonAttention()
    problem = make_problem([1, 1], [30, 600], window=300, softcap=5.0)
    spec = replace(problem.spec, windows=(None, 300))
    actual = problem.geometry
    lines = torch.full((9, actual.tables.shape[1]), -1, dtype=torch.int32)
    lines[[7, 2]] = torch.from_numpy(actual.tables)
    bounds = BatchGeometry.of(
        np.arange(5), np.array([512, 512, 256, 256]), np.zeros((4, 1), np.int32), CPU
    )
    assert backend.can_replay(bounds, actual, spec)
    device = DeviceGeometry(
        torch.arange(5, dtype=torch.int32),
        torch.tensor([31, 601, 0, 0], dtype=torch.int32),
        torch.tensor([7, 2, 0, 0], dtype=torch.int32),
        lines,
    )
    query = torch.cat((problem.query, problem.query))
    state = backend.plan(captured(bounds, device), spec)
    output = backend.forward(state, problem.layer, query, problem.cache)
    assert error(output[:2], problem) < 2e-5
    assert (output[2:] == 0).all()


@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "fits", "fits_in_shares"),
    [
        ([1, 1, 1, 1], [512, 512, 256, 256], True, True),
        ([1], [768], True, True),  # three splits, plus one for each of three padding rows
        ([1], [769], False, True),
        ([1, 1, 1, 1], [769, 1, 1, 1], False, True),
        ([1] * 5, [1] * 5, False, False),
        ([1, 2], [1, 2], False, False),
    ],
)
def test_what_fits_a_captured_batch(
    query_lens: list[int], seq_lens: list[int], fits: bool, fits_in_shares: bool
) -> None:
    """Shares hold any number of keys, splits of a fixed size do not."""
    spec = make_problem([1], [1]).spec
    no_tables = np.zeros((5, 1), np.int32)
    bounds = BatchGeometry.of(np.arange(5), np.array([512, 512, 256, 256]), no_tables, CPU)
    starts = np.concatenate(([0], np.cumsum(query_lens)))
    actual = BatchGeometry.of(starts, np.array(seq_lens), no_tables, CPU)
    assert TritonAttention(invariant=True).can_replay(bounds, actual, spec) == fits
    assert TritonAttention().can_replay(bounds, actual, spec) == fits_in_shares


def test_a_captured_batch_of_chunks() -> None:
    """Fewer tiles than the bound, in other rows than those for which the bounds were given."""
    problem = make_problem([150, 1, 3], [40, 500, 9], group=2)
    bounds = BatchGeometry.of(
        np.array([0, 1, 300, 301]), np.array([1024, 299, 1]), np.zeros((3, 1), np.int32), CPU
    )
    assert TritonAttention().can_replay(bounds, problem.geometry, problem.spec)
    state = TritonAttention().plan(captured(bounds, problem.geometry.device), problem.spec)
    output = TritonAttention().forward(state, problem.layer, problem.query, problem.cache)
    assert error(output, problem) < 2e-5


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("window", [None, 37])
def test_tokens_that_pad_a_captured_chunk_are_zero(window: int | None, *, invariant: bool) -> None:
    """They are a row's that ends at position 0; other rows have none. Padding reads no block."""
    problem = make_problem([70, 1], [40, 500], group=2, window=window)
    backend, own, num_padding = TritonAttention(invariant=invariant), problem.geometry.device, 150
    device = own._replace(
        query_start=torch.tensor([0, 70, 71, 71, 71 + num_padding], dtype=torch.int32),
        seq_lens=torch.cat((own.seq_lens, torch.zeros(2, dtype=torch.int32))),
        slots=torch.cat((own.slots, torch.tensor([2, 2], dtype=torch.int32))),
        tables=torch.cat((own.tables, torch.full_like(own.tables[:1], -(2**20)))),
    )
    bounds = BatchGeometry.of(
        np.array([0, 221, 223, 225, 226]),
        np.array([221, 2, 2, 1024]),
        np.zeros((4, 1), np.int32),
        CPU,
    )
    state = backend.plan(captured(bounds, device), problem.spec)
    query = torch.cat((problem.query, problem.query.new_full((num_padding, 4, 64), float("nan"))))
    output = backend.forward(state, problem.layer, query, problem.cache)
    assert error(output[:71], problem) < 2e-5
    assert (output[71:] == 0).all()


def test_refusals() -> None:
    spec = make_problem([1], [1]).spec
    backend = TritonAttention()
    assert backend.refuse(spec) is None
    assert "640" in (backend.refuse(replace(spec, head_dim=640, dtype=torch.float16)) or "")
    assert "512" in (backend.refuse(replace(spec, head_dim=512, dtype=torch.float32)) or "")
    assert backend.refuse(replace(spec, head_dim=512, dtype=torch.bfloat16)) is None
    assert "evenly" in (backend.refuse(replace(spec, num_heads=3)) or "")
    assert "CPU" in (backend.refuse(replace(spec, device=torch.device("cuda"))) or "")
    chosen, refusals = select_kernels("triton", spec)
    assert (chosen.name, refusals) == ("triton", [])
