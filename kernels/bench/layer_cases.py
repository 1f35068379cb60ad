"""Cases of the other kernels, compared with the reference."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from kernels.attention import LayerCache
from kernels.bench.case import Case
from kernels.bench.packed_cases import QUANTISERS
from kernels.inputs import StepRows
from kernels.moe import ExpertTensors, GatedActivation, RouterWeights, RoutingRule
from kernels.packed import PackedParts
from kernels.reference import fused, inputs, kv_store, layers, moe, sampling_step
from kernels.sampling import SamplingTable
from kernels.skinny import MAX_SKINNY_ROWS, GateKind, RowNorm
from kernels.tiled import TiledWeight, tile_experts
from kernels.triton import inputs as triton_inputs
from kernels.triton import kv_store as triton_kv_store
from kernels.triton import layers as triton_layers
from kernels.triton import matmul as triton_matmul
from kernels.triton import moe as triton_moe
from kernels.triton import routing as triton_routing
from kernels.triton import sampling as triton_sampling
from kernels.triton import skinny as triton_skinny
from kernels.triton.library import LibraryProducts

_BEYOND_L2 = 2**28  # bytes
_MAX_COPIES = 64


def norm_case(
    name: str, device: torch.device, dtype: torch.dtype, *, rows: int, hidden: int
) -> Case:
    """Addition and norm: two tensors read, two written."""
    x, kept = torch.randn(2, rows, hidden, dtype=dtype, device=device)
    weight = torch.randn(hidden, dtype=dtype, device=device)
    # Updated in place: each side has its own residual, which after many additions is mostly x.
    ours, theirs = kept.clone(), kept.clone()
    return Case(
        name,
        run=lambda: triton_layers.add_rms_norm(x, ours, weight, 1e-5),
        peers={"torch": lambda: fused.add_rms_norm(x, theirs, weight, 1e-5)},
        bytes_moved=4 * x.numel() * dtype.itemsize,
    )


def silu_case(
    name: str, device: torch.device, dtype: torch.dtype, *, rows: int, inner: int
) -> Case:
    """SiLU and multiply."""
    gate_up = torch.randn(rows, 2 * inner, dtype=dtype, device=device)
    return Case(
        name,
        run=lambda: triton_layers.silu_mul(gate_up),
        peers={"torch": lambda: layers.silu_mul(gate_up)},
        bytes_moved=1.5 * gate_up.numel() * dtype.itemsize,
    )


def xielu_case(
    name: str, device: torch.device, dtype: torch.dtype, *, rows: int, inner: int
) -> Case:
    """xIELU."""
    x = torch.randn(rows, inner, dtype=dtype, device=device)
    bend = torch.tensor([0.8, 0.7, 0.5, -1e-6], device=device)
    return Case(
        name,
        run=lambda: triton_layers.xielu(x, bend),
        peers={"torch": lambda: layers.xielu(x, bend)},
        bytes_moved=2 * x.numel() * dtype.itemsize,
    )


def matmul_case(
    name: str, device: torch.device, dtype: torch.dtype, *, rows: int, inputs: int, outputs: int
) -> Case:
    """The batch-invariant product and the library's; each tensor moved once."""
    x, weight = _random_product(device, dtype, rows, inputs, outputs)
    return Case(
        name,
        run=lambda: triton_matmul.invariant_linear(x, weight),
        peers={"torch": lambda: functional.linear(x, weight)},
        bytes_moved=(x.numel() + weight.numel() + rows * outputs) * dtype.itemsize,
        flops=2.0 * rows * inputs * outputs,
    )


def invariant_layer_case(
    name: str, device: torch.device, dtype: torch.dtype, *, rows: int, inputs: int, outputs: int
) -> Case:
    """What a layer runs for many rows: the library's product where it has the same bits."""
    x, weight = _random_product(device, dtype, rows, inputs, outputs)
    product = LibraryProducts().product_for(weight, None)
    return Case(
        name,
        run=lambda: product(x, weight, None),
        peers={
            "torch": lambda: functional.linear(x, weight),
            "kernel": lambda: triton_matmul.invariant_linear(x, weight),
        },
        bytes_moved=(x.numel() + weight.numel() + rows * outputs) * dtype.itemsize,
        flops=2.0 * rows * inputs * outputs,
    )


def _random_product(
    device: torch.device, dtype: torch.dtype, rows: int, inputs: int, outputs: int
) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    return x, torch.randn(outputs, inputs, dtype=dtype, device=device) * 0.02


def skinny_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    inputs: int,
    outputs: int,
    gate: GateKind | None = None,
    adds: bool = False,
) -> Case:
    """Products of few rows with what they fuse, in sequence, with more weights than fit in the L2
    cache.

    The peer is the library's product with torch's own norms and sums.
    """
    made = outputs if gate is None else 2 * outputs
    copies = 2
    if device.type == "cuda":
        # Not more than a model has layers: each sum is rounded, and the peer's twice.
        copies = max(1, min(_MAX_COPIES, _BEYOND_L2 // (made * inputs * dtype.itemsize)))
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    shape = (copies, made, inputs)
    weights = (torch.randn(shape, dtype=dtype, device=device) / inputs**0.5).unbind()
    norm = None if adds else RowNorm(torch.rand(inputs, dtype=dtype, device=device), 1e-6)

    def ours() -> torch.Tensor:
        out = torch.zeros(rows, outputs, dtype=dtype, device=device)
        for weight in weights:
            stream = out if adds else None
            out = triton_skinny.skinny_linear(x, weight, norm=norm, gate=gate, stream=stream)
        return out

    def theirs() -> torch.Tensor:
        out = torch.zeros(rows, outputs, dtype=dtype, device=device)
        for weight in weights:
            read = x if norm is None else layers.rms_norm(x, *norm)
            product = functional.linear(read, weight)
            product = product if gate is None else layers.silu_mul(product)
            out = out.add_(product) if adds else product
        return out

    return Case(
        f"{name} x {copies}",
        run=ours,
        peers={"torch": theirs},
        bytes_moved=copies * (x.numel() + made * inputs + rows * outputs) * dtype.itemsize,
    )


def store_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> Case:
    """Query and key norms, rotary embedding and the store into the cache."""
    projected = torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=dtype, device=device)
    weight = torch.randn(heads + kv_heads, head_dim, dtype=dtype, device=device)
    angles = torch.rand(rows, 1, head_dim // 2, device=device) * 1000
    rotation = (angles.cos(), angles.sin())
    blocks = -(-rows // block_size)
    shape = (blocks, kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.zeros(shape, dtype=dtype, device=device) for _ in range(2)))
    slots = torch.randperm(blocks * block_size, device=device)[:rows]

    def ours() -> torch.Tensor:
        return triton_kv_store.norm_rope_store(projected, weight, 1e-6, rotation, cache, slots)

    return Case(
        name,
        run=ours,
        peers={
            "torch": lambda: fused.norm_rope_store(projected, weight, 1e-6, rotation, cache, slots)
        },
        bytes_moved=2 * projected.numel() * dtype.itemsize + 4 * rows * head_dim,
        peers_synchronise=True,
    )


def copy_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    copies: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
) -> Case:
    """Copies of whole blocks."""
    shape = (2 * copies, kv_heads, block_size, head_dim)
    cache = LayerCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
    other = LayerCache(*(stored.clone() for stored in cache.tensors()))
    order = torch.randperm(2 * copies, device=device)
    sources, targets = order[:copies], order[copies:]

    def ours() -> torch.Tensor:
        triton_kv_store.copy_blocks(cache, sources, targets)
        return cache.keys

    def theirs() -> torch.Tensor:
        kv_store.copy_blocks(other, sources, targets)
        return other.keys

    moved = 2 * 2 * copies * cache.keys[0].numel() * dtype.itemsize
    return Case(name, ours, {"torch": theirs}, bytes_moved=moved, tolerance=0.0)


def sampling_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    rows: int,
    vocab: int,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    spread: float,
) -> Case:
    """A step's sampling; the floor is one read of the logits, whose spread is given."""
    # Products of few rows leave them unrounded.
    rounded = dtype if rows > MAX_SKINNY_ROWS else torch.float32
    logits = (torch.randn(rows, vocab, device=device) * spread).to(rounded)
    zeros, ones = torch.zeros(rows, device=device), torch.ones(rows, device=device)
    none = torch.full((rows,), -1, dtype=torch.int32, device=device)
    table = SamplingTable(
        temperature=ones * temperature,
        top_k=torch.full_like(none, top_k),
        top_p=ones * top_p,
        min_p=ones * min_p,
        presence=zeros,
        frequency=zeros,
        repetition=ones,
        seed=torch.arange(rows, device=device),
        count_line=none,
        mask_line=none,
        bias_begin=none + 1,
        bias_end=none + 1,
    )
    slots = torch.arange(rows, dtype=torch.int32, device=device)
    positions = torch.arange(rows, device=device)
    # At temperature 0 or 1 sampling overwrites the logits with themselves, so it can be repeated.
    return Case(
        name,
        run=lambda: triton_sampling.sample(logits, slots, positions, table).token_ids,
        peers={"torch": lambda: sampling_step.sample(logits, slots, positions, table).token_ids},
        bytes_moved=logits.nbytes,
        tolerance=0.0,
        peers_synchronise=True,
    )


def inputs_case(
    name: str, device: torch.device, _: torch.dtype, *, rows: int, context: int, block_size: int
) -> Case:
    """A decode step's inputs."""
    steps = torch.arange(rows + 1, dtype=torch.int32, device=device)
    starts = torch.full((rows,), context, dtype=torch.int32, device=device)
    step = StepRows(steps[:-1], steps, starts, torch.full_like(starts, -1))
    newest = torch.randint(0, 100_000, (rows,), device=device)
    width = -(-(context + 1) // block_size)
    tables = torch.randint(0, 10_000, (rows, width), dtype=torch.int32, device=device)
    return Case(
        name,
        run=lambda: triton_inputs.build_inputs(step, newest, tables, block_size, 1).slot_mapping,
        peers={
            "torch": lambda: inputs.build_inputs(step, newest, tables, block_size, 1).slot_mapping
        },
        bytes_moved=2 * 4 * tables.numel(),
        tolerance=0.0,
        is_latency_bound=True,
        peers_synchronise=True,
    )


def routing_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
) -> Case:
    """From tokens to their experts, and to the experts' tokens."""
    x = torch.randn(tokens, hidden, dtype=dtype, device=device)
    router = torch.randn(experts, hidden, dtype=dtype, device=device) / hidden**0.5
    asked = x, router, None, None, RoutingRule(top_k)

    def both() -> torch.Tensor:
        ids, shares = triton_routing.route(*asked)
        triton_routing.sort_pairs(ids, experts)
        return shares

    return Case(
        name,
        run=both,
        peers={"torch, not sorted": lambda: moe.route(*asked)[1]},
        bytes_moved=router.nbytes + x.nbytes + tokens * top_k * 12,
        flops=2.0 * tokens * experts * hidden,
    )


def moe_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    kind: str | None = None,
) -> Case:
    """A layer's experts, dense or quantised; the floor reads each expert with a token once."""
    x = torch.randn(tokens, hidden, dtype=dtype, device=device)
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    dense = [torch.randn(shape, dtype=dtype, device=device) * 0.02 for shape in shapes]
    tensors, widened = ExpertTensors(*dense), ExpertTensors(*dense)
    if kind is not None:
        gate_up, down = (_quantise_experts(part, kind) for part in dense)
        tensors = ExpertTensors(gate_up, down)
        widened = ExpertTensors(
            _dequantise_experts(gate_up, dtype), _dequantise_experts(down, dtype)
        )
    chosen = torch.rand(tokens, experts, device=device).argsort(dim=1)[:, :top_k].contiguous()
    weights = torch.rand(tokens, top_k, device=device)
    return Case(
        name,
        run=lambda: triton_moe.fused_moe(x, tensors, chosen, weights),
        peers={"torch loop": lambda: moe.fused_moe(x, widened, chosen, weights)},
        bytes_moved=_bytes_read(tensors, chosen) + 2 * x.numel() * dtype.itemsize,
        flops=6.0 * tokens * top_k * hidden * inner,
        peers_synchronise=True,
    )


def few_experts_case(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tokens: int,
    experts: int,
    top_k: int,
    hidden: int,
    inner: int,
) -> Case:
    """A layer's experts in a step of few tokens, from the residual stream back to it."""
    shapes = (experts, 2 * inner, hidden), (experts, hidden, inner)
    tensors = ExpertTensors(
        *(torch.randn(shape, dtype=dtype, device=device) / shape[2] ** 0.5 for shape in shapes)
    )
    # A token's scores are far enough apart that other rounding does not choose other experts.
    weight = torch.zeros(experts, hidden, device=device)
    kept = torch.randn(tokens, hidden, dtype=dtype, device=device)
    for token in range(tokens):
        weight[:, token] = torch.randperm(experts, device=device) / 16
        kept[:, token] = 4.0 * (torch.arange(tokens, device=device) == token)
    norm = RowNorm(torch.ones(hidden, dtype=dtype, device=device), 1e-6)
    said = norm, RouterWeights(weight, None, None), RoutingRule(top_k), tensors
    gatings = (GatedActivation(each.silu_mul, "silu") for each in (triton_layers, layers))
    ours, theirs = ((*said, gating) for gating in gatings)

    def added(add: Callable[..., None], given: tuple[object, ...]) -> torch.Tensor:
        stream = kept.clone()
        add(stream, *given)
        return stream

    chosen = weight[:, :tokens].topk(top_k, dim=0).indices
    return Case(
        name,
        run=lambda: added(triton_moe.add_experts, ours),
        peers={"torch loop": lambda: added(moe.add_experts, theirs)},
        bytes_moved=_bytes_read(tensors, chosen) + weight.nbytes,
        flops=6.0 * tokens * top_k * hidden * inner,
        peers_synchronise=True,
    )


def _bytes_read(experts: ExpertTensors, chosen: torch.Tensor) -> float:
    """Return the bytes of the weights of each expert with a token, read once."""
    whole = experts.gate_up.nbytes + experts.down.nbytes
    return whole * chosen.unique().numel() / experts.num_experts


def _dequantise_experts(held: TiledWeight, dtype: torch.dtype) -> torch.Tensor:
    return torch.stack([held.matrix(e, dtype) for e in range(held.num_matrices)])


def _quantise_experts(dense: torch.Tensor, kind: str) -> TiledWeight:
    """Quantise [experts, outputs, inputs]."""
    return tile_experts(PackedParts((QUANTISERS[kind](dense.flatten(0, 1)),)), dense.shape[0])
