"""Run the suite, print a table, and write JSON lines; the last line printed is JSON."""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from kernels.bench.case import Case, Ceilings
from kernels.bench.suite import MakeCase, full_suite


def main() -> int:
    """Return the exit status: 0; 1 if a kernel is wrong; 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    add = parser.add_argument
    add("--output", type=Path, help="folder for kernels.jsonl")
    add("--only", default="", help="cases whose name holds this word")
    add("--json", action="store_true", help="a line of JSON for each case in place of the table")
    add("--check", action="store_true", help="only whether each case is right; nothing is timed")
    add("--share", default="0/1", metavar="I/N", help="every Nth case from the Ith on")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: kernels.bench measures on a GPU", file=sys.stderr)
        return 2
    from kernels.bench.measure import measure_ceilings

    device = torch.device("cuda")
    share, num_shares = map(int, options.share.split("/"))
    suite = [make for make in full_suite() if options.only in make.args[0]][share::num_shares]
    ceilings = None if options.check else measure_ceilings(device)
    tell = json.dumps if options.json else table_row
    return report(suite, device, torch.bfloat16, ceilings, options.output, tell)


def report(
    suite: list[MakeCase],
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings | None,
    output: Path | None,
    format_result: Callable[[dict[str, Any]], str] | None = None,
) -> int:
    """Run the cases one by one, and report each when it is done; return ``main``'s status.

    Args:
        suite: the cases.
        device, dtype: of their tensors.
        ceilings: what times are compared with; None: nothing is timed.
        output: a folder for their results.
        format_result: makes a line of a result; default: a row of a table.
    """
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    if ceilings is not None:
        print(
            f"{name}: {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
            f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s (bf16), both measured now"
        )
        print(f"{'case':42} {'us':>9} {'of floor':>9} {'error':>8}  peers (ours: x times as fast)")
    results: list[dict[str, Any]] = []
    for make in suite:
        results.append(_outcome(make, device, dtype, ceilings))
        print((format_result or table_row)(results[-1]), flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    failed = [result["case"] for result in results if not result["is_right"]]
    summary: dict[str, Any] = {"device": name, "failed": failed, "results": results}
    if ceilings is not None:
        summary |= {"bytes_per_s": ceilings.bytes_per_s, "flops_per_s": ceilings.flops_per_s}
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(result) + "\n" for result in results)
        (output / "kernels.jsonl").write_text(lines)
    print(json.dumps(summary))
    return 1 if failed else 0


def _outcome(
    make: MakeCase, device: torch.device, dtype: torch.dtype, ceilings: Ceilings | None
) -> dict[str, Any]:
    """Return the result of a case; one that cannot run counts as wrong."""
    try:
        case = make(device, dtype)
        if ceilings is None:
            return {"case": case.name, **_check(case)}
        return _measure(case, ceilings)
    # The compiler or the driver may raise anything.
    except Exception as error:
        traceback.print_exc()
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return {"case": make.args[0], "is_right": False, "failed": reason[:200]}


def _check(case: Case) -> dict[str, Any]:
    error = case.error()
    return {"error": error, "is_right": error <= case.tolerance}


def _measure(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    from kernels.bench import measure

    rightness = _check(case)
    time_s = measure.median_s(case.run)
    peer_median_s = measure.median_eager_s if case.peers_synchronise else measure.median_s
    peers = {name: peer_median_s(run) for name, run in case.peers.items()}
    floor_s = case.floor_s(ceilings.bytes_per_s, ceilings.flops_per_s)
    return {
        "case": case.name,
        "time_us": time_s * 1e6,
        "floor_us": floor_s * 1e6,
        "share_of_floor": None if case.is_latency_bound else floor_s / time_s,
        **rightness,
        "peers_us": {name: peer_s * 1e6 for name, peer_s in peers.items()},
    }


def table_row(result: dict[str, Any]) -> str:
    """Format a result as a readable row."""
    wrong, name = "" if result["is_right"] else "  WRONG", result["case"]
    if "failed" in result:
        return f"{name:42} {result['failed']}{wrong}"
    if "time_us" not in result:
        return f"{name:42} {'':9} {'':9} {result['error']:8.1e}{wrong}"
    share = result["share_of_floor"]
    shown = "-" if share is None else f"{share:.0%}"
    time_us, error = result["time_us"], result["error"]
    peers = ", ".join(
        f"{name} {peer_us / time_us:.2f}x" for name, peer_us in result["peers_us"].items()
    )
    return f"{name:42} {time_us:9.1f} {shown:>9} {error:8.1e}  {peers}{wrong}"


if __name__ == "__main__":
    sys.exit(main())
