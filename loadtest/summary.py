"""Turns records into figures.

For a request sent (or due to be sent) at t0, whose events with output arrived at t1 ... tn, and
whose usage reports k output tokens:

    TTFT  t1 - t0                time to first token
    TPOT  (tn - t1) / (k - 1)    time per output token after the first
    ITL   t[i+1] - t[i]          each gap between events with output; one may hold several tokens
    E2E   end - t0               until the stream has ended

Failed requests are counted by kind and left out of all other figures.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from loadtest.client import StreamRecord

LATENCIES = ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms")


def summarize(records: Sequence[StreamRecord]) -> dict[str, Any]:
    """The figures of one run."""
    whole = [record for record in records if record.failure is None]
    begun_s = min((record.due_s for record in records), default=0.0)
    ended_s = max((record.end_s for record in records), default=0.0)
    duration_s = max(ended_s - begun_s, 1e-9)
    output_tokens = sum(record.output_tokens for record in whole)
    prompt_tokens = sum(record.prompt_tokens for record in whole)
    values = latencies(whole)
    return {
        "requests": len(records),
        "completed": len(whole),
        "failures": dict(Counter(r.failure for r in records if r.failure is not None)),
        "failure_message": next((r.message for r in records if r.message), ""),
        "duration_s": duration_s,
        "prompt_tokens": prompt_tokens,
        "cached_tokens": sum(record.cached_tokens for record in whole),
        "output_tokens": output_tokens,
        "output_events": sum(len(record.token_times_s) for record in whole),
        "output_tokens_per_s": output_tokens / duration_s,
        "total_tokens_per_s": (prompt_tokens + output_tokens) / duration_s,
        "requests_per_s": len(whole) / duration_s,
        **{name: spread(values[name]) for name in LATENCIES},
    }


def latencies(records: Sequence[StreamRecord]) -> dict[str, list[float]]:
    """All individual values, in milliseconds, by the names of :data:`LATENCIES`."""
    values: dict[str, list[float]] = {name: [] for name in LATENCIES}
    for record in records:
        times = record.token_times_s
        values["e2e_ms"].append((record.end_s - record.due_s) * 1e3)
        if not times:
            continue
        values["ttft_ms"].append((times[0] - record.due_s) * 1e3)
        if record.output_tokens > 1:
            values["tpot_ms"].append((times[-1] - times[0]) / (record.output_tokens - 1) * 1e3)
        values["itl_ms"] += [(b - a) * 1e3 for a, b in itertools.pairwise(times)]
    return values


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """The mean, percentiles and extremes; None without values."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": sum(ordered) / len(ordered),
        "p50": percentile(ordered, 50),
        "p95": percentile(ordered, 95),
        "p99": percentile(ordered, 99),
        "min": ordered[0],
        "max": ordered[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """The percentile of sorted values, by linear interpolation between the nearest two."""
    rank = (len(ordered) - 1) * percent / 100
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)
