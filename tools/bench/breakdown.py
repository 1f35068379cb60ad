"""A breakdown of decode steps: the longest kernels, and the device's utilisation.

Steps are timed first without and then with torch's profiler, which slows down the host. If the
device is busy for most of the unprofiled time, it is not waiting for the host.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tools.bench.session import TINY, Session, load_core, parser, print_row, timed
from tools.bench.steps import begin_decoding

_CASES, _TINY_CASES = [(1, 1024), (64, 1024), (256, 1024)], [(2, 24)]
_STEPS = 8  # timed, and the same number profiled
_MAX_KERNELS = 8
_NAME_WIDTH = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each batch, and one for each of its longest kernels."""
    options = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b").parse_args(argv)
    is_tiny = options.model == TINY
    session = Session(load_core(options, max_model_len=2048))
    session.submit([7] * 16, 4)
    session.finish()
    for rows, context in _TINY_CASES if is_tiny else _CASES:
        for row in _break_down(session, options, rows, context):
            print_row(row)
    return 0


def _break_down(
    session: Session, options: argparse.Namespace, rows: int, context: int
) -> Iterator[dict[str, Any]]:
    name = f"{options.model} {rows} x {context}"
    if not begin_decoding(session, rows, context, 2 * _STEPS):
        yield {"case": name, "skipped": "the KV cache is too small"}
        return
    with timed(options.device) as seconds:
        for _ in range(_STEPS):
            session.step()
    step_us = seconds[0] / _STEPS * 1e6
    activity = ProfilerActivity.CUDA if options.device == "cuda" else ProfilerActivity.CPU
    with (
        profile(activities=[activity], acc_events=True) as recorded,
        timed(options.device) as profiled,
    ):
        for _ in range(_STEPS):
            session.step()
    session.abort()
    kernels = [(_time_us(event), event) for event in recorded.key_averages()]
    kernels = sorted(kernels, key=lambda kernel: -kernel[0])
    if options.device == "cuda":
        ranges = [event.time_range for event in recorded.events() or () if _is_kernel(event)]
        busy_us = covered([(each.start, each.end) for each in ranges]) / _STEPS
    else:
        busy_us = sum(time_us for time_us, _ in kernels) / _STEPS
    yield {
        "case": name,
        "time_us": step_us,
        "profiled_us": profiled[0] / _STEPS * 1e6,  # with the profiler's own time
        "busy_us": busy_us,
        "busy_share": busy_us / step_us,
    }
    for time_us, event in kernels[:_MAX_KERNELS]:
        yield {
            "case": f"  {event.key[:_NAME_WIDTH]}",
            "time_us": time_us / _STEPS,
            "launches": event.count / _STEPS,
            "share_of_step": time_us / _STEPS / step_us,
        }


def covered(ranges: Iterable[tuple[float, float]]) -> float:
    """The length of the union of ``ranges``, since the ranges of kernels may overlap."""
    total, reached = 0.0, float("-inf")
    for begin, end in sorted(ranges):
        total += max(0.0, end - max(begin, reached))
        reached = max(reached, end)
    return total


def _time_us(event: Any) -> float:
    """The time of all launches of a kernel; on a CPU, an operation's own time."""
    return event.self_device_time_total if _is_kernel(event) else event.self_cpu_time_total


def _is_kernel(event: Any) -> bool:
    return event.device_type.name == "CUDA"


if __name__ == "__main__":
    sys.exit(main())
