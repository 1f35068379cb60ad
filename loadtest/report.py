"""Reports for people: a table for the terminal, and one self-contained HTML file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

from loadtest.client import StreamRecord
from loadtest.driver import Load
from loadtest.summary import LATENCIES, latencies
from loadtest.svg import cumulative, line_chart

_TITLES = {
    "ttft_ms": "Time to first token",
    "tpot_ms": "Time per output token",
    "itl_ms": "Gap between tokens",
    "e2e_ms": "Whole request",
}
_EXPLANATION = (
    "The time per output token is that after the first one. A gap is the time between two events "
    "of a stream, each with one token or several. In the charts of a distribution, the height of "
    "the curve is the share that took at most so long."
)
_COLUMNS = ("mean", "p50", "p95", "p99", "min", "max")


class Run(NamedTuple):
    """One load and its results."""

    load: Load
    records: list[StreamRecord]
    summary: dict[str, Any]
    gauges: list[dict[str, float]]


def format_table(runs: Sequence[Run]) -> str:
    """One block of plain text for each run."""
    return "\n\n".join("\n".join(_block(run)) for run in runs)


def _block(run: Run) -> list[str]:
    summary = run.summary
    lines = [
        f"{run.load.describe()}: {summary['completed']} of {summary['requests']} requests in "
        f"{summary['duration_s']:.2f} s",
        f"  output tokens/s {summary['output_tokens_per_s']:>10,.1f}    "
        f"all tokens/s {summary['total_tokens_per_s']:>10,.1f}    "
        f"requests/s {summary['requests_per_s']:>8,.2f}",
        "  " + f"{'milliseconds':<22}" + "".join(f"{name:>10}" for name in _COLUMNS),
    ]
    for name in LATENCIES:
        figures = summary[name]
        cells = "".join(f"{figures[c]:>10,.1f}" if figures else f"{'-':>10}" for c in _COLUMNS)
        lines.append(f"  {_TITLES[name]:<22}{cells}")
    lines += [f"  {line}" for line in _remarks(summary)]
    return lines


def _remarks(summary: dict[str, Any]) -> list[str]:
    """Additional lines for whatever is unusual."""
    lines = []
    if summary["failures"]:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary["failures"].items())
        said = summary.get("failure_message")
        lines.append(f"FAILED: {kinds}" + (f"; the first: {said}" if said else ""))
    server = summary.get("server", {})
    told = []
    if "prefix_hit_rate" in server:
        told.append(f"prefix cache hits {server['prefix_hit_rate']:.1%}")
    if "acceptance" in server:
        told.append(
            f"drafts accepted {server['acceptance']:.1%}, {server['accepted_length']:.2f} a row"
        )
    if "kv_waste" in server:
        told.append(f"KV slots wasted {server['kv_waste']:.2%}")
    if server.get("preemptions"):
        told.append(f"preemptions {server['preemptions']}")
    if "server_cpu_cores" in summary:
        told.append(f"server used {summary['server_cpu_cores']:.2f} cores")
    told.append(f"this client used {summary['client_cpu_cores']:.2f} cores")
    lines.append("; ".join(told))
    return lines


def render_html(result: dict[str, Any], runs: Sequence[Run]) -> str:
    """Render the report as one HTML document with inline plots."""
    shape = ", ".join(f"{k} {v}" for k, v in result["shape"].items() if v is not None)
    machine = result["machine"]
    libraries = ", ".join(f"{name} {version}" for name, version in machine["libraries"].items())
    body = [
        f"<h1>Load test of {escape(result['model'])}</h1>",
        f"<p>{escape(result['endpoint'])}; {escape(shape)}; ignore_eos {result['ignore_eos']}; "
        f"seed {result['seed']}<br>{escape(str(machine['cpu']))}, {machine['cores']} cores, "
        f"{machine['memory_gib']} GiB, {escape(machine['system'])}, Python {machine['python']}"
        f"<br>{escape(libraries)}</p>",
        _summary_table(runs),
        f"<p>{_EXPLANATION}</p>",
    ]
    if len(runs) > 1:
        body.append(_scaling_charts(runs))
    for run in runs:
        body.append(f"<h2>{escape(run.load.describe())}</h2>{_latency_table(run)}")
        body.append(f"<p>{escape(' — '.join(_remarks(run.summary)))}</p>{_charts(run)}")
    return (
        "<!doctype html><html lang=en><meta charset=utf-8>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Load test of {escape(result['model'])}</title><style>"
        "body{font:14px sans-serif;max-width:980px;margin:2em auto;padding:0 1em;color:#111}"
        "div{overflow-x:auto}table{border-collapse:collapse}"
        "td,th{padding:3px 12px;text-align:right;white-space:nowrap;border-bottom:1px solid #ddd}"
        "th:first-child,td:first-child{text-align:left}"
        "svg{margin:8px 8px 8px 0;max-width:100%;height:auto}</style>"
        + "\n".join(body)
        + "</html>\n"
    )


def _summary_table(runs: Sequence[Run]) -> str:
    latencies = ("first token, p50", "gap between tokens, p99")
    head = ("load", "completed", "output tokens/s", "requests/s", *latencies)
    rows = []
    for run in runs:
        summary = run.summary
        rows.append(
            (
                run.load.describe(),
                f"{summary['completed']} of {summary['requests']}",
                f"{summary['output_tokens_per_s']:,.1f}",
                f"{summary['requests_per_s']:,.2f}",
                _milliseconds(summary["ttft_ms"], "p50"),
                _milliseconds(summary["itl_ms"], "p99"),
            )
        )
    return _table(head, rows)


def _latency_table(run: Run) -> str:
    rows = [
        (_TITLES[name], *(_milliseconds(run.summary[name], column) for column in _COLUMNS))
        for name in LATENCIES
    ]
    return _table(("", *_COLUMNS), rows)


def _milliseconds(figures: dict[str, float] | None, column: str) -> str:
    return f"{figures[column]:,.1f} ms" if figures else "-"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<div><table><tr>{top}</tr>{body}</table></div>"


def _scaling_charts(runs: Sequence[Run]) -> str:
    def over_load(*keys: str) -> list[tuple[float, float]]:
        points = []
        for run in runs:
            value: Any = run.summary
            for key in keys:
                value = value[key] if value else None
            if value is not None:
                points.append((float(run.load.concurrency or 0), float(value)))
        return sorted(points)

    latency = [(f"{t} p99", over_load(n, "p99")) for n, t in _TITLES.items() if n != "e2e_ms"]
    throughput = [("output tokens/s", over_load("output_tokens_per_s"))]
    return line_chart("Throughput", "requests in flight", throughput) + line_chart(
        "Latency (ms)", "requests in flight", latency
    )


def _charts(run: Run) -> str:
    whole = [record for record in run.records if record.failure is None]
    values = latencies(whole)
    begun_s = min((record.due_s for record in run.records), default=0.0)
    arrivals = Counter(int(t - begun_s) for record in whole for t in record.token_times_s)
    seconds = max(arrivals, default=0) + 2
    rate = [(float(second), float(arrivals.get(second, 0))) for second in range(seconds)]

    def gauge(name: str) -> list[tuple[float, float]]:
        return [(s["t"] - begun_s, s[name]) for s in run.gauges if name in s and s["t"] >= begun_s]

    charts = [
        line_chart(
            f"{_TITLES[name]} (share of {'gaps' if name == 'itl_ms' else 'requests'})",
            "milliseconds",
            [("", points)],
        )
        for name in LATENCIES
        if (points := cumulative(values[name]))
    ]
    charts.append(line_chart("Events with output per second", "seconds", [("", rate)], steps=True))
    queues = [
        ("running", gauge("num_requests_running")),
        ("waiting", gauge("num_requests_waiting")),
    ]
    if any(len(points) > 1 for _, points in queues):  # a run of a second or less has no line
        charts.append(line_chart("Requests in the server", "seconds", queues, steps=True))
        usage = [("", gauge("kv_cache_usage_perc"))]
        charts.append(line_chart("KV cache in use (share)", "seconds", usage, steps=True))
    return "".join(charts)
