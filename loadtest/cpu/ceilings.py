"""The peak memory bandwidth and matrix throughput of this machine, measured during the benchmark.

``python -m loadtest.cpu.ceilings`` prints them as JSON. The benchmark runs that as a separate
process, so that no idle thread pool and no gigabyte of operands stays beside the servers. A shared
machine can be twice as fast in one minute as in the next, so the ceilings are measured before and
after each load.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

_READ_BYTES = 2**30  # larger than any cache
_ROWS, _SIDE = 512, 4096  # of the matrix products
_MOST_S = 3.0  # for the tries of one product


@dataclass(frozen=True)
class Ceilings:
    """Each figure is the best of several tries: the server must not be able to exceed a ceiling."""

    read_bytes_per_s: float
    bf16_flops_per_s: float  # of products in bfloat16 or wider
    int8_ops_per_s: float

    def mean(self, other: Ceilings) -> Ceilings:
        """The geometric mean, since figures are scaled by ratios of ceilings."""
        pairs = zip(asdict(self).values(), asdict(other).values(), strict=True)
        return Ceilings(*(math.sqrt(one * two) for one, two in pairs))


def measure_ceilings() -> Ceilings:
    """Measure now, in another process, on all cores."""
    command = [sys.executable, "-m", __name__]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return Ceilings(**json.loads(done.stdout))


def main() -> int:
    """Measure in this process and print one line of JSON."""
    import torch
    from torch.nn.functional import linear

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    numbers = torch.ones(_READ_BYTES // 4)
    read_s = _best_s(numbers.sum, 7)
    del numbers
    a, b = torch.randn(_ROWS, _SIDE), torch.randn(_SIDE, _SIDE)
    rows, weight = a.bfloat16(), b.bfloat16()
    i, j = (torch.randint(-128, 127, m.shape, dtype=torch.int8) for m in (a, b))
    unsigned, scales, zeros = i.view(torch.uint8), torch.ones(_SIDE), torch.zeros(_SIDE).int()
    packed = torch.ops.onednn.qlinear_prepack(j, [_ROWS, _SIDE])
    to_float = (1.0, 0, torch.float32, "none", [], "")
    # Without instructions for a type, a wider one or another of torch's products may be faster.
    dense_s = min(_best_s(lambda: linear(rows, weight), 20), _best_s(lambda: linear(a, b), 20))
    codes_s = min(
        dense_s,
        _best_s(lambda: torch.ops.aten._int_mm(i, j.t()), 20),
        _best_s(
            lambda: torch.ops.onednn.qlinear_pointwise(
                unsigned, 1.0, 0, packed, scales, zeros, None, *to_float
            ),
            20,
        ),
    )
    work = 2 * _ROWS * _SIDE**2
    print(json.dumps(asdict(Ceilings(_READ_BYTES / read_s, work / dense_s, work / codes_s))))
    return 0


def _best_s(run: Callable[[], object], tries: int) -> float:
    """The least time of so many tries, or of as many as fit in some seconds."""
    run()
    taken: list[float] = []
    while len(taken) < tries and sum(taken) < _MOST_S:
        begun_s = time.perf_counter()
        run()
        taken.append(time.perf_counter() - begun_s)
    return min(taken)


if __name__ == "__main__":
    sys.exit(main())
