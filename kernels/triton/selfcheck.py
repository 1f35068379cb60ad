"""Check on the actual device that the kernels are correct: each runs once, small, with its
reference.

This finds at start, where the model will run, what the interpreter and a compiler cannot: a driver
that miscompiles, too little shared memory, a bug that shows only in parallel threads. The kernels
that it compiles are those the model is about to need.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from kernels.attention import (
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)
from kernels.inputs import StepRows
from kernels.lora import AdapterWeights, adapter_rows, nonzero_spans
from kernels.moe import ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.operations import Kernels
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import operations as reference
from kernels.reference.attention import ReferenceAttention
from kernels.reference.cache_quantisation import encode
from kernels.sampling import LogitBias, SamplingTable, TokenCounts
from kernels.skinny import RowNorm
from kernels.triton.check_helpers import (
    CPU,
    TOLERANCES,
    Pairs,
    copy_to,
    failure_reason,
    new_generator,
    normal,
)
from kernels.triton.check_selection import selections
from kernels.triton.work import queries_per_tile

# Differences in the last bits may lead to an adjacent code.
_CODES_TOLERANCE = 5e-2
_ROWS = 6
_VOCAB = 4500
# Tokens of the rows of steps with states: in chunks or not, and one each.
_STATE_STEPS = ((3, 70, 20, 1), (1, 1, 1, 1))


def self_check(kernels: Kernels, spec: AttentionSpec) -> str | None:
    """Return why the kernels are incorrect on ``spec.device``, or None if they are correct."""
    random = new_generator()
    tolerance = TOLERANCES[spec.dtype] if spec.cache_dtype is None else _CODES_TOLERANCE
    for what, check in _CHECKS.items():
        reason = failure_reason(what, partial(check, kernels, spec, random), tolerance)
        if reason is not None:
            return reason
    return None


def check_batch_invariance(kernels: Kernels, spec: AttentionSpec) -> str | None:
    """Return why a query's attention may differ in bits alone and in a chunk on ``spec.device``, or
    None.

    This is for kernels that promise they are the same.
    """
    random = new_generator()
    return failure_reason(
        "batch-invariant attention", partial(_cut_chunks, kernels, spec, random), 0.0
    )


def _attention(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield single queries in one split and several, and chunks with and without a past."""
    two_tiles = queries_per_tile(spec.num_heads // spec.num_kv_heads) + 3
    # The longest past of a chunk is several tiles that all of its queries see.
    queries, past = np.array([1, 1, 7, two_tiles, 1]), np.array([0, 600, 470, 0, 33])
    seq_lens = queries + past
    blocks = -(-seq_lens // spec.block_size)
    places = torch.randperm(int(blocks.sum()), generator=random).numpy()
    tables = np.zeros((len(blocks), int(blocks.max())), np.int32)
    is_used = np.zeros((len(places), spec.block_size), np.bool_)
    for row, (end, count) in enumerate(zip(np.cumsum(blocks), blocks, strict=True)):
        tables[row, :count] = places[end - count : end]
        slots = np.arange(seq_lens[row])
        is_used[tables[row, slots // spec.block_size], slots % spec.block_size] = True
    cache = _cache(spec, len(places), random)
    # Poison goes where every kind of cache can hold it: integer codes cannot, their scales can.
    poisoned = cache[:2] if spec.cache_dtype is None else cache[2:4]
    for stored in poisoned:
        assert stored is not None
        stored.transpose(1, 2)[torch.from_numpy(~is_used)] = float("nan")
    query = normal(random, spec.dtype, int(queries.sum()), spec.num_heads, spec.head_dim)
    sinks = normal(random, torch.float32, spec.num_heads) if spec.has_sinks else None
    starts = np.concatenate(([0], np.cumsum(queries)))
    sides = ((kernels.attention, spec), (ReferenceAttention(), replace(spec, device=CPU)))
    # As if a prompt ended with an image whose tokens attend to each other.
    ahead = [None] if not spec.is_bidirectional else [None, np.repeat(seq_lens, queries)]
    for window, ends in itertools.product(spec.windows, ahead):
        outputs = []
        scale, is_bidirectional = spec.head_dim**-0.5, ends is not None
        layer = LayerAttention(
            scale, window, spec.softcap, sinks, is_bidirectional=is_bidirectional
        )
        for backend, side in sides:
            geometry = BatchGeometry.of(starts, seq_lens, tables, side.device, ends)
            state = backend.plan(geometry, side)
            moved, *inputs = copy_to((layer, query, cache), side.device)
            # Freed at once, and likely reused for the output: unwritten parts show.
            torch.full_like(inputs[0], float("nan"))
            outputs.append(backend.forward(state, moved, *inputs))
        yield outputs[0], outputs[1]


def _cut_chunks(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield a chunk after a past, and some of its queries alone, as bits."""
    past, queries = 600, queries_per_tile(spec.num_heads // spec.num_kv_heads) + 3
    seq_len, alone = past + queries, np.array([0, queries // 2, queries - 1])
    tables = torch.randperm(-(-seq_len // spec.block_size), generator=random).int().numpy()[None]
    cache = copy_to(_cache(spec, tables.size, random), spec.device)
    query = normal(random, spec.dtype, queries, spec.num_heads, spec.head_dim).to(spec.device)
    sinks = normal(random, torch.float32, spec.num_heads) if spec.has_sinks else None
    whole = np.array([0, queries]), np.array([seq_len]), tables
    cut = np.arange(alone.size + 1), past + 1 + alone, np.repeat(tables, alone.size, axis=0)
    for window in spec.windows:
        layer = LayerAttention(spec.head_dim**-0.5, window, spec.softcap, sinks)
        layer, sides = copy_to(layer, spec.device), []
        for shape, asked in ((cut, query[alone]), (whole, query)):
            state = kernels.attention.plan(BatchGeometry.of(*shape, spec.device), spec)
            sides.append(kernels.attention.forward(state, layer, asked, cache))
        yield sides[0].view(torch.uint8), sides[1][alone].view(torch.uint8).cpu()


def _layers(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    hidden = spec.num_heads * spec.head_dim
    x, residual, weight = (normal(random, spec.dtype, *s) for s in ([5, hidden],) * 2 + ([hidden],))
    yield _both(kernels, spec, "rms_norm", x, weight, 1e-5)
    yield _both(kernels, spec, "add_rms_norm", x, residual, weight, 1e-5)
    yield _both(
        kernels, spec, "clamped_swiglu", normal(random, spec.dtype, 5, 2 * hidden), 1.702, 1.5
    )
    half = normal(random, spec.dtype, 5, 2 * hidden)
    yield _both(kernels, spec, "clamped_silu_mul", half, 1.5)
    bend = torch.tensor([0.8, 0.7, 0.5, -1e-6])
    yield _both(kernels, spec, "xielu", normal(random, spec.dtype, 5, hidden), bend)
    frequencies, far = torch.logspace(0, -5, spec.head_dim // 2), torch.tensor([0, 1, 999, 131_071])
    yield _both(kernels, spec, "rope_tables", far, frequencies, 0.5)
    for activation in ("silu_mul", "gelu_mul"):
        yield _both(kernels, spec, activation, normal(random, spec.dtype, 5, 2 * hidden))


def _grouped_products(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Adapters, with a token that has none; and experts where a model has some: what chooses among
    them and takes few tokens is a dozen kernels that a start would wait for."""
    x = normal(random, spec.dtype, 5, 48)
    rows = adapter_rows(np.array([2, -1, 0, 2, 1]), 3, CPU)
    downs, ups = normal(random, spec.dtype, 3, 8, 48) / 7, normal(random, spec.dtype, 3, 8, 64)
    weights = AdapterWeights(downs, ups, torch.stack([nonzero_spans(up) for up in ups]))
    yield _both(kernels, spec, "add_adapters", normal(random, spec.dtype, 5, 64), x, weights, rows)
    if spec.has_experts:
        yield from _experts(kernels, spec, random)


def _experts(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Their products, and who goes to which."""
    x = normal(random, spec.dtype, 5, 48)
    gate_up, down = normal(random, spec.dtype, 3, 64, 48), normal(random, spec.dtype, 3, 48, 32)
    chosen = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0], [0, 1]])
    shares = torch.rand(5, 2, generator=random)
    experts = ExpertTensors(gate_up / 7, down / 6, gate_up[:, :, 0], down[:, :, 0])
    yield _both(kernels, spec, "fused_moe", x, experts, chosen, shares)
    gate = normal(random, spec.dtype, 1, 48) / 7
    yield _both(kernels, spec, "add_gated", x, normal(random, spec.dtype, 5, 48), x / 2, gate)
    x, weight = _separated_routing(x, 12, random)
    grouped = RoutingRule(2, "sigmoid", num_groups=3, top_groups=2, group_best=2)
    for router in (
        (weight, None, None, RoutingRule(3)),
        (weight, weight[:, 0] / 16, None, RoutingRule(3, normalised=False, scale=2.0)),
        (weight, None, None, RoutingRule(2, "sparse_mixer", normalised=False, margin=0.4)),
        (weight, None, None, RoutingRule(3, "late_sigmoid")),
        (weight / 4, None, torch.arange(12) / 16, grouped),
    ):
        yield _both(kernels, spec, "route", x[:3], *router)
        yield _both(kernels, spec, "route", x, *router)
    few, weight = _separated_routing(x[:3], 3, random)
    norm, router = RowNorm(1 + few[0].abs(), 1e-5), RouterWeights(weight, None, None)
    mixed = few, norm, router, RoutingRule(2), experts
    for gating in (
        GatedActivation(reference.silu_mul, "silu"),
        GatedActivation(reference.erf_gelu_mul, "gelu"),
    ):
        yield _both(kernels, spec, "add_experts", *mixed, gating)


def _separated_routing(
    x: torch.Tensor, num_experts: int, random: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens like x, and a router with scores too far apart for rounding to reorder."""
    count = x.shape[0]
    x, weight = x.clone(), torch.zeros(num_experts, x.shape[1])
    x[:, :count] = 4 * torch.eye(count)
    for token in range(count):
        weight[:, token] = torch.randperm(num_experts, generator=random) - 4.3
    return x, weight


def _cache_writes(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield stores with and without query and key norms, a padding token, and a copy of a block."""
    if spec.value_dim is not None:
        yield from _latent_writes(kernels, spec, spec.value_dim, random)
        return
    heads = spec.num_heads + 2 * spec.num_kv_heads
    fused = normal(random, spec.dtype, 5, heads, spec.head_dim)
    weight = normal(random, spec.dtype, heads - spec.num_kv_heads, spec.head_dim)
    frequencies = torch.logspace(0, -4, spec.head_dim // 2)
    rotation = reference.rope_tables(torch.arange(5) * 100, frequencies, 1.0)
    slots = torch.tensor([3, 0, -1, 2 * spec.block_size, 1])
    cache = _cache(spec, 4, random)
    for norm in (weight, None):
        yield _both(kernels, spec, "norm_rope_store", fused, norm, 1e-6, rotation, cache, slots)
    query = fused[:, : spec.num_heads].contiguous()
    yield _both(kernels, spec, "norm_rope", query, weight[:1], 1e-6, rotation)
    yield _both(kernels, spec, "copy_blocks", cache, torch.tensor([0, 2]), torch.tensor([3, 1]))


def _latent_writes(
    kernels: Kernels, spec: AttentionSpec, rank: int, random: torch.Generator
) -> Pairs:
    """Yield a normed latent, rotated queries and key, and a padding token."""
    query = normal(random, spec.dtype, 5, spec.num_heads, spec.head_dim)
    latent, weight = normal(random, spec.dtype, 5, spec.head_dim), normal(random, spec.dtype, rank)
    frequencies = torch.logspace(0, -4, (spec.head_dim - rank) // 2)
    rotation = reference.rope_tables(torch.arange(5) * 100, frequencies, 1.0)
    slots, whole = torch.tensor([3, 0, -1, 2 * spec.block_size, 1]), _cache(spec, 4, random)
    yield _both(kernels, spec, "copy_blocks", whole, torch.tensor([0, 2]), torch.tensor([3, 1]))
    keys = whole.keys
    sides = []
    for operations, device in ((kernels.operations, spec.device), (reference, CPU)):
        q, kept, *rest = copy_to((query, keys, latent, weight, rotation, slots), device)
        cache = LayerCache(kept, kept[..., :rank])
        operations.latent_rope_store(q, rest[0], rest[1], 1e-6, rest[2], cache, rest[3])
        sides.append((q, kept))
    yield sides[0], sides[1]


def _inputs(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield a chunk, newest tokens and a padding row; then tokens fed back."""
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    rows = StepRows(
        slots,
        torch.tensor([0, 1, 31, 32], dtype=torch.int32),
        torch.tensor([77, 15, -1], dtype=torch.int32),
        torch.tensor([-1, *range(30), 0], dtype=torch.int32),
    )
    newest = torch.arange(100, 106)
    tables = torch.randint(0, 99, (6, 1 + 77 // spec.block_size), generator=random).int()
    tables = torch.cat((tables, tables), dim=1)
    yield _both(kernels, spec, "build_inputs", rows, newest, tables, spec.block_size, 30)
    counts = TokenCounts(torch.zeros(2, 9, dtype=torch.int32), torch.zeros(2, 9, dtype=torch.bool))
    lines = torch.tensor([1, -1, 0, -1, -1, -1], dtype=torch.int32)
    yield _both(kernels, spec, "feed_back", newest, slots, torch.tensor([7, 8, 5]), lines, counts)


def _sampling(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield greedy, sampled and truncated rows, with everything that may change logits, and
    bare."""
    ones, ints = torch.ones(_ROWS), torch.zeros(_ROWS, dtype=torch.int32)
    table = SamplingTable(
        temperature=torch.tensor([0.0, 1.0, 0.7, 1.0, 1.3, 0.9]),
        top_k=torch.tensor([0, 0, 20, 0, 5, 0], dtype=torch.int32),
        top_p=torch.tensor([1.0, 1.0, 1.0, 0.9, 0.8, 0.6]),
        min_p=torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.0]),
        presence=ones,
        frequency=ones / 2,
        repetition=ones * 1.1,
        seed=torch.arange(_ROWS),
        count_line=torch.tensor([0, -1, 1, -1, -1, -1], dtype=torch.int32),
        mask_line=torch.tensor([-1, 0, -1, -1, -1, 1], dtype=torch.int32),
        bias_begin=ints,
        bias_end=ints + 2,
    )
    counts = TokenCounts(
        torch.randint(0, 3, (2, _VOCAB), generator=random).int(),
        torch.rand(2, _VOCAB, generator=random) < 0.5,
    )
    bias = LogitBias(torch.tensor([1, 8]).int(), torch.tensor([5.0, -5.0]), torch.full((2,), 99))
    masks = torch.randint(-(2**31), 2**31, (2, -(-_VOCAB // 32)), generator=random).int()
    slots = torch.randperm(_ROWS, generator=random).int()
    # Heads round logits to the model's dtype.
    ways = [(dtype, (None, None, None)) for dtype in {torch.float32, spec.dtype}]
    for dtype, extras in ((torch.float32, (counts, bias, masks)), *ways):
        logits = normal(random, dtype, _ROWS, _VOCAB) * 4
        arguments = (logits, slots, torch.arange(_ROWS), table, *extras)
        actual, expected = _both(kernels, spec, "sample", *arguments)
        yield actual[0], expected[0]  # the final logits are undefined


def _states(kernels: Kernels, spec: AttentionSpec, random: torch.Generator) -> Pairs:
    """Yield recurrent layers, for models with some.

    The rows have several tokens, in chunks or not, or one each; one begins, and the last is padding
    of one token, whose result may be anything finite.
    """

    def told(sides: tuple[Any, Any]) -> tuple[Any, Any]:
        (made, changed), (expected, expected_changes) = sides
        made[-1] *= 0.0  # not if it is not finite
        expected[-1] = 0.0
        return (made, changed), (expected, expected_changes)

    for lengths in _STATE_STEPS if spec.has_recurrent_layers else ():
        ends = torch.tensor((0, *lengths)).cumsum(0).int()
        tokens = int(ends[-1])
        slots, starts = torch.tensor([2, 0, 3, 4]).int(), torch.tensor([0, 7, 2, -1]).int()
        rows = StepRows(slots, ends, starts, torch.zeros(tokens, dtype=torch.int32))
        noise = partial(normal, random, spec.dtype)
        wide = partial(normal, random, torch.float32)
        delta, scan = GatedDeltaShape(2, 4, 32, 32), ScanShape(4, 2, 32, 32)
        weight, lines = noise(4, 96), noise(5, 3, 96)
        for bias in (None, noise(96)):
            by = weight, bias, lines, rows
            yield _both(kernels, spec, "short_conv", noise(tokens, 96), *by, True)
            yield _both(kernels, spec, "gated_conv", noise(tokens, 288), *by)
        state, heads = wide(5, 4, 32, 32), [wide(4) for _ in range(3)]
        gates = noise(tokens, 8), *heads[:2], state, rows, delta
        yield told(_both(kernels, spec, "gated_delta", noise(tokens, delta.channels), *gates))
        channels = delta._replace(key_heads=4, decays_channels=True)
        gates = noise(tokens, 132), heads[0], wide(128), state, rows, channels
        for bound in (0.0, -5.0):
            gates = *gates[:-1], channels._replace(least_log_decay=bound)
            made = _both(kernels, spec, "gated_delta", noise(tokens, channels.channels), *gates)
            yield told(made)
        steps = noise(tokens, 4), *heads, state, rows, scan
        yield told(_both(kernels, spec, "selective_scan", noise(tokens, scan.channels), *steps))
        shared, states = noise(tokens, 40), wide(5, 16, 128)
        shares = shared[:, 8:24], shared[:, 24:], -wide(16, 128).exp(), wide(128), states, rows
        x = noise(tokens, 128)
        yield told(_both(kernels, spec, "channel_scan", x, noise(tokens, 128), *shares))
        x, gate = noise(tokens, 4, 32), noise(tokens, 128)
        for first in (True, False):
            yield _both(kernels, spec, "gated_rms_norm", x, gate, noise(32), 1e-5, first)
        for kind in ("sigmoid", "silu", "softplus"):
            yield _both(kernels, spec, "apply_gate", x.flatten(1), gate, kind)


_CHECKS: dict[str, Callable[[Kernels, AttentionSpec, torch.Generator], Pairs]] = {
    "attention": _attention,
    "norms and activations": _layers,
    "grouped products": _grouped_products,
    "cache writes": _cache_writes,
    "selections": selections,
    "states": _states,
    "input building": _inputs,
    "sampling": _sampling,
}


def _both(kernels: Kernels, spec: AttentionSpec, name: str, *arguments: Any) -> tuple[Any, Any]:
    """Call kernel and reference separately; return their results and modified arguments."""
    sides = []
    for operations, device in ((kernels.operations, spec.device), (reference, CPU)):
        moved = copy_to(arguments, device)
        sides.append((getattr(operations, name)(*moved), moved))
    return sides[0], sides[1]


def _cache(spec: AttentionSpec, num_blocks: int, random: torch.Generator) -> LayerCache:
    shape = (num_blocks, spec.num_kv_heads, spec.block_size, spec.head_dim)
    keys, values = (normal(random, spec.dtype, *shape) for _ in range(2))
    if spec.value_dim is not None:
        return LayerCache(keys, keys[..., : spec.value_dim])
    if spec.cache_dtype is None:
        return LayerCache(keys, values)
    coded = (encode(keys, spec.cache_dtype), encode(values, spec.cache_dtype))
    (keys, key_scales), (values, value_scales) = coded
    return LayerCache(keys, values, key_scales, value_scales)
