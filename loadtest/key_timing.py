"""Whether the timing of a rejection leaks anything about a key: ``python -m loadtest.key_timing``.

Two kinds of wrong keys are sent in random order: some share all but the last character with the
right one, others share nothing. If keys were compared character by character, the former would be
rejected later. The two samples are compared by Welch's t-test after the slowest tenth of both is
cut off as noise of the machine (Reparaz, Balasch, Verbauwhede, "Dude, is my code constant time?",
DATE 2017, from which the bound of 4.5 is taken as well).

Requests are sequential, each kind on a connection of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import string
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop

from loadtest.client import Client, HttpError
from loadtest.machine import describe_machine
from loadtest.process import running_server

_BOUND = 4.5
_TRIMMED_SHARE = 0.1  # share of the slowest times, of both samples together
_KEY_CHARS = 48
_CHARS = string.ascii_letters + string.digits


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test and print a line of JSON. Returns 0 if the two kinds are indistinguishable."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.key_timing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--trials", metavar="N", type=int, default=50_000)
    add("--seed", metavar="N", type=int, default=0)
    add("--out", metavar="FILE", type=Path)
    options = parser.parse_args(argv)
    rng = random.Random(options.seed)
    key = "sk-" + "".join(rng.choices(_CHARS, k=_KEY_CHARS))
    flags = ("--load-format", "stub", "--disable-log-requests", "--api-key", key)
    with (
        running_server(flags, api_key=key) as server,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        near, far = runner.run(_time_rejections(server.url, key, options.trials, rng))
    t = welch_t(*_trim_slowest(near, far))
    result: dict[str, Any] = {
        "trials": len(near) + len(far),
        "median_near_us": statistics.median(near) * 1e6,
        "median_far_us": statistics.median(far) * 1e6,
        "t": t,
        "bound": _BOUND,
        "machine": describe_machine(),
    }
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps(result))
    return 0 if abs(t) < _BOUND else 1


def welch_t(first: Sequence[float], second: Sequence[float]) -> float:
    """Welch's t of two samples: the difference of their means over its standard error."""
    error = sum(statistics.variance(sample) / len(sample) for sample in (first, second))
    difference = statistics.fmean(first) - statistics.fmean(second)
    return difference / math.sqrt(error)


def _trim_slowest(*samples: Sequence[float]) -> list[list[float]]:
    together = sorted(time_s for sample in samples for time_s in sample)
    bound = together[int((1 - _TRIMMED_SHARE) * len(together))]
    return [[time_s for time_s in sample if time_s <= bound] for sample in samples]


async def _time_rejections(
    url: str, key: str, trials: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Seconds that each rejection took: for keys close to the right one, and for the others."""
    last = rng.choice([char for char in _CHARS if char != key[-1]])
    clients = {
        kind: Client(url, api_key=wrong)
        for kind, wrong in (
            ("near", key[:-1] + last),
            ("far", "sk-" + "".join(rng.choices(_CHARS, k=len(key) - 3))),
        )
    }
    times: dict[str, list[float]] = {kind: [] for kind in clients}
    for _ in range(trials):
        kind = rng.choice(("near", "far"))
        begun_s = time.perf_counter()
        try:
            await clients[kind].fetch("GET", "/v1/models")
        except HttpError as error:
            if error.status != 401:
                raise
        else:
            raise RuntimeError("a wrong key was taken")
        times[kind].append(time.perf_counter() - begun_s)
    for client in clients.values():
        client.close()
    return times["near"], times["far"]


if __name__ == "__main__":
    sys.exit(main())
