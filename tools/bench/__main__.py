"""Checks a GPU: its tests, the kernels, steps, whole batches, the first answer.

    python -m tools.bench --output build/gpu-check
    python -m tools.bench --device cpu --tiny --output DIR     the same benches on tiny shapes

Each part is a process with its own time limit, and there is a limit for all parts together. Results
are printed when a part ends, and written to ``results.jsonl`` and ``log.txt`` in the output folder
as they come. The missed gates are printed last, followed by one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tools.bench.gates import compare, verdict
from tools.bench.parts import ResultLog, gpu_parts, run_parts, tiny_parts

_LIMIT_S = 540.0
_MAX_LINES = 40  # limit on the misses that are printed
_CLOSING_S = 3.0  # reserved for the summary


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if a part failed or ran out of time, or a kernel is wrong."""
    began_s = time.monotonic()
    options = _parser().parse_args(argv)
    if options.device == "cuda" and not _has_cuda():
        print(
            "gpu-check: no CUDA device here (or torch was built without CUDA); nothing was run. "
            "--device cpu --tiny runs the benches on tiny shapes."
        )
        return 0
    shared = ["--device", options.device, "--attention-backend", options.attention_backend]
    if options.block_size:
        shared += ["--block-size", str(options.block_size)]
    groups = tiny_parts(shared) if options.tiny else gpu_parts(shared, options.pytest)
    record = ResultLog(options.output)
    results: list[dict[str, Any]] = []
    with _exit_on_sigterm():
        for group in groups:
            chosen = [part for part in group if options.only in part.name]
            left_s = options.limit_s - _CLOSING_S - (time.monotonic() - began_s)
            outcomes = run_parts(chosen, record, left_s) if chosen else []
            results += outcomes
            compare(results)
            for result in outcomes:
                print(format_table([result]), flush=True)
    record.close()
    lines = missed(results)
    print("\n".join(["", "missed:", *lines] if lines else ["", "nothing missed"]))
    failed = [result["part"] for result in results if result["status"] != 0]
    print(json.dumps({"failed": failed, "missed": len(lines), "output": str(options.output)}))
    return 1 if failed else 0


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """How each part ended, with a line for each case; for a failed part, its last output."""
    lines: list[str] = []
    for result in results:
        rows = result["rows"]
        quiet = [row for row in rows if row.get("is_right") and "time_us" not in row]
        right = f", {len(quiet)} right" if quiet else ""
        lines.append(f"{result['part']}: {_format_end(result)}{right}")
        for row in rows:
            if row in quiet:
                continue
            share = row.get("share_of_floor", row.get("share_of_step", row.get("busy_share")))
            shown = "" if share is None else f"{share:.0%}"
            gate = verdict(result["part"], row)
            line = f"  {row['case'][:44]:44} {_format_measurement(row):>20} {shown:>5}  {gate}"
            lines.append(line.rstrip())
        if result["status"] != 0 or not rows:
            lines += [f"  | {line}" for line in result["last_lines"]]
    return "\n".join(lines)


def missed(results: Sequence[dict[str, Any]]) -> list[str]:
    """The wrong results, missed gates and failed parts, cut to a readable number of lines."""
    lines = list(_missed(results))
    more = len(lines) - _MAX_LINES
    return lines if more <= 0 else [*lines[:_MAX_LINES], f"  and {more} more"]


def _missed(results: Sequence[dict[str, Any]]) -> Iterator[str]:
    for result in results:
        if result["status"] != 0:
            yield f"  {result['part']}: {_format_end(result)}"
        for row in result["rows"]:
            gate = verdict(result["part"], row)
            if gate not in ("", "pass"):
                yield f"  {result['part']}, {row['case']}: {gate}"


def _format_end(result: dict[str, Any]) -> str:
    how = "done" if result["status"] == 0 else f"ended with {result['status']}"
    return f"{how} after {result['time_s']:.0f} s"


def _format_measurement(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return "skipped"
    if "failed" in row:
        return "failed"
    if "share_of_plain" in row:
        return f"{row['time_ms']:,.2f} ms ({row['share_of_plain']:.2f}x)"
    if "quire_ratio" in row:
        return f"{row['tokens_per_s']:,.0f} t/s (1/{row['quire_ratio']:.1f})"
    if "tokens_per_s" in row and "time_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    for field, unit in (("time_us", "us"), ("time_ms", "ms"), ("time_s", "s")):
        if field in row:
            return f"{row[field]:,.2f} {unit}"
    return f"error {row['error']:.0e}" if "error" in row else ""


@contextmanager
def _exit_on_sigterm() -> Iterator[None]:
    """Exit normally on SIGTERM, so that the parts are ended first."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _has_cuda() -> bool:
    import torch

    return torch.cuda.is_available()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--output", type=Path, default=Path("build/gpu-check"), help="folder for results")
    add("--device", default="cuda", choices=("cuda", "cpu"))
    add("--tiny", action="store_true", help="tiny shapes, and only what needs no GPU")
    add("--only", default="", help="parts whose name holds this word")
    add("--limit-s", type=float, default=_LIMIT_S, help="seconds for all parts together")
    add("--attention-backend", default="auto")
    add("--block-size", type=int, help="tokens in a KV block")
    add("--pytest", default=[], nargs="*", help="more arguments of the tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
