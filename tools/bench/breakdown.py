"""A breakdown of steps: the longest kernels, and the device's utilisation.

Decode steps at several batch sizes, and a prompt of 8,192 tokens.

Steps are timed first without and then with torch's profiler, which slows down the host. If the
device is busy for most of the unprofiled time, it is not waiting for the host.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch.profiler import ProfilerActivity, profile

from tools.bench.session import MAX_STEP_TOKENS, TINY, Session, load_core, parser, print_row, timed
from tools.bench.steps import begin_decoding, random_ids

_CASES, _TINY_CASES = [(1, 1024), (64, 1024), (256, 1024)], [(2, 24)]
_TINY_PROMPT = 96
_STEPS = 8  # timed, and the same number profiled
_MAX_KERNELS = 8
_NAME_WIDTH = 60


def main(argv: Sequence[str] | None = None) -> int:
    """Print a line of JSON for each kind of step, and one for each of its longest kernels."""
    options = parser(__doc__, "qwen3-0.6b", "llama-3.1-8b").parse_args(argv)
    is_tiny = options.model == TINY
    length = _TINY_PROMPT if is_tiny else MAX_STEP_TOKENS
    session = Session(load_core(options, max_model_len=length + 64))
    session.submit([7] * 16, 4)
    session.finish()
    for rows, context in _TINY_CASES if is_tiny else _CASES:
        for row in _of_decoding(session, options, rows, context):
            print_row(row)
    for row in _of_a_prompt(session, options, length):
        print_row(row)
    return 0


def _of_decoding(
    session: Session, options: argparse.Namespace, rows: int, context: int
) -> Iterator[dict[str, Any]]:
    name = f"{options.model} {rows} x {context}"
    if not begin_decoding(session, rows, context, 2 * _STEPS):
        yield {"case": name, "skipped": "the KV cache is too small"}
        return

    def run() -> None:
        for _ in range(_STEPS):
            session.step()

    yield from _break_down(name, run, _STEPS, options.device)
    session.abort()


def _of_a_prompt(
    session: Session, options: argparse.Namespace, length: int
) -> Iterator[dict[str, Any]]:
    def run() -> None:
        session.submit(random_ids(length, rng), 1)
        session.finish()

    rng = random.Random(length)
    run()  # warm-up
    yield from _break_down(f"{options.model} prefill {length}", run, 1, options.device)


def _break_down(
    name: str, run: Callable[[], None], num_steps: int, device: str
) -> Iterator[dict[str, Any]]:
    """Time ``run``, which takes ``num_steps`` steps, without and then with the profiler."""
    with timed(device) as seconds:
        run()
    step_us = seconds[0] / num_steps * 1e6
    activity = ProfilerActivity.CUDA if device == "cuda" else ProfilerActivity.CPU
    with profile(activities=[activity], acc_events=True) as recorded, timed(device) as profiled:
        run()
    kernels = [(_time_us(event), event) for event in recorded.key_averages()]
    kernels = sorted(kernels, key=lambda kernel: -kernel[0])
    if device == "cuda":
        ranges = [event.time_range for event in recorded.events() or () if _is_kernel(event)]
        busy_us = covered([(each.start, each.end) for each in ranges]) / num_steps
    else:
        busy_us = sum(time_us for time_us, _ in kernels) / num_steps
    yield {
        "case": name,
        "time_us": step_us,
        "profiled_us": profiled[0] / num_steps * 1e6,  # with the profiler's own time
        "busy_us": busy_us,
        "busy_share": busy_us / step_us,
    }
    for time_us, event in kernels[:_MAX_KERNELS]:
        yield {
            "case": f"  {event.key[:_NAME_WIDTH]}",
            "time_us": time_us / num_steps,
            "launches": event.count / num_steps,
            "share_of_step": time_us / num_steps / step_us,
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
