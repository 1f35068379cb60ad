"""Kernels as they are launched on GPUs with less shared memory than Hopper's, or older ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from kernels.triton import decode, invariant_decode, invariant_prefill, latent, prefill, tiles
from kernels.triton import launch as launcher
from tests.kernels.triton_kernels.interpreted.oracle import Problem, make_problem
from tests.kernels.triton_kernels.interpreted.test_triton_attention import error, run

CONSUMERS, A100, HOPPER = 100 << 10, 164 << 10, 228 << 10  # of a multiprocessor


def launched(
    problem: Problem, module: Any, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> tuple[torch.Tensor, list[dict[str, Any]]]:
    """The output of a problem, and the compile-time arguments of the launches of a kernel."""
    found, launch = [], module.launch

    def noted(which: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        if which.__name__ == kernel:
            found.append(meta)
        launch(which, grid, *args, **meta)

    monkeypatch.setattr(module, "launch", noted)
    return run(problem), found


@pytest.mark.parametrize(
    ("shared", "dim", "dtype", "expected"),
    [
        *((HOPPER, 256, torch.bfloat16, (128, 64)), (HOPPER, 512, torch.bfloat16, (128, 32))),
        *((A100, 256, torch.bfloat16, (128, 64)), (A100, 512, torch.bfloat16, (64, 32))),
        *((CONSUMERS, 256, torch.bfloat16, (64, 32)), (CONSUMERS, 512, torch.bfloat16, (64, 16))),
        *((HOPPER, 256, torch.float32, (128, 32)), (CONSUMERS, 128, torch.float32, (64, 32))),
    ],
)
def test_tiles_of_wide_heads_fit(
    shared: int,
    dim: int,
    dtype: torch.dtype,
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(launcher, "shared_memory_bytes", lambda _: shared)
    sums, tile = min(dim, 256), 64 if dim <= 256 and dtype.itemsize == 2 else 32
    query = torch.empty((1, 1, dim), dtype=dtype, device="meta")
    assert prefill._wide_tile(query, dim, sums, tile) == expected


@pytest.mark.parametrize(
    ("shared", "head_dim", "dtype", "tile"),
    [
        pytest.param(CONSUMERS, 320, torch.float16, (64, 16), marks=pytest.mark.slow),
        (29 << 10, 32, torch.float32, (64, 32)),
        (21 << 10, 32, torch.float32, (64, 16)),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, 20.0)])
@pytest.mark.parametrize("is_bidirectional", [False, True])
def test_smaller_tiles_compute_the_same(
    shared: int,
    head_dim: int,
    dtype: torch.dtype,
    tile: tuple[int, int],
    window: int | None,
    softcap: float | None,
    is_bidirectional: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs have parts of a planned tile, whose borders are within a query's heads."""
    monkeypatch.setattr(launcher, "shared_memory_bytes", lambda _: shared)
    problem = make_problem(
        *([1, 13, 50, 2], [0, 90, 30, 63]),
        num_kv_heads=1,
        group=3,
        head_dim=head_dim,
        block_size=64,
        window=window,
        softcap=softcap,
        dtype=dtype,
        is_bidirectional=is_bidirectional,
    )
    output, metas = launched(problem, prefill, "_prefill_kernel", monkeypatch)
    assert {(meta["ROWS"], meta["TILE"]) for meta in metas} == {tile}
    assert error(output, problem) < (2e-3 if dtype == torch.float16 else 2e-5)


@pytest.mark.parametrize(("shared", "tile"), [(17 << 10, (64, 16)), (12 << 10, (32, 16))])
def test_latents_take_smaller_tiles_where_large_ones_do_not_fit(
    shared: int, tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "shared_memory_bytes", lambda _: shared)
    problem = make_problem(
        *([1, 30, 70], [90, 40, 0]),
        num_kv_heads=1,
        group=5,
        head_dim=80,
        value_dim=64,
        dtype=torch.float16,
    )
    output, metas = launched(problem, latent, "_latent_prefill_kernel", monkeypatch)
    assert {(meta["PAIRS"], meta["TILE"]) for meta in metas} == {tile}
    assert error(output, problem) < 2e-3


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_float8_is_widened_where_a_gpu_does_not_know_it(
    dtype: torch.dtype, invariant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = make_problem(
        *([1, 40, 1], [70, 33, 20]), dtype=dtype, cache_dtype=torch.float8_e4m3fn, seed=5
    )
    known = run(problem, invariant=invariant)
    read: list[torch.dtype] = []
    readable = tiles.readable

    def noted(stored: torch.Tensor) -> torch.Tensor:
        read.append(readable(stored).dtype)
        return readable(stored)

    for module in (decode, prefill, invariant_decode, invariant_prefill):
        monkeypatch.setattr(module, "readable", noted)
    monkeypatch.setattr(tiles, "converts_float8", lambda _: False)
    torch.testing.assert_close(run(problem, invariant=invariant), known, rtol=0, atol=0)
    assert set(read) == {torch.uint8}
