"""Measure times on a GPU, and its limits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from triton import testing

from kernels.bench.case import Ceilings

_REPEATED_MS = 20  # per measurement, of which the library takes ten
_COPY_BYTES = 2**31
_MATMUL_SIZE = 8192


def measure_ceilings(device: torch.device) -> Ceilings:
    """Measure a copy of 2 GiB and a product of 8192 x 8192 x 8192."""
    source = torch.randint(0, 255, (_COPY_BYTES,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    # Not captured: a graph's copy runs on the copy engine, which is slower than the memory.
    copy_s = median_eager_s(partial(target.copy_, source))
    del source, target
    shape = (_MATMUL_SIZE, _MATMUL_SIZE)
    a, b = (torch.randn(shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    matmul_s = median_eager_s(lambda: torch.mm(a, b, out=product))
    return Ceilings(2 * _COPY_BYTES / copy_s, 2 * _MATMUL_SIZE**3 / matmul_s)


def median_s(run: Callable[[], object]) -> float:
    """Return the seconds of a run as replays of a CUDA graph, launches included."""
    return _seconds(testing.do_bench_cudagraph(run, rep=_REPEATED_MS, return_mode="median"))


def median_eager_s(run: Callable[[], object]) -> float:
    """Return the seconds of one run without a graph, for runs that synchronise with the device."""
    return _seconds(testing.do_bench(run, warmup=10, rep=5 * _REPEATED_MS, return_mode="median"))


def _seconds(milliseconds: object) -> float:
    assert isinstance(milliseconds, float)  # a list if quantiles are requested
    return milliseconds / 1e3
