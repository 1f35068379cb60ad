"""Compare the CPU kernels, except linear layers, with the reference, alternating in one run.

    python -m kernels.bench.cpu [--threads 2] [--dtype bfloat16] [--only WORD]

Shapes are those of a 0.5 b model, except for recurrent layers (``states.py``). A case is checked
against the reference before it is timed. Calls alternate, and the least time of each counts, as
disturbances only ever add. GB/s count each byte that must move once, FLOP/s the necessary
multiplications; the rates of the memory and of torch's matrix product are measured in the same run.
The last line printed is JSON.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kernels.attention import AttentionSpec, BatchGeometry, LayerAttention, LayerCache
from kernels.bench.case import ReferenceCase
from kernels.bench.linear import matmul_gflop_s, read_gb_s
from kernels.bench.selection_cases import selection_on_cpu
from kernels.bench.states import state_cases
from kernels.cpu import operations as ours
from kernels.cpu.backend import CpuAttention
from kernels.cpu.native import build
from kernels.reference import operations as theirs
from kernels.reference.attention import ReferenceAttention
from kernels.reference.cache_quantisation import encode
from kernels.sampling import SamplingTable

_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE = 14, 2, 64, 16
_HIDDEN, _INNER = 896, 4864
# DeepSeek-V3.2's indexer, with an eighth of its heads.
_SELECTION = {
    **{"top_k": 2048, "heads": 16, "rank": 512, "rope_dim": 64, "block_size": _BLOCK_SIZE},
    **{"index_heads": 64, "index_dim": 128},
}
_CPU = torch.device("cpu")
_SECONDS = 1.0  # of calls for each case, ours and the reference's together
_MIN_ROUNDS = 5


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0; 1 if a kernel is wrong; 2 if there are none."""
    parser = argparse.ArgumentParser(
        prog="python -m kernels.bench.cpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--only", default="", help="cases whose name holds this word")
    parser.add_argument("--seconds", type=float, default=_SECONDS, help="for each case")
    options = parser.parse_args(argv)
    if build.load() is None:
        print("no native CPU kernels here", file=sys.stderr)
        return 2
    torch.set_num_threads(options.threads)
    ceilings = {"read_gb_s": read_gb_s(), "matmul_gflop_s": matmul_gflop_s()}
    print(f"{ceilings['read_gb_s']:.1f} GB/s read, {ceilings['matmul_gflop_s']:.0f} GFLOP/s bf16")
    print(f"{'case':36} {'us':>9} {'twin us':>9} {'ratio':>6} {'GB/s':>6} {'GFLOP/s':>8}")
    cases = _cases(getattr(torch, options.dtype), options.only)
    results = [_measure(case, options.seconds) for case in cases]
    summary = {"threads": options.threads, "dtype": options.dtype, **ceilings, "results": results}
    print(json.dumps(summary))
    return 0 if all(result["is_right"] for result in results) else 1


def _measure(case: ReferenceCase, seconds: float) -> dict[str, Any]:
    ours_first, theirs_first = case.run().double(), case.reference().double()
    error = float((ours_first - theirs_first).norm() / theirs_first.norm())
    times: tuple[list[float], list[float]] = ([], [])
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times[0]) < _MIN_ROUNDS:
        for run, spent in zip((case.run, case.reference), times, strict=True):
            begin = time.perf_counter()
            run()
            spent.append(time.perf_counter() - begin)
    run_s, twin_s = map(min, times)
    result = {
        "case": case.name,
        "us": run_s * 1e6,
        "twin_us": twin_s * 1e6,
        "ratio": twin_s / run_s,
        "gb_s": case.bytes_moved / run_s / 1e9,
        "gflop_s": case.flops / run_s / 1e9,
        "is_right": error < 0.02,
    }
    mark = "" if result["is_right"] else f"  WRONG ({error:.1e})"
    print(
        f"{case.name:36} {result['us']:9.1f} {result['twin_us']:9.1f} {result['ratio']:5.1f}x "
        f"{result['gb_s']:6.1f} {result['gflop_s']:8.0f}{mark}",
        flush=True,
    )
    return result


def _cases(dtype: torch.dtype, only: str) -> Iterator[ReferenceCase]:
    """The cases whose names hold ``only``. Caches take seconds to fill, so others get none."""
    for name, *given in _attention_shapes():
        if only in name:
            yield _attention(name, dtype, *given)
    for rows, queries, past in ((1, 1, 8191), (8, 1, 4095), (1, 64, 4096)):
        name = f"selection {rows} x {queries} after {past}"
        if only in name:
            step = {"rows": rows, "queries": queries, "past": past}
            yield selection_on_cpu(name, dtype, **step, **_SELECTION)
    yield from (case for case in _other_cases(dtype) if only in case.name)


def _attention_shapes() -> Iterator[tuple[Any, ...]]:
    """The arguments of ``_attention``, apart from the dtype."""
    for rows, context in ((1, 320), (16, 320), (64, 1000), (1, 8192)):
        yield f"decode {rows} x {context}", rows, 1, context - 1
    for name, codes in (("", None), (" int8", torch.int8), (" fp8", torch.float8_e4m3fn)):
        # As in a whole model: no layer finds its keys in a processor's cache.
        yield f"decode 8 x 4096, 24 layers{name}", 8, 1, 4095, codes, 24
        yield f"prefill 1 x 512 after 7680{name}", 1, 512, 7680, codes
    for rows, queries, past in ((4, 256, 0), (1, 512, 0), (1, 512, 3584)):
        name = f"prefill {rows} x {queries}" + (f" after {past}" if past else "")
        yield name, rows, queries, past


def _other_cases(dtype: torch.dtype) -> Iterator[ReferenceCase]:
    for rows in (1, 16, 512):
        yield from _layer(dtype, rows)
    yield from state_cases(dtype)
    for rows, vocab in ((16, 32_000), (16, 151_936)):
        yield _sampling(f"greedy {rows} x {vocab}", rows, vocab, 0.0)
        yield _sampling(f"top-p {rows} x {vocab}", rows, vocab, 0.8)


def _attention(
    name: str,
    dtype: torch.dtype,
    rows: int,
    queries: int,
    past: int,
    codes: torch.dtype | None = None,
    layers: int = 1,
) -> ReferenceCase:
    """``rows`` sequences of ``past`` + ``queries`` tokens in scattered blocks, as ``codes`` if
    given.

    Successive calls use successive ones of ``layers`` caches.
    """
    seq_len = past + queries
    blocks = -(-seq_len // _BLOCK_SIZE)
    places = np.random.default_rng(0).permutation(rows * blocks).reshape(rows, blocks)
    starts, seq_lens = np.arange(rows + 1) * queries, np.full(rows, seq_len)
    geometry = BatchGeometry.of(starts, seq_lens, places, _CPU)
    spec = AttentionSpec(_HEADS, _KV_HEADS, _HEAD_DIM, _BLOCK_SIZE, dtype, _CPU, cache_dtype=codes)
    layer = LayerAttention(_HEAD_DIM**-0.5)
    shape = (rows * blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM)
    caches = [_cache(shape, dtype, codes) for _ in range(layers)]
    turns = itertools.cycle(caches), itertools.cycle(caches)
    query = torch.randn(rows * queries, _HEADS, _HEAD_DIM).to(dtype)
    cpu, reference = CpuAttention(), ReferenceAttention()
    state, twin_state = cpu.plan(geometry, spec), reference.plan(geometry, spec)
    seen = queries * past + queries * (queries + 1) / 2
    cache_bytes = sum(stored.nbytes for stored in caches[0].tensors())
    return ReferenceCase(
        name,
        lambda: cpu.forward(state, layer, query, next(turns[0])),
        lambda: reference.forward(twin_state, layer, query, next(turns[1])),
        cache_bytes + 2 * query.nbytes,
        4.0 * rows * _HEADS * _HEAD_DIM * seen,
    )


def _cache(shape: tuple[int, ...], dtype: torch.dtype, codes: torch.dtype | None) -> LayerCache:
    keys, values = (torch.randn(shape).to(dtype) for _ in range(2))
    if codes is None:
        return LayerCache(keys, values)
    (keys, key_scales), (values, value_scales) = encode(keys, codes), encode(values, codes)
    return LayerCache(keys, values, key_scales, value_scales)


def _layer(dtype: torch.dtype, rows: int) -> Iterator[ReferenceCase]:
    """The parts of a layer besides attention and products."""
    x, weight = torch.randn(rows, _HIDDEN).to(dtype), torch.randn(_HIDDEN).to(dtype)
    residuals = [torch.zeros_like(x) for _ in range(2)]
    # Nothing is added to the residuals, so they stay the same however often this runs.
    zeros = torch.zeros_like(x)
    for residual in residuals:
        residual += x
    yield ReferenceCase(
        f"add and norm {rows}",
        lambda: ours.add_rms_norm(zeros, residuals[0], weight, 1e-5),
        lambda: theirs.add_rms_norm(zeros, residuals[1], weight, 1e-5),
        4 * x.nbytes,
    )
    gate_up = torch.randn(rows, 2 * _INNER).to(dtype)
    yield ReferenceCase(
        f"silu and multiply {rows}",
        lambda: ours.silu_mul(gate_up),
        lambda: theirs.silu_mul(gate_up),
        1.5 * gate_up.nbytes,
    )
    fused = torch.randn(rows, _HEADS + 2 * _KV_HEADS, _HEAD_DIM).to(dtype)
    norm = torch.randn(_HEADS + _KV_HEADS, _HEAD_DIM).to(dtype)
    angles = torch.rand(rows, 1, _HEAD_DIM // 2)
    rotation = (angles.cos(), angles.sin())
    blocks = -(-rows // _BLOCK_SIZE)
    cache = LayerCache(*torch.zeros(2, blocks, _KV_HEADS, _BLOCK_SIZE, _HEAD_DIM, dtype=dtype))
    slots = torch.randperm(blocks * _BLOCK_SIZE)[:rows]
    yield ReferenceCase(
        f"norm, rope and store {rows}",
        lambda: ours.norm_rope_store(fused, norm, 1e-6, rotation, cache, slots),
        lambda: theirs.norm_rope_store(fused, norm, 1e-6, rotation, cache, slots),
        2 * fused.nbytes,
    )


def _sampling(name: str, rows: int, vocab: int, temperature: float) -> ReferenceCase:
    logits = torch.randn(rows, vocab) * 3
    zeros, ints = torch.zeros(rows), torch.zeros(rows, dtype=torch.int32)
    table = SamplingTable(
        temperature=zeros + temperature,
        top_k=ints,
        top_p=zeros + 0.9,
        min_p=zeros,
        presence=zeros,
        frequency=zeros,
        repetition=zeros + 1,
        seed=torch.arange(rows),
        count_line=ints - 1,
        mask_line=ints - 1,
        bias_begin=ints,
        bias_end=ints,
    )
    slots, positions = torch.arange(rows, dtype=torch.int32), torch.arange(rows)

    def run(sample: Callable[..., Any]) -> torch.Tensor:
        # Sampling overwrites its logits, so both times include a copy.
        return sample(logits.clone(), slots, positions, table).token_ids

    return ReferenceCase(
        name, lambda: run(ours.sample), lambda: run(theirs.sample), 3.0 * logits.nbytes
    )


if __name__ == "__main__":
    sys.exit(main())
