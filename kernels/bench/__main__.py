"""Runs the suite, prints a table, and writes JSON lines; the last line printed is JSON."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

from kernels.bench.case import Case, Ceilings
from kernels.bench.suite import MakeCase, full_suite


def main() -> int:
    """Returns the exit status: 0; 1 when a kernel is wrong; 2 where there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m kernels.bench", description=__doc__)
    parser.add_argument("--output", type=Path, help="folder for kernels.jsonl")
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("no CUDA device: kernels.bench measures on a GPU", file=sys.stderr)
        return 2
    from kernels.bench.measure import measure_ceilings

    device = torch.device("cuda")
    suite = [make for make in full_suite() if options.only in make.args[0]]
    return report(suite, device, torch.bfloat16, measure_ceilings(device), options.output)


def report(
    suite: list[MakeCase],
    device: torch.device,
    dtype: torch.dtype,
    ceilings: Ceilings,
    output: Path | None,
) -> int:
    """Measure the cases one by one; returns ``main``'s status."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)
    print(
        f"{name}: {ceilings.bytes_per_s / 1e12:.2f} TB/s, "
        f"{ceilings.flops_per_s / 1e12:.0f} TFLOP/s (bf16), both measured now"
    )
    print(f"{'case':42} {'us':>9} {'of floor':>9} {'error':>8}  peers (ours is x times as fast)")
    results: list[dict[str, Any]] = []
    for make in suite:
        results.append(_measure(make(device, dtype), ceilings))
        print(_table_row(results[-1]), flush=True)
        torch.cuda.empty_cache()
    failed = [result["case"] for result in results if not result["is_right"]]
    summary = {
        "device": name,
        "bytes_per_s": ceilings.bytes_per_s,
        "flops_per_s": ceilings.flops_per_s,
        "failed": failed,
        "results": results,
    }
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        lines = "".join(json.dumps(result) + "\n" for result in results)
        (output / "kernels.jsonl").write_text(lines)
    print(json.dumps(summary))
    return 1 if failed else 0


def _measure(case: Case, ceilings: Ceilings) -> dict[str, Any]:
    from kernels.bench import measure

    error = case.error()
    time_s = measure.median_s(case.run)
    peer_median_s = measure.median_eager_s if case.peers_wait else measure.median_s
    peers = {name: peer_median_s(run) for name, run in case.peers.items()}
    floor_s = case.floor_s(ceilings.bytes_per_s, ceilings.flops_per_s)
    return {
        "case": case.name,
        "time_us": time_s * 1e6,
        "floor_us": floor_s * 1e6,
        "share_of_floor": None if case.is_latency_bound else floor_s / time_s,
        "error": error,
        "is_right": error <= case.tolerance,
        "peers_us": {name: peer_s * 1e6 for name, peer_s in peers.items()},
    }


def _table_row(result: dict[str, Any]) -> str:
    share = result["share_of_floor"]
    told = "-" if share is None else f"{share:.0%}"
    peers = ", ".join(
        f"{name} {peer_us / result['time_us']:.2f}x" for name, peer_us in result["peers_us"].items()
    )
    wrong = "" if result["is_right"] else "  WRONG"
    name, time_us, error = result["case"], result["time_us"], result["error"]
    return f"{name:42} {time_us:9.1f} {told:>9} {error:8.1e}  {peers}{wrong}"


if __name__ == "__main__":
    sys.exit(main())
