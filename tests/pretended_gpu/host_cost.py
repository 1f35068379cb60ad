"""What a launch takes the host before the driver is called, by Triton's way and as a known one.

    python -m tests.pretended_gpu.host_cost [CASE ...]

Needs no GPU: kernels are compiled for sm_90 once, by cases of ``tests.kernels.triton_kernels``, and
then launched without a driver. Prints a line of JSON for each kernel, the least of some batches,
and one for all.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import triton

from kernels.triton.known_launches import KnownLaunches
from tests.kernels.triton_kernels import aot

_CASES = ("prefill-llama-8b", "layer-llama-8b", "moe-decode-gpt-oss-20b")
_BATCHES, _LAUNCHES = 30, 50


class _Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


class _NoDriver:
    """A kernel whose launches end where the driver would be called."""

    def __init__(self, kernel: Any) -> None:
        self.fn, self.params = kernel.fn, kernel.params
        self.pre_run_hooks = kernel.pre_run_hooks

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., _NoDriver]:
        return lambda *args, **meta: self


def launches_of(cases: tuple[str, ...]) -> dict[str, _Launch]:
    """The first launch of each kernel in some cases."""
    from tests.kernels.triton_kernels.aot_cases import CASES

    found: dict[str, _Launch] = {}

    def note(kernel: Any, grid: tuple[int, ...], *args: Any, **meta: Any) -> None:
        found.setdefault(kernel.__name__, _Launch(kernel, grid, args, {**meta, "launch_pdl": True}))

    for module in aot.launching_modules():
        module.launch = note
    for case in cases:
        CASES[case]()
    return found


def least_us(run: Callable[[], object]) -> float:
    """The least mean time of a batch of calls, in microseconds."""
    taken = []
    for _ in range(_BATCHES):
        begun = time.perf_counter()
        for _ in range(_LAUNCHES):
            run()
        taken.append((time.perf_counter() - begun) / _LAUNCHES)
    return min(taken) * 1e6


def main() -> int:
    """Return the exit status."""
    triton.runtime.driver.set_active(aot.Target())
    sums = {"triton_us": 0.0, "known_us": 0.0}
    for name, each in launches_of(tuple(sys.argv[1:]) or _CASES).items():
        kernel, grid, args, meta = each
        known = partial(KnownLaunches().launch, _NoDriver(kernel), 0, grid, args)
        row = {
            "triton_us": least_us(partial(kernel.warmup, *args, grid=grid, **meta)),
            "known_us": least_us(partial(known, meta)),
        }
        sums = {key: value + row[key] for key, value in sums.items()}
        print(json.dumps({"case": name, **{key: round(us, 1) for key, us in row.items()}}))
    print(json.dumps({"case": "all", **{key: round(us, 1) for key, us in sums.items()}}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
