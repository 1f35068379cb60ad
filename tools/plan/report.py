"""Formats plans for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tools.plan.predict import Prediction
from tools.plan.search import LayoutResult
from tools.plan.simulate import Replica

if TYPE_CHECKING:
    from tools.plan.calibrate import Calibration
    from tools.plan.link import MeasuredLink


def format_calibration(found: Calibration) -> str:
    """The number of measured steps, and the quality of the fit."""
    fit = found.fit
    return (
        f"{found.replica.name}: {fit.num_steps:,} steps measured; the fitted costs are off by "
        f"{fit.median_error:.0%} (median) and {fit.p90_error:.0%} (nine of ten)"
    )


def format_prediction(told: Prediction) -> str:
    """The latencies of requests, in percentiles."""
    lines = [f"{'':14}{'p50':>10}{'p95':>10}{'p99':>10}"]
    for title, values in (
        ("TTFT, ms", told.ttft_ms),
        ("TPOT, ms", told.tpot_ms),
        ("E2E, ms", told.e2e_ms),
    ):
        if values is not None:
            figures = "".join(f"{values[name]:10,.1f}" for name in ("p50", "p95", "p99"))
            lines.append(f"{title:14}{figures}")
    notes = f"{told.output_tokens_per_s:,.0f} output tokens/s, {told.preemptions} preemptions"
    if told.refused:
        notes += f", {told.refused} of {told.refused + told.requests} could never fit"
    return "\n".join([*lines, notes, ""])


def format_rate(rate: float) -> str:
    """A rate with three digits, or as a whole number if it is large."""
    return f"{rate:,.0f} requests a second" if rate >= 100 else f"{rate:.3g} requests a second"


def format_max_rate(most: Prediction) -> str:
    """The greatest rate, or that the requests are too few to find it."""
    if not most.is_short:
        return format_rate(most.rate)
    return (
        f"unknown, as {most.requests} requests are too few:\nat {format_rate(most.rate)} all of "
        "them come before one is done. Give more (--num-requests or\na longer --trace); without "
        "--ttft-p99-ms they may also wait for any time.\n"
    )


def format_layout(replica: Replica) -> str:
    """A replica's parallel layout, such as ``4 ranks in 2 stages``."""
    size, stages = replica.num_ranks, replica.pipeline_parallel_size
    ranks = "1 rank" if size == 1 else f"{size} ranks"
    return ranks if stages == 1 else f"{ranks} in {stages} stages"


def format_layouts(tried: Sequence[LayoutResult]) -> str:
    """A line for each parallel layout."""
    lines = [
        f"{'tensor':>7}{'pipeline':>9}  {'most, requests/s':>17}{'replicas':>10}{'devices':>9}"
    ]
    for each in tried:
        sizes = f"{each.tensor_parallel_size:7}{each.pipeline_parallel_size:9}"
        if each.at_max_rate is None:
            lines.append(f"{sizes}  {each.problem}")
            continue
        needed = ""
        if each.replicas is not None:
            needed = f"{each.replicas:10,}{each.replicas * each.num_ranks:9,}"
        most = each.at_max_rate
        rate = f"{'unknown':>17}" if most.is_short else f"{most.rate:17,.3g}"
        lines.append(f"{sizes}  {rate}{needed}")
    return "\n".join(lines)


def format_link(found: MeasuredLink) -> str:
    """The measurements, and the options that express them."""
    rows = "\n".join(
        f"{size:12,} bytes{seconds * 1e6:12,.0f} us" for size, seconds in found.seconds.items()
    )
    link = found.link
    return (
        f"All-reduces of {found.num_ranks} ranks ({found.device}):\n{rows}\n"
        f"The fitted times are off by {found.median_error:.0%} (median).\n\n"
        f"--link-gb-s {link.bytes_per_s / 1e9:.3g} --link-latency-us {link.latency_s * 1e6:.3g}"
    )
