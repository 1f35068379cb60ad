"""Samples the memory, files, threads and progress of a server's processes."""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from loadtest.machine import process_tree

_WARM_UP = 0.1  # share of the run to skip while caches fill
_EDGE = 0.2  # share of the rest: its first and last samples are compared
_ALLOWED_GROWTH = 4  # files or threads that may be added: client connections come and go


class Sample(NamedTuple):
    """The state of a server at one time."""

    at_s: float
    num_answered: int  # requests
    rss_bytes: int  # of all its processes
    num_files: int  # open file descriptors
    num_threads: int
    num_tokens: float  # tokens generated, by the server's own count
    num_open: float  # sequences accepted and not yet ended, by the server's own count


def take_sample(pid: int, at_s: float, num_answered: int, figures: Mapping[str, float]) -> Sample:
    """Sample the process tree of ``pid``; ``figures`` are the server's metrics."""
    held = [_process_resources(member) for member in process_tree(pid)]
    rss_bytes, num_files, num_threads = (sum(column) for column in zip(*held, strict=True))
    ended = sum(figures.get(f"request_{how}", 0.0) for how in ("success", "failed", "aborted"))
    return Sample(
        at_s=at_s,
        num_answered=num_answered,
        rss_bytes=rss_bytes,
        num_files=num_files,
        num_threads=num_threads,
        num_tokens=figures.get("generation_tokens", 0.0),
        num_open=figures.get("request_prompt_tokens_count", 0.0) - ended,
    )


def growth_per_1000(samples: Sequence[Sample]) -> float:
    """Bytes of memory growth per thousand requests.

    This is the slope of a least-squares line that leaves out the first tenth of the run; 0 if
    nothing was answered.
    """
    rest = _after_warm_up(samples)
    count = len(rest)
    if count < 2:
        return 0.0
    mean_x = sum(sample.num_answered for sample in rest) / count
    mean_y = sum(sample.rss_bytes for sample in rest) / count
    spread = sum((sample.num_answered - mean_x) ** 2 for sample in rest)
    shared = sum((s.num_answered - mean_x) * (s.rss_bytes - mean_y) for s in rest)
    return 1000.0 * shared / spread if spread else 0.0


def leaks(samples: Sequence[Sample]) -> list[str]:
    """Describe growth in file descriptors and threads between the warm-up and the end."""
    rest = _after_warm_up(samples)
    edge = max(1, round(_EDGE * len(rest)))
    found = []
    for name in ("num_files", "num_threads"):
        first = max((getattr(sample, name) for sample in rest[:edge]), default=0)
        last = max((getattr(sample, name) for sample in rest[-edge:]), default=0)
        if last > first + _ALLOWED_GROWTH:
            found.append(f"{name}: {first} at first, {last} in the end")
    return found


def longest_stall_s(samples: Sequence[Sample]) -> float:
    """The longest time without a new token while a request was waiting for one, in seconds."""
    longest, since = 0.0, None
    for before, now in itertools.pairwise(samples):
        moves = now.num_tokens > before.num_tokens or not before.num_open
        since = None if moves else (before.at_s if since is None else since)
        if since is not None:
            longest = max(longest, now.at_s - since)
    return longest


def _after_warm_up(samples: Sequence[Sample]) -> Sequence[Sample]:
    if not samples:
        return samples
    begin = _WARM_UP * samples[-1].num_answered
    return [sample for sample in samples if sample.num_answered >= begin]


def _process_resources(pid: int) -> tuple[int, int, int]:
    """The resident bytes, open descriptors and threads of a process; zeros if it has exited."""
    process = Path(f"/proc/{pid}")
    try:
        pages = int((process / "statm").read_text().split()[1])
        num_threads = len(os.listdir(process / "task"))
        return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir(process / "fd")), num_threads
    except OSError:
        return 0, 0, 0
