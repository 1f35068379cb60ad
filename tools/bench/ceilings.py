"""The peak memory bandwidth and matrix throughput of the device, measured in the same run."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from kernels.bench.case import Ceilings

_CPU_BYTES = 2**26
_CPU_SIDE = 512


def measure(device: str) -> Ceilings:
    """As the kernels' benches measure it on a GPU; a rough estimate on a CPU, for test runs."""
    if device == "cuda":
        from kernels.bench.measure import measure_ceilings

        return measure_ceilings(torch.device("cuda"))
    source = torch.ones(_CPU_BYTES // 4)
    target = torch.empty_like(source)
    copy_s = _best_s(lambda: target.copy_(source))
    a = torch.randn(_CPU_SIDE, _CPU_SIDE).bfloat16()
    return Ceilings(2 * _CPU_BYTES / copy_s, 2 * _CPU_SIDE**3 / _best_s(lambda: a @ a))


def _best_s(run: Callable[[], object]) -> float:
    run()
    taken = []
    for _ in range(5):
        begun_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun_s)
    return min(taken)
