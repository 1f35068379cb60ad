"""Launches in the shapes of real models, on ``meta`` tensors: nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch

from kernels.attention import DeviceGeometry, LayerAttention, LayerCache
from kernels.lora import AdapterRows, AdapterWeights
from kernels.moe import ExpertMatrices, ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.sampling import LogitBias, SamplingTable, TokenCounts
from kernels.skinny import RowNorm
from kernels.sparse import IndexQuery
from kernels.tiled import TiledWeight
from kernels.triton import plan as plan_module
from kernels.triton import prefill as prefill_module
from kernels.triton import quantised as quantised_module
from kernels.triton.channel_scan_chunks import channel_scan
from kernels.triton.decode import decode_attention
from kernels.triton.delta_chunks import gated_delta
from kernels.triton.distribution import distribution
from kernels.triton.drafts import accept_drafts, sample_from_probs, verify_drafts
from kernels.triton.feedback import feed_back
from kernels.triton.gates import add_gated, apply_gate, gated_rms_norm
from kernels.triton.inputs import StepRows, build_inputs
from kernels.triton.invariant_decode import invariant_decode
from kernels.triton.invariant_prefill import invariant_prefill
from kernels.triton.kv_store import copy_blocks, norm_rope_store
from kernels.triton.latent import latent_decode, latent_prefill, latent_rope_store
from kernels.triton.layers import (
    add_rms_norm,
    clamped_silu_mul,
    clamped_swiglu,
    gelu_mul,
    rms_norm,
    rope_tables,
    silu_mul,
    xielu,
)
from kernels.triton.lora import add_adapters
from kernels.triton.matmul import invariant_heads, invariant_linear
from kernels.triton.moe import add_experts, fused_moe, invariant_moe
from kernels.triton.plan import plan_attention
from kernels.triton.prefill import prefill_attention
from kernels.triton.quantised import packed_linear
from kernels.triton.routing import invariant_route, route
from kernels.triton.sampling import sample
from kernels.triton.scaled import quantise_rows, rescale
from kernels.triton.scan_chunks import selective_scan
from kernels.triton.short_conv import gated_conv, short_conv
from kernels.triton.skinny import skinny_linear
from kernels.triton.skinny_packed import skinny_packed_linear
from kernels.triton.sparse import index_rope_store, index_weights, select_slots
from kernels.triton.work import SPLIT_SIZE, UNIT, AttentionPlan, WorkBounds

META = torch.device("meta")
BF16 = torch.bfloat16
FLOAT = torch.float32


def empty(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=META)


def ints(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int32)


def longs(*shape: int) -> torch.Tensor:
    return empty(*shape, dtype=torch.int64)


def attention_plan(
    bounds: WorkBounds,
    window: int | None,
    group: int,
    kv_heads: int = 1,
    *,
    is_bidirectional: bool = False,
) -> AttentionPlan:
    rows = bounds.num_rows
    ends = ints(8192) if is_bidirectional else None
    geometry = DeviceGeometry(ints(rows + 1), ints(rows), ints(rows), ints(1024, 64), ends)
    return plan_attention(bounds, geometry, (window,), group, kv_heads)


def cache_of(
    kv_heads: int,
    block: int,
    dim: int,
    codes: torch.dtype | None = None,
    dtype: torch.dtype = BF16,
) -> LayerCache:
    """A cache in bf16, or in codes with their scales."""
    shape, blocks = (20000, kv_heads, block, dim), (20000, kv_heads, block)
    if codes is None:
        return LayerCache(empty(*shape, dtype=dtype), empty(*shape, dtype=dtype))
    scales = [empty(*blocks, dtype=torch.float32) for _ in range(2)]
    return LayerCache(empty(*shape, dtype=codes), empty(*shape, dtype=codes), *scales)


def decode(
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int | None,
    cap: float | None,
    *,
    codes: torch.dtype | None = None,
    dtype: torch.dtype = BF16,
    invariant: bool = False,
    rows: int = 256,
) -> None:
    """``rows``: so few have parts (decode.py)."""
    plan_module.persistent_programs = lambda _, of_each: 132 * of_each
    size = SPLIT_SIZE if invariant else UNIT
    bounds = WorkBounds(rows, 1024, 0, tiles_only=False, split_size=size)
    plan = attention_plan(bounds, window, heads // kv_heads, kv_heads)
    cache = cache_of(kv_heads, block, dim, codes, dtype)
    query, output = (empty(rows, heads, dim, dtype=dtype) for _ in range(2))
    attend = invariant_decode if invariant else decode_attention
    attend(plan, LayerAttention(0.1, window, cap), query, cache, output)


def prefill(
    heads: int,
    kv_heads: int,
    dim: int,
    block: int,
    window: int | None,
    cap: float | None,
    *,
    invariant: bool = False,
    codes: torch.dtype | None = None,
    dtype: torch.dtype = BF16,
    is_bidirectional: bool = False,
    copies_tiles: bool = True,
) -> None:
    prefill_module.COPIES_TILES = copies_tiles
    bounds = WorkBounds(8, 0, 64, tiles_only=False)
    plan = attention_plan(bounds, window, heads // kv_heads, is_bidirectional=is_bidirectional)
    cache = cache_of(kv_heads, block, dim, codes, dtype)
    query, output = (empty(8192, heads, dim, dtype=dtype) for _ in range(2))
    layer = LayerAttention(0.1, window, cap, is_bidirectional=is_bidirectional)
    attend = invariant_prefill if invariant else prefill_attention
    attend(plan, layer, query, cache, output)


def layer_parts(hidden: int, inner: int, heads: int, kv_heads: int, dim: int) -> None:
    rows = 256
    add_rms_norm(empty(rows, hidden), empty(rows, hidden), empty(hidden), 1e-5)
    rms_norm(empty(rows, hidden), empty(hidden), 1e-5)
    silu_mul(empty(rows, 2 * inner))
    gelu_mul(empty(rows, 2 * inner))
    xielu(empty(rows, inner), empty(4, dtype=torch.float32))
    rope_tables(longs(rows), empty(dim // 2, dtype=torch.float32), 1.0)
    cache_writes(heads, kv_heads, dim)


def cache_writes(heads: int, kv_heads: int, dim: int, *, codes: torch.dtype | None = None) -> None:
    rows, cache = 256, cache_of(kv_heads, 64, dim, codes)
    angles = empty(rows, 1, dim // 2, dtype=torch.float32)
    norm_rope_store(
        empty(rows, heads + 2 * kv_heads, dim),
        empty(heads + kv_heads, dim),
        1e-6,
        (angles, angles),
        cache,
        empty(rows, dtype=torch.int64),
    )
    copy_blocks(cache, empty(4, dtype=torch.int64), empty(4, dtype=torch.int64))


def sampling(vocab: int) -> None:
    for choose in (sample, distribution):
        choose(
            empty(256, vocab, dtype=torch.float32),
            ints(256),
            longs(256),
            sampling_table(),
            TokenCounts(ints(8, vocab), empty(8, vocab, dtype=torch.bool)),
            LogitBias(ints(64), empty(64, dtype=torch.float32), longs(64)),
            ints(8, -(-vocab // 32)),
        )


def plain_sampling(vocab: int) -> None:
    """Sampling as in a captured step."""
    sample(empty(256, vocab), ints(256), longs(256), sampling_table())


def sampling_table() -> SamplingTable:
    slots, floats = ints(256), empty(256, dtype=torch.float32)
    return SamplingTable(floats, slots, *[floats] * 5, longs(256), *[slots] * 4)


def judging(vocab: int) -> None:
    wanted, proposed = (empty(64, vocab, dtype=torch.float32) for _ in range(2))
    for given in (proposed, None):
        verify_drafts(wanted, given, longs(64), longs(64), longs(64))
    sample_from_probs(proposed, longs(64), longs(64), 1)
    accept_drafts(longs(256), ints(80), longs(80), empty(80, dtype=torch.bool), ints(16))


def inputs() -> None:
    rows = StepRows(ints(64), ints(65), ints(64), ints(512))
    newest = empty(256, dtype=torch.int64)
    build_inputs(rows, newest, ints(256, 512), 16, 512)
    counts = TokenCounts(ints(8, 128256), empty(8, 128256, dtype=torch.bool))
    feed_back(newest, ints(64), empty(64, dtype=torch.int64), ints(256), counts)


def delta_rule(tokens: int, shape: GatedDeltaShape, dtype: torch.dtype = BF16) -> torch.Tensor:
    """The delta rule in a decode step of 64 sequences, or with prompts."""
    rows = StepRows(ints(64), ints(65), ints(64), ints(64))
    log_a = empty(shape.value_heads, dtype=torch.float32)
    dt_bias = empty(shape.value_heads * shape.num_decays, dtype=torch.float32)
    state = empty(65, shape.value_heads, shape.key_dim, shape.value_dim, dtype=torch.float32)
    mixed = empty(tokens, shape.channels, dtype=dtype)
    gates = empty(tokens, shape.value_heads * (1 + shape.num_decays), dtype=dtype)
    return gated_delta(mixed, gates, log_a, dt_bias, state, rows, shape)


def state_space(tokens: int, shape: ScanShape, dtype: torch.dtype = BF16) -> torch.Tensor:
    rows = StepRows(ints(64), ints(65), ints(64), ints(64))
    floats = [empty(shape.heads, dtype=torch.float32) for _ in range(3)]
    state = empty(65, shape.heads, shape.state_size, shape.head_dim, dtype=torch.float32)
    mixed = empty(tokens, shape.channels, dtype=dtype)
    steps = empty(tokens, shape.heads, dtype=dtype)
    return selective_scan(mixed, steps, *floats, state, rows, shape)


def channels(count: int, rank: int) -> None:
    """Mamba-1's states, in a decode step of 64 sequences and with prompts."""
    rows = StepRows(ints(64), ints(65), ints(64), ints(64))
    rates, skip, state = (
        empty(*shape, dtype=torch.float32) for shape in ((16, count), (count,), (65, 16, count))
    )
    for tokens in (64, 512):
        x, steps = (empty(tokens, count, dtype=BF16) for _ in range(2))
        shared = empty(tokens, rank + 32, dtype=BF16)
        channel_scan(
            x, steps, shared[:, rank : rank + 16], shared[:, rank + 16 :], rates, skip, state, rows
        )


def gates() -> None:
    """A gate for each head's values, and clamped SwiGLUs."""
    apply_gate(empty(64 * 48, 128), empty(64 * 48, 1), "softplus")
    apply_gate(empty(64, 4096), empty(64, 4096), "sigmoid")
    clamped_silu_mul(empty(64, 2 * 1280), 7.0)
    clamped_swiglu(empty(64, 2 * 1280), 1.702, 7.0)


def recurrent(delta: GatedDeltaShape, scan: ScanShape) -> None:
    """Recurrent layers as in Qwen3-Next and Granite 4, in decode steps and with prompts."""
    rows = StepRows(ints(64), ints(65), ints(64), ints(64))
    for tokens in (64, 512):
        y = delta_rule(tokens, delta)
        gated_rms_norm(y, empty(tokens, y[0].numel()), empty(delta.value_dim), 1e-6, False)
        apply_gate(y.flatten(1), empty(tokens, 1), "sigmoid")
        lines = empty(65, 3, delta.channels)
        mixed = empty(tokens, delta.channels)
        short_conv(mixed, empty(4, delta.channels), None, lines, rows, True)
        gated_conv(empty(tokens, 3 * 2048), empty(3, 2048), None, empty(65, 2, 2048), rows)
        y = state_space(tokens, scan)
        inner = scan.heads * scan.head_dim
        gated_rms_norm(y.view(tokens, 1, inner), empty(tokens, inner), empty(inner), 1e-5, True)


def latents(heads: int, rank: int, rope_dim: int) -> None:
    """Latent attention as in DeepSeek."""
    shape = (20000, 1, 64, rank + rope_dim)
    keys = empty(*shape)
    cache = LayerCache(keys, keys[..., :rank])
    query, output = empty(256, heads, rank + rope_dim), empty(256, heads, rank)
    layer = LayerAttention(0.1)
    single = attention_plan(WorkBounds(256, 1024, 0, tiles_only=False), None, heads)
    latent_decode(single, layer, query, cache, output)
    chunks = attention_plan(WorkBounds(4, 0, 256, tiles_only=False), None, heads)
    latent_prefill(chunks, layer, query, cache, output)
    rotation = tuple(empty(256, 1, rope_dim // 2, dtype=torch.float32) for _ in range(2))
    slots = empty(256, dtype=torch.int64)
    latent_rope_store(query, empty(256, rank + rope_dim), empty(rank), 1e-6, rotation, cache, slots)


def selections(heads: int, index_heads: int) -> None:
    """An indexer of heads of 128, and attention to 2,048 selected slots of latents."""
    rows, top_k, width = 256, 2048, 128
    index_keys = empty(20000, 1, 64, width)
    index = IndexQuery(empty(rows, index_heads, width), empty(rows, index_heads, dtype=FLOAT))
    rotation = tuple(empty(rows, 1, 32, dtype=FLOAT) for _ in range(2))
    norm, slots = (empty(width), empty(width)), longs(rows)
    for query in (index.query, None):
        index_rope_store(query, empty(rows, width), norm, 1e-6, rotation, index_keys, slots)
    index_weights(empty(rows, 7168), empty(index_heads, 7168, dtype=FLOAT))
    tokens = DeviceGeometry(ints(rows + 1), ints(rows), ints(rows), ints(1024, 1024))
    select_slots(index, index_keys, tokens, 65536, ints(rows, top_k))
    few = DeviceGeometry(ints(9), ints(8), ints(8), ints(1024, 1024))
    select_slots(
        IndexQuery(index.query[:8], index.weights[:8]), index_keys, few, 65536, ints(8, top_k)
    )
    keys = empty(20000 * 64, 1, 1, 576)
    cache, layer = LayerCache(keys, keys[..., :512]), LayerAttention(0.1)
    query, output = empty(rows, heads, 576), empty(rows, heads, 512)
    few = attention_plan(WorkBounds(rows, 8 * rows, 0, tiles_only=False), None, heads)
    latent_decode(few, layer, query, cache, output)
    many = attention_plan(WorkBounds(rows, 0, rows, tiles_only=True), None, heads)
    latent_prefill(many, layer, query, cache, output)


def matmul(rows: int, inputs: int, outputs: int) -> None:
    invariant_linear(empty(rows, inputs), empty(outputs, inputs), empty(outputs))


def heads_matmul(rows: int, heads: int, inputs: int, outputs: int, keep: int) -> None:
    invariant_heads(empty(rows, heads, inputs + keep), empty(heads, outputs, inputs), keep)


def skinny(rows: int, inputs: int, outputs: int, part: str) -> None:
    """One product of a layer, or of the head, with its fused operations."""
    norm = RowNorm(empty(inputs), 1e-6)
    x, weight = empty(rows, inputs), empty(2 * outputs if part == "gate-up" else outputs, inputs)
    if part in ("output", "down"):
        skinny_linear(x, weight, stream=empty(rows, outputs))
    elif part == "head":
        skinny_linear(x, weight, dtype=torch.float32)
    else:
        gate = "silu" if part == "gate-up" else None
        skinny_linear(x, weight, empty(weight.shape[0]), norm=norm, gate=gate)


# kind: (group or all inputs, scales, zeros, whether the inputs are reordered), as in files
_PACKED: dict[str, tuple[int | None, torch.dtype, torch.dtype | None, bool]] = {
    "gptq": (128, torch.float16, torch.int8, True),
    "awq": (128, torch.float16, torch.int8, False),
    "nf4": (64, torch.float16, None, False),
    "mxfp4": (32, torch.uint8, None, False),
    "int8": (None, torch.float32, None, False),
    "fp8": (128, torch.float16, None, False),
    "q4_k": (32, torch.float16, torch.float16, False),
    "q6_k": (16, torch.float16, None, False),
}
_KINDS = {
    **{
        "gptq": "int4",
        "awq": "int4",
        "nf4": "table",
        "mxfp4": "e2m1",
        "int8": "int8",
        "fp8": "e4m3",
    },
    **{"q4_k": "int4", "q6_k": "int8"},
}


def tiled(form: str, outputs: int, inputs: int, count: int = 1) -> TiledWeight:
    """A product with one matrix, or with experts."""
    group, scales, zeros, has_order = _PACKED[form]
    kind, group = _KINDS[form], group or inputs
    rows, groups = count * outputs, -(-inputs // group)
    inputs_a_block = 16 if kind in ("int8", "e4m3") else 32
    return TiledWeight(
        empty(rows, -(-inputs // inputs_a_block) * 16, dtype=torch.uint8),
        empty(rows, groups, dtype=scales),
        0.5,
        None if zeros is None else empty(rows, groups, dtype=zeros),
        None if kind in ("int8", "e4m3") else empty(16, dtype=torch.float32),
        ints(count, inputs) if has_order else None,
        kind,
        inputs,
        group,
        count,
    )


def packed_matmul(
    rows: int, inputs: int, outputs: int, form: str, *, invariant: bool = False
) -> None:
    quantised_module.persistent_programs = lambda _, of_each: 132 * of_each
    weight = tiled(form, outputs, inputs)
    packed_linear(empty(rows, inputs), weight, empty(outputs), invariant=invariant)


def rounded_rows(inputs: int, codes: torch.dtype) -> None:
    quantise_rows(empty(64, inputs), codes)


def rescaled_sums(outputs: int) -> None:
    sums = torch.empty((64, outputs), dtype=torch.int32, device=META)
    steps, scales = (torch.empty((n, 1), device=META) for n in (64, outputs))
    rescale(sums, steps, scales, empty(outputs), empty(64, outputs))


def skinny_packed(rows: int, inputs: int, outputs: int, part: str, form: str) -> None:
    x = empty(rows, inputs)
    if part == "gate-up":
        weight, norm = tiled(form, 2 * outputs, inputs), RowNorm(empty(inputs), 1e-6)
        skinny_packed_linear(x, weight, norm=norm, gate="silu")
    else:
        skinny_packed_linear(x, tiled(form, outputs, inputs), stream=empty(rows, outputs))


def moe(
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    *,
    biased: bool = False,
    form: str | None = None,
    invariant: bool = False,
) -> None:
    """A mixture of experts, dense or in codes."""
    gate_up: ExpertMatrices = empty(experts, 2 * inner, hidden)
    down: ExpertMatrices = empty(experts, hidden, inner)
    if form is not None:
        gate_up = tiled(form, 2 * inner, hidden, experts)
        down = tiled(form, hidden, inner, experts)
    biases = (empty(experts, 2 * inner), empty(experts, hidden)) if biased else ()
    mixture = invariant_moe if invariant else fused_moe
    mixture(
        empty(tokens, hidden),
        ExpertTensors(gate_up, down, *biases),
        empty(tokens, top_k, dtype=torch.int64),
        empty(tokens, top_k, dtype=torch.float32),
        (lambda gate_up: clamped_swiglu(gate_up, 1.702, 7.0)) if biased else None,
    )


def few_experts(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, *, form: str | None = None
) -> None:
    """A mixture of experts for few rows, dense or in codes with a gate of its own."""
    gate_up: ExpertMatrices = empty(experts, 2 * inner, hidden)
    down: ExpertMatrices = empty(experts, hidden, inner)
    gating, biases = GatedActivation(silu_mul, "silu"), ()
    if form is not None:
        gate_up = tiled(form, 2 * inner, hidden, experts)
        down = tiled(form, hidden, inner, experts)
        gating = GatedActivation(lambda both: clamped_swiglu(both, 1.702, 7.0), "clamped_swiglu")
        biases = (empty(experts, 2 * inner), empty(experts, hidden))
    add_experts(
        empty(tokens, hidden),
        RowNorm(empty(hidden), 1e-5),
        RouterWeights(empty(experts, hidden), None, None),
        RoutingRule(top_k),
        ExpertTensors(gate_up, down, *biases),
        gating,
    )


def routing(
    tokens: int, experts: int, hidden: int, rule: RoutingRule, *, invariant: bool = False
) -> None:
    has_correction = rule.scoring == "sigmoid"
    correction = empty(experts, dtype=torch.float32) if has_correction else None
    router = invariant_route if invariant else route
    router(empty(tokens, hidden), empty(experts, hidden), None, correction, rule)


def adapters(tokens: int, slots: int, rank: int, inputs: int, outputs: int) -> None:
    nothing = empty(0)
    rows = AdapterRows(longs(tokens), nothing, nothing, np.empty((0, 3), np.int64))
    weights = AdapterWeights(empty(slots, rank, inputs), empty(slots, rank, outputs), nothing)
    add_adapters(empty(tokens, outputs), empty(tokens, inputs), weights, rows)


def shared_expert_gate(tokens: int, hidden: int) -> None:
    add_gated(*(empty(tokens, hidden) for _ in range(3)), empty(1, hidden))


# name: (heads, KV heads, head size, block size, window, cap)
_SHAPES: dict[str, tuple[int, int, int, int, int | None, float | None]] = {
    "llama-8b": (32, 8, 128, 64, None, None),
    "qwen3-0.6b": (16, 8, 128, 16, None, None),
    "qwen2-0.5b": (14, 2, 64, 64, None, None),
    "mistral-7b-window": (32, 8, 128, 64, 4096, None),
    "gemma2-9b": (16, 8, 256, 64, 4096, 50.0),
    "gemma4-31b-full": (32, 4, 512, 64, None, None),
    "tiny-heads": (6, 2, 8, 4, None, None),  # smaller than a matrix product's minimum
}

_CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}

CASES: dict[str, Callable[[], object]] = {
    **{f"decode-{name}": partial(decode, *shape) for name, shape in _SHAPES.items()},
    **{f"decode-few-{name}": partial(decode, *shape, rows=8) for name, shape in _SHAPES.items()},
    "decode-few-llama-8b-int8": partial(decode, *_SHAPES["llama-8b"], rows=8, codes=torch.int8),
    "layer-llama-8b": partial(layer_parts, 4096, 14336, 32, 8, 128),
    "layer-qwen2-0.5b": partial(layer_parts, 896, 4864, 14, 2, 64),
    "sampling-128k": partial(sampling, 128256),
    "plain-sampling-128k": partial(plain_sampling, 128256),
    "judging-128k": partial(judging, 128256),
    "latents-deepseek-v3": partial(latents, 128, 512, 64),
    "latents-deepseek-v2-lite": partial(latents, 16, 512, 64),
    "selections-deepseek-v3.2": partial(selections, 128, 64),
    "selections-glm-5": partial(selections, 64, 32),
    "channels-falcon-mamba-7b": partial(channels, 8192, 256),
    "delta-kimi-linear": partial(
        delta_rule, 512, GatedDeltaShape(32, 32, 128, 128, decays_channels=True)
    ),
    # Sides that are no powers of two, and fewer keys' heads than values'.
    "delta-by-channel-uneven": partial(
        delta_rule, 512, GatedDeltaShape(10, 30, 96, 192, True, decays_channels=True)
    ),
    "delta-ling-3": partial(delta_rule, 512, GatedDeltaShape(32, 32, 128, 128, False, True, -5.0)),
    "gates-laguna-step-3.7": gates,
    "inputs": inputs,
    "recurrent-qwen3-next-granite-4": partial(
        recurrent, GatedDeltaShape(16, 32, 128, 128), ScanShape(128, 1, 64, 128)
    ),
    "delta-rule-olmo-hybrid": partial(delta_rule, 512, GatedDeltaShape(30, 30, 96, 192, True)),
    "state-space-bamba": partial(state_space, 512, ScanShape(128, 1, 64, 256)),
    **{
        f"{name}-{str(dtype).removeprefix('torch.')}": partial(run, 512, shape, dtype)
        for name, run, shape in (
            ("delta-rule-qwen3-next", delta_rule, GatedDeltaShape(16, 32, 128, 128)),
            ("delta-kimi-linear", delta_rule, GatedDeltaShape(32, 32, 128, 128, False, True)),
            ("state-space-granite-4", state_space, ScanShape(128, 1, 64, 128)),
        )
        for dtype in (torch.float16, torch.float32)
    },
    **{
        f"skinny-{rows}-{part}-qwen3-0.6b": partial(skinny, rows, *shape, part)
        for rows in (1, 4)
        for part, shape in {
            "qkv": (1024, 4096),
            "output": (2048, 1024),
            "gate-up": (1024, 3072),
            "down": (3072, 1024),
            "head": (1024, 151_936),
        }.items()
    },
    **{
        f"matmul-{rows}-llama-8b": partial(matmul, rows, 4096, 28672)
        for rows in (1, 20, 40, 100, 8192)
    },
    # So few outputs that each program has the memory of a whole multiprocessor.
    **{f"matmul-{rows}-down-qwen3-0.6b": partial(matmul, rows, 3072, 1024) for rows in (1, 20, 40)},
    **{
        f"matmul-{rows}-key-up-deepseek-v3": partial(heads_matmul, rows, 128, 128, 512, 64)
        for rows in (1, 8192)
    },
    **{
        f"{form}-{rows}-llama-8b": partial(packed_matmul, rows, 4096, 28672, form)
        for form in _PACKED
        for rows in (8, 32, 64, 8192)
    },
    # So few programs that each has the memory of a whole multiprocessor.
    **{f"{form}-8-few-outputs": partial(packed_matmul, 8, 4096, 256, form) for form in _PACKED},
    **{
        f"invariant-{form}-{rows}-llama-8b": partial(
            packed_matmul, rows, 4096, 28672, form, invariant=True
        )
        for form in ("gptq", "fp8", "mxfp4")
        for rows in (8, 8192)
    },
    **{
        f"skinny-{form}-{rows}-{part}-llama-8b": partial(skinny_packed, rows, *shape, part, form)
        for form in _PACKED
        for rows in (1,)
        for part, shape in {"gate-up": (4096, 14336), "down": (14336, 4096)}.items()
    },
    "float8-rows-llama-8b": partial(rounded_rows, 4096, torch.float8_e4m3fn),
    "int8-rows-llama-8b": partial(rounded_rows, 4096, torch.int8),
    "int8-sums-llama-8b": partial(rescaled_sums, 28672),
    "gptq-split-llama-8b": partial(packed_matmul, 8, 14336, 4096, "gptq"),
    **{
        f"few-experts-{tokens}-qwen3-30b": partial(few_experts, tokens, 128, 8, 2048, 768)
        for tokens in (1, 4)
    },
    "few-experts-1-gpt-oss-20b": partial(few_experts, 1, 32, 4, 2880, 2880, form="mxfp4"),
    "routing-qwen3-30b": partial(routing, 1, 128, 2048, RoutingRule(8)),
    "routing-qwen3-next": partial(routing, 64, 512, 2048, RoutingRule(10)),
    "routing-deepseek-v3": partial(
        *(routing, 64, 256, 7168),
        RoutingRule(8, "sigmoid", scale=2.5, num_groups=8, top_groups=4, group_best=2),
    ),
    "routing-kolibri-1": partial(routing, 64, 384, 2560, RoutingRule(6, "late_sigmoid")),
    "routing-phi-3.5-moe": partial(
        *(routing, 64, 16, 4096), RoutingRule(2, "sparse_mixer", normalised=False, margin=0.02)
    ),
    "invariant-routing-qwen3-30b": partial(routing, 64, 128, 2048, RoutingRule(8), invariant=True),
    **{
        f"adapters-{tokens}-llama-8b": partial(adapters, tokens, 8, 48, 4096, 6144)
        for tokens in (1, 32, 512, 8192)
    },
    "adapters-32-llama-8b-down": partial(adapters, 32, 8, 128, 14336, 4096),
    "shared-expert-gate-qwen3-next": partial(shared_expert_gate, 64, 2048),
    **{
        f"invariant-moe-{tokens}-qwen3-30b{form and '-' + form}": partial(
            moe, tokens, 128, 8, 2048, 768, form=form or None, invariant=True
        )
        for tokens in (8, 8192)
        for form in ("", "gptq")
    },
    "moe-decode-qwen3-30b": partial(moe, 64, 128, 8, 2048, 768),
    "moe-decode-gpt-oss-20b": partial(moe, 64, 32, 4, 2880, 2880, biased=True),
    "moe-prefill-qwen3-30b": partial(moe, 8192, 128, 8, 2048, 768),
    **{
        f"moe-{form}-{tokens}-gpt-oss-20b": partial(
            moe, tokens, 32, 4, 2880, 2880, biased=True, form=form
        )
        for form, tokens in (("mxfp4", 1), ("mxfp4", 512), ("mxfp4", 8192))
    },
    "moe-mxfp4-8192-gpt-oss-120b": partial(
        moe, 8192, 128, 4, 2880, 2880, biased=True, form="mxfp4"
    ),
    **{
        f"moe-{form}-{tokens}-qwen3-30b": partial(moe, tokens, 128, 8, 2048, 768, form=form)
        for form in ("gptq", "fp8", "q4_k")
        for tokens in (64, 8192)
    },
    **{f"prefill-{name}": partial(prefill, *shape) for name, shape in _SHAPES.items()},
    **{
        f"prefill-{name}-pointers": partial(prefill, *_SHAPES[name], copies_tiles=False)
        for name in ("llama-8b", "mistral-7b-window", "qwen2-0.5b")
    },
    **{
        f"prefill-{name}-float32": partial(prefill, *_SHAPES[name], dtype=torch.float32)
        for name in ("llama-8b", "gemma2-9b")
    },
    **{
        f"{kind}-{name}-{codes}": partial(run, *_SHAPES[name], codes=dtype)
        for name in ("llama-8b", "qwen2-0.5b", "gemma2-9b", "gemma4-31b-full")
        for codes, dtype in _CODES.items()
        for kind, run in (("decode", decode), ("prefill", prefill))
    },
    "prefill-gemma3-4b-images": partial(prefill, 8, 4, 256, 64, None, None, is_bidirectional=True),
    "prefill-gemma3-4b-images-window": partial(
        prefill, 8, 4, 256, 64, 1024, None, is_bidirectional=True
    ),
    "prefill-gemma4-31b-images": partial(
        prefill, 32, 4, 512, 64, None, None, is_bidirectional=True
    ),
    "cache-writes-gemma4-31b-full": partial(cache_writes, 32, 4, 512),
    **{
        f"cache-writes-llama-8b-{codes}": partial(cache_writes, 32, 8, 128, codes=dtype)
        for codes, dtype in _CODES.items()
    },
    **{
        f"invariant-{kind}-{name}": partial(run, *shape, invariant=True)
        for kind, run in (("decode", decode), ("prefill", prefill))
        for name, shape in _SHAPES.items()
    },
    **{
        f"invariant-{kind}-{name}-{codes}": partial(
            run, *_SHAPES[name], codes=dtype, invariant=True
        )
        for kind, run in (("decode", decode), ("prefill", prefill))
        for name in ("llama-8b", "gemma4-31b-full")
        for codes, dtype in _CODES.items()
    },
    **{
        f"invariant-{kind}-gemma2-9b-float32": partial(
            run, *_SHAPES["gemma2-9b"], dtype=torch.float32, invariant=True
        )
        for kind, run in (("decode", decode), ("prefill", prefill))
    },
}
