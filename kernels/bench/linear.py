"""Compare the native linear layers of a CPU with limits measured in the same run.

    python -m kernels.bench.linear [--threads 2] [--rows 1,4,16,64,256] [--weights bf16,int8]

Weights have the shapes of a 0.5 b model's layers, more of them than fit in the caches, each read
once a round. Few rows are compared with the memory's read rate, many with torch's product in
bfloat16. Torch is measured in float32 too, the fallback without native kernels. For each product
the least time of the rounds counts, as disturbances only ever add. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from kernels.cpu.linear import PanelDense, PanelInt4, PanelInt8, is_available

_SHAPES = ((1152, 896), (896, 896), (9728, 896), (896, 4864))  # of a layer: (outputs, inputs)
_NUM_LAYERS = 24
# None: torch's product.
_KINDS = {"float32": None, "torch": None, "bf16": PanelDense, "int8": PanelInt8, "int4": PanelInt4}
_ROUNDS = 25
_READ_BYTES = 2**29
_MATMUL_SIZE = 2048


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 if there are no native kernels."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.linear",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,256,512")
    parser.add_argument("--layers", type=int, default=_NUM_LAYERS)
    parser.add_argument("--weights", default=",".join(_KINDS), help="of those, which")
    options = parser.parse_args(argv)
    if not is_available():
        print("no native CPU kernels here", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    ceilings = {"read_gb_s": read_gb_s(), "matmul_gflop_s": matmul_gflop_s()}
    print(f"{ceilings['read_gb_s']:.1f} GB/s read, {ceilings['matmul_gflop_s']:.0f} GFLOP/s bf16")
    print(f"{'weights':8} {'rows':>5} {'ms':>8} {'GB/s':>7} {'GFLOP/s':>8}")
    results = []
    counts = [int(count) for count in options.rows.split(",")]
    for name in options.weights.split(","):
        results += _measure(name, _KINDS[name], counts, options.layers)
    print(json.dumps({"threads": options.threads, **ceilings, "results": results}))
    return 0


def read_gb_s() -> float:
    """Measure the memory's read rate, by summing numbers that no cache holds."""
    pieces = torch.ones(_READ_BYTES // 4).chunk(64)
    return _READ_BYTES / min_time_s([piece.sum for piece in pieces]) / 1e9


def matmul_gflop_s() -> float:
    """Measure torch's square product in bfloat16."""
    a, b = (torch.randn(_MATMUL_SIZE, _MATMUL_SIZE).bfloat16() for _ in range(2))
    return 2 * _MATMUL_SIZE**3 / min_time_s([lambda: functional.linear(a, b)]) / 1e9


def min_time_s(runs: Sequence[Callable[[], object]]) -> float:
    """Return the seconds of all runs in sequence: the sum of each one's fastest."""
    least = [float("inf")] * len(runs)
    for _ in range(_ROUNDS):
        for i, run in enumerate(runs):
            begin = time.perf_counter()
            run()
            least[i] = min(least[i], time.perf_counter() - begin)
    return sum(least)


def _measure(
    name: str, make: Callable[..., Any] | None, counts: list[int], num_layers: int
) -> list[dict[str, Any]]:
    """Measure all layers' products once a round, for each number of rows."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if name == "float32" else torch.bfloat16
    layers: list[tuple[Callable[[torch.Tensor], torch.Tensor], int]] = []
    num_bytes = num_weights = 0
    for _ in range(num_layers):
        for outputs, inputs in _SHAPES:
            weight = (torch.randn(outputs, inputs, generator=generator) * 0.02).bfloat16()
            num_weights += weight.numel()
            if make is None:
                weight = weight.to(dtype)
                layers.append((partial(functional.linear, weight=weight), inputs))
                num_bytes += weight.nbytes
            else:
                layer = make(weight, None)
                layers.append((layer, inputs))
                num_bytes += layer.num_bytes
    results = []
    for rows in counts:
        xs = {inputs: torch.randn(rows, inputs).to(dtype) for _, inputs in _SHAPES}
        seconds = min_time_s([partial(layer, xs[inputs]) for layer, inputs in layers])
        result = {
            "weights": name,
            "rows": rows,
            "ms": seconds * 1e3,
            "gb_s": num_bytes / seconds / 1e9,
            "gflop_s": 2 * num_weights * rows / seconds / 1e9,
        }
        results.append(result)
        print(
            f"{name:8} {rows:5} {result['ms']:8.2f} {result['gb_s']:7.1f} {result['gflop_s']:8.0f}",
            flush=True,
        )
    return results


if __name__ == "__main__":
    sys.exit(main())
