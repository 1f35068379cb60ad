"""Compare two ways for a CPU's head to find the likeliest token: whole weight, or codes first.

    python -m kernels.bench.head [--threads 2] [--rows 1,4,8,16,64] [--shapes 32000x256,151936x896]

The two alternate, and the medians count. Their tokens are compared as well. The last line printed
is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence

import torch

from kernels.cpu.linear import PanelDense, is_available
from kernels.cpu.screened import ScreenedHead

_SHAPES = "32000x256,32000x768,32000x896,151936x896,128000x2048"
_ROUNDS = 40


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 1 if the two find different tokens; 2 without kernels."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.head",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,4,8,16,64")
    parser.add_argument("--shapes", default=_SHAPES)
    options = parser.parse_args(argv)
    if not is_available():
        print("no native CPU kernels here", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    results, num_different = [], 0
    print(f"{'outputs x inputs':>18} {'rows':>5} {'whole ms':>9} {'screened ms':>12} {'ratio':>6}")
    for shape in options.shapes.split(","):
        outputs, inputs = map(int, shape.split("x"))
        weight = (torch.randn(outputs, inputs) * 0.02).bfloat16()
        heads = PanelDense(weight, None), ScreenedHead(weight)
        for rows in map(int, options.rows.split(",")):
            (whole, screened), different = _measure(heads, rows, inputs)
            num_different += different
            result = {"outputs": outputs, "inputs": inputs, "rows": rows}
            results.append(result | {"whole_ms": whole, "screened_ms": screened})
            ratio = screened / whole
            print(f"{shape:>18} {rows:5} {whole:9.3f} {screened:12.3f} {ratio:6.2f}", flush=True)
    print(json.dumps({"threads": options.threads, "different": num_different, "results": results}))
    return 1 if num_different else 0


def _measure(
    heads: tuple[PanelDense, ScreenedHead], rows: int, inputs: int
) -> tuple[tuple[float, ...], int]:
    """Return the milliseconds of each, and the number of tokens on which they disagree."""
    taken: tuple[list[float], ...] = ([], [])
    different = 0
    for _ in range(_ROUNDS):
        x = torch.randn(rows, inputs).bfloat16()
        found = []
        for head, seconds in zip(heads, taken, strict=True):
            begin = time.perf_counter()
            found.append(head.sample_greedy(x).token_ids)
            seconds.append(time.perf_counter() - begin)
        different += int((found[0] != found[1]).sum())
    return tuple(statistics.median(seconds) * 1e3 for seconds in taken), different


if __name__ == "__main__":
    sys.exit(main())
