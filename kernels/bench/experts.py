"""Compare a layer's experts on a CPU with the machine's limits, and with experts run one by one.

    python -m kernels.bench.experts [--threads 2] [--rows 1,4,16,64] [--kinds bf16,int8,int4]

The shape is that of a small Qwen3-MoE: 64 experts of 512 over 1,024, eight per token, chosen at
random. Several layers are read in turn, so that no cache holds their weights. The floor is the
larger of two times at rates measured in the same run: reading the chosen experts' weights once, and
(not in float32) multiplying by them as fast as a large bfloat16 product of torch. *One by one* uses
the same weights and kernels with a call for each product of each expert, alternating with ours. The
least time of the rounds counts, as disturbances only ever add. The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from kernels.bench.linear import matmul_gflop_s, read_gb_s
from kernels.cpu import operations
from kernels.cpu.experts import PanelExperts
from kernels.cpu.grouped import PanelGrouped
from kernels.cpu.linear import PanelDense, PanelInt4, PanelInt8, PanelLinear, is_available
from kernels.moe import ExpertTensors, GatedActivation
from kernels.packed import MXFP4_LEVELS, PackedWeight
from kernels.reference.moe import fused_moe, sequential_moe

_HIDDEN, _INNER, _EXPERTS, _TOP_K = 1024, 512, 64, 8
_LAYERS = 3
_ROUNDS = 12
_GATING = GatedActivation(operations.silu_mul, "silu")

# From tokens, their expert ids and the experts' weights to the result.
MoeFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class _Layer(NamedTuple):
    """The same experts in one call, and one by one."""

    fused: MoeFunction
    sequential: MoeFunction
    num_bytes: int  # per expert


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 1 if the two differ; 2 if there are no native kernels."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.experts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rows", default="1,4,16,64")
    parser.add_argument("--kinds", default="float32,bf16,int8,int4,mxfp4")
    parser.add_argument("--layers", type=int, default=_LAYERS)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    options = parser.parse_args(argv)
    if not is_available():
        print("no native CPU kernels here", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    read, matmul = read_gb_s(), matmul_gflop_s()
    print(f"{read:.1f} GB/s read, {matmul:.0f} GFLOP/s bf16")
    print(f"{'weights':8} {'rows':>5} {'us':>9} {'of floor':>8} {'one by one':>11} {'ratio':>6}")
    results: list[dict[str, Any]] = []
    for kind in options.kinds.split(","):
        layers = [_layer(kind, seed) for seed in range(options.layers)]
        for rows in map(int, options.rows.split(",")):
            measured = _measure(layers, rows, options.rounds)
            floor_us = max(measured["bytes"] / read / 1e3, measured["flop"] / matmul / 1e3)
            result = {
                **{"weights": kind, "rows": rows, **measured},
                **{"floor_us": floor_us, "share_of_floor": floor_us / measured["us"]},
            }
            results.append(result)
            print(
                f"{kind:8} {rows:5} {result['us']:9.0f} {result['share_of_floor']:8.0%} "
                f"{result['one_by_one_us']:11.0f} {result['ratio']:5.2f}x",
                flush=True,
            )
    ceilings = {"read_gb_s": read, "matmul_gflop_s": matmul}
    shape = {"hidden": _HIDDEN, "inner": _INNER, "experts": _EXPERTS, "top_k": _TOP_K}
    print(json.dumps({"threads": options.threads, **ceilings, **shape, "results": results}))
    return 0 if all(result["error"] < 0.02 for result in results) else 1


def _layer(kind: str, seed: int) -> _Layer:
    generator = torch.Generator().manual_seed(seed)
    gate_up = torch.randn(_EXPERTS, 2 * _INNER, _HIDDEN, generator=generator) / _HIDDEN**0.5
    down = torch.randn(_EXPERTS, _HIDDEN, _INNER, generator=generator) / _INNER**0.5
    if kind == "float32":
        experts = ExpertTensors(gate_up, down)
        return _Layer(
            lambda x, ids, shares: operations.fused_moe(x, experts, ids, shares, _GATING),
            lambda x, ids, shares: fused_moe(x, experts, ids, shares, _GATING),
            gate_up[0].nbytes + down[0].nbytes,
        )
    first, second = ([_panel(kind, weight) for weight in weights] for weights in (gate_up, down))
    joined = PanelExperts.join(first, second, _GATING, _TOP_K)
    assert joined is not None
    mlps = [partial(_mlp, *pair) for pair in zip(first, second, strict=True)]
    return _Layer(
        joined,
        lambda x, ids, shares: sequential_moe(x, mlps, ids, shares),
        first[0].num_bytes + second[0].num_bytes,
    )


def _mlp(gate_up: PanelLinear, down: PanelLinear, x: torch.Tensor) -> torch.Tensor:
    return down(operations.silu_mul(gate_up(x)))


def _panel(kind: str, weight: torch.Tensor) -> Any:
    if kind == "mxfp4":
        outputs, inputs = weight.shape
        codes = torch.randint(0, 256, (outputs, inputs // 2)).to(torch.uint8)
        scales = torch.full((outputs, inputs // 32), 2.0**-7)
        packed = PackedWeight(codes, scales, inputs, 32, MXFP4_LEVELS)
        return PanelGrouped(packed, None, torch.bfloat16)
    return {"bf16": PanelDense, "int8": PanelInt8, "int4": PanelInt4}[kind](weight, None)


def _measure(layers: Sequence[_Layer], rows: int, rounds: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rows)
    is_float = layers[0].num_bytes == 12 * _INNER * _HIDDEN
    x = torch.randn(rows, _HIDDEN, generator=generator)
    x = x if is_float else x.bfloat16()
    ids = torch.rand(rows, _EXPERTS, generator=generator).topk(_TOP_K).indices
    shares = torch.full((rows, _TOP_K), 1 / _TOP_K)
    expected = layers[0].sequential(x, ids, shares).float()
    error = float((layers[0].fused(x, ids, shares) - expected).norm() / expected.norm())
    least = {(side, i): float("inf") for side in (0, 1) for i in range(len(layers))}
    for _, i, side in itertools.product(range(rounds), range(len(layers)), (0, 1)):
        # The two do not read the same layer in succession: it might still be in a cache.
        layer = layers[(i + side) % len(layers)]
        begin = time.perf_counter()
        (layer.sequential if side else layer.fused)(x, ids, shares)
        least[side, i] = min(least[side, i], time.perf_counter() - begin)
    ours, theirs = (sum(least[side, i] for i in range(len(layers))) for side in (0, 1))
    return {
        "us": ours / len(layers) * 1e6,
        "one_by_one_us": theirs / len(layers) * 1e6,
        "ratio": theirs / ours,
        "error": error,
        "bytes": ids.unique().numel() * layers[0].num_bytes,
        "flop": 0 if is_float else 6 * rows * _TOP_K * _HIDDEN * _INNER,
    }


if __name__ == "__main__":
    sys.exit(main())
