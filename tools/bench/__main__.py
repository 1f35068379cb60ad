"""Checks a GPU: its tests, the kernels, steps, whole batches, the first answer.

    python -m tools.bench --output build/gpu-check
    python -m tools.bench --device cpu --tiny --output DIR     the same benches on tiny shapes

Each part is a process with a time limit of its own. A table comes last, then one line of JSON; each
part leaves its rows and all that it printed in the output folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tools.bench.gates import compare_with_peer, verdict
from tools.bench.parts import gpu_parts, run_part, tiny_parts


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0; 1 when a part failed or ran out of time, or a kernel is wrong."""
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
    parts = (
        tiny_parts(shared) if options.tiny else gpu_parts(options.output, shared, options.pytest)
    )
    chosen = [part for part in parts if options.only in part.name]
    options.output.mkdir(parents=True, exist_ok=True)
    results = []
    for part in chosen:
        print(f"{part.name} ({part.limit_s:g} s at most) ...", flush=True)
        results.append(run_part(part, options.output))
    compare_with_peer(results)
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n")
    print(format_table(results))
    failed = [result["part"] for result in results if result["status"] != 0]
    print(json.dumps({"failed": failed, "results": results}))
    return 1 if failed else 0


def format_table(results: Sequence[dict[str, Any]]) -> str:
    """A line for each case, and one for each part that did not end well."""
    lines = [f"{'part':14} {'case':44} {'measured':>22} {'of floor':>9}  gate"]
    for result in results:
        part = result["part"]
        for row in result["rows"]:
            share = row.get("share_of_floor")
            told = "" if share is None else f"{share:.0%}"
            lines.append(
                f"{part:14} {row['case']:44} {_measured(row):>22} {told:>9}  {verdict(part, row)}"
            )
        if result["status"] != 0 or not result["rows"]:
            ended = f"ended with {result['status']} after {result['time_s']:.0f} s"
            lines.append(f"{part:14} {ended}: {result['last_line']}")
    return "\n".join(lines)


def _measured(row: dict[str, Any]) -> str:
    if "skipped" in row:
        return "skipped"
    if "quire_ratio" in row:
        return f"{row['tokens_per_s']:,.0f} t/s (1/{row['quire_ratio']:.1f})"
    if "tokens_per_s" in row and "time_s" in row:
        return f"{row['tokens_per_s']:,.0f} tokens/s"
    for field, unit in (("time_us", "us"), ("time_ms", "ms"), ("time_s", "s")):
        if field in row:
            return f"{row[field]:,.2f} {unit}"
    return ""


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
    add("--attention-backend", default="auto")
    add("--block-size", type=int, help="tokens in a KV block")
    add("--pytest", default=[], nargs="*", help="more arguments of the tests")
    return parser


if __name__ == "__main__":
    sys.exit(main())
