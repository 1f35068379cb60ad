"""Check on the actual device that product kernels are correct, and bit for bit if they promise it.

These kernels depend on weights, not on a step: a loader checks them before it uses them (see
``selfcheck.py`` for the others).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from kernels.moe import ExpertTensors
from kernels.packed import PackedParts
from kernels.reference import operations as reference
from kernels.reference.quantised import (
    linear_packed,
    quantise_fp8,
    quantise_int4,
    quantise_int8,
    quantise_mxfp4,
    quantise_nf4,
)
from kernels.reference.skinny import skinny_linear as reference_skinny
from kernels.scaled import MAX_UNROUNDED_ROWS, quantise_rows, scaled_linear
from kernels.skinny import RowNorm
from kernels.tiled import tile, tile_experts
from kernels.triton.check_helpers import (
    CPU,
    TOLERANCES,
    Pairs,
    copy_to,
    failure_reason,
    new_generator,
    normal,
)
from kernels.triton.launch import INTERPRETED
from kernels.triton.matmul import invariant_linear
from kernels.triton.moe import fused_moe, invariant_moe
from kernels.triton.quantised import packed_linear
from kernels.triton.scaled import SCALED_KERNELS
from kernels.triton.skinny import skinny_linear
from kernels.triton.skinny_packed import skinny_packed_linear
from kernels.triton.widening import MAX_PACKED_ROWS

_SCALED = {torch.float8_e4m3fn: ("float8", quantise_fp8), torch.int8: ("int8", quantise_int8)}


def check_packed(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why products with quantised weights are incorrect on ``device``, or None."""
    random = new_generator()
    pairs = partial(_packed_products, dtype, device, random)
    return failure_reason("products of codes", pairs, TOLERANCES[dtype])


def check_packed_bits(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why quantised products may not be batch-invariant on ``device``, or None."""
    if dtype.itemsize > 2:
        return f"no matrix units multiply {dtype}"
    random = new_generator()
    pairs = partial(_packed_by_size, dtype, device, random)
    return failure_reason("batch-invariant products of codes", pairs, 0.0)


def check_skinny(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why products of few rows are incorrect on ``device``, or None."""
    random = new_generator()
    pairs = partial(_skinny_products, dtype, device, random)
    return failure_reason("products of few rows", pairs, TOLERANCES[dtype])


def check_swapped(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why few rows' products may differ in bits from many's on ``device``, or None."""
    random = new_generator()
    return failure_reason(
        "products of few rows", partial(_swapped_products, dtype, device, random), 0.0
    )


def check_experts(dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why a token's experts may not be batch-invariant on ``device``, or None."""
    if dtype.itemsize > 2:
        return f"no matrix units multiply {dtype}"
    random = new_generator()
    return failure_reason(
        "mixture of experts", partial(_experts_by_size, dtype, device, random), 0.0
    )


def check_scaled(codes: torch.dtype, dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why products of codes, int8 or float8, are incorrect on ``device``, or None."""
    random = new_generator()
    pairs = partial(_scaled_products, codes, dtype, device, random)
    return failure_reason(f"products in {_SCALED[codes][0]}", pairs, TOLERANCES[dtype])


def _packed_products(dtype: torch.dtype, device: torch.device, random: torch.Generator) -> Pairs:
    """Yield products with each kind of codes, for few rows and more, and with two experts' weights.

    Each of the kernel's tiles occurs once: every pair is a kernel to compile, which delays the
    start.
    """
    x = normal(random, dtype, MAX_PACKED_ROWS + 1, 256)
    kinds = (quantise_int4, quantise_int8, quantise_fp8, quantise_nf4, quantise_mxfp4)
    for round_to in kinds:
        weight = round_to(normal(random, torch.float32, 256, 256) / 16)
        there = tile(weight.to(device))
        yield skinny_packed_linear(x[:1].to(device), there), linear_packed(x[:1].float(), weight)
        # A height of each number of warps, and widened in memory.
        for some in (x[:8], x[:40], x) if round_to is kinds[0] else (x[:8],):
            yield packed_linear(some.to(device), there), linear_packed(some.float(), weight)
    # As in GPTQ and AWQ: whole zeros in groups of whole blocks, whose sums are scaled.
    weight = quantise_int4(normal(random, torch.float32, 256, 256) / 16, 128)
    zeros = torch.randint(-8, 9, weight.scales.shape, generator=random, dtype=torch.int8)
    weight = replace(weight, zeros=zeros)
    for some in (x[:8], x[:20]):
        made = packed_linear(some.to(device), tile(weight.to(device)))
        yield made, linear_packed(some.float(), weight)
    gate_up = quantise_mxfp4(normal(random, torch.float32, 256, 256) / 16)
    down = quantise_mxfp4(normal(random, torch.float32, 512, 64) / 8)
    # Few rows of each expert, and so many that these are widened in memory.
    for num_tokens, top_k in ((5, 1), (MAX_PACKED_ROWS + 1, 2)):
        ids = torch.arange(top_k * num_tokens).view(-1, top_k) % 2
        sides = []
        for side, mixture in ((device, fused_moe), (CPU, reference.fused_moe)):
            stacks = (tile_experts(PackedParts((part.to(side),)), 2) for part in (gate_up, down))
            experts = ExpertTensors(next(stacks), next(stacks))
            moved = copy_to((x[:num_tokens], ids, torch.ones(num_tokens, top_k)), side)
            sides.append(mixture(moved[0], experts, *moved[1:]))
        yield sides[0], sides[1]


def _packed_by_size(dtype: torch.dtype, device: torch.device, random: torch.Generator) -> Pairs:
    """Yield a matrix and experts, as bits, for each height of a tile."""
    x = normal(random, dtype, 200, 256).to(device)
    gate_up, down = (
        quantise_int4(normal(random, torch.float32, *shape) / 16).to(device)
        for shape in ((256, 256), (512, 64))
    )
    held = [tile_experts(PackedParts((part,)), 2) for part in (gate_up, down)]
    experts = ExpertTensors(held[0], held[1])
    ids = torch.randint(2, (200, 1), generator=random).to(device)
    shares = torch.rand(200, 1, generator=random).to(device)

    def products(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        made = packed_linear(x[:rows], tile(gate_up), invariant=True)
        mixed = invariant_moe(x[:rows], experts, ids[:rows], shares[:rows])
        return made.view(torch.int16), mixed.view(torch.int16)

    whole = products(200)
    for rows in (1, 40):
        yield products(rows), tuple(part[:rows].cpu() for part in whole)


def _skinny_products(dtype: torch.dtype, device: torch.device, random: torch.Generator) -> Pairs:
    """Yield a layer's four products with what they fuse, and the head's, in sequence.

    Only their turns (``wait_for_prior_kernels``) order them. The kernels are those of most models,
    since each one delays the start; the interpreter gets none, where it would take a minute.
    """
    hidden, inner = (24, 40) if INTERPRETED else (1040, 2304)
    x, norm = normal(random, dtype, 3, hidden), RowNorm(normal(random, dtype, hidden), 1e-6)
    enter, gate_up = (normal(random, dtype, n, hidden) / 32 for n in (inner, 2 * inner))
    leave, head = normal(random, dtype, hidden, inner) / 48, normal(random, dtype, inner, hidden)
    sides = []
    for side, product in ((device, skinny_linear), (CPU, reference_skinny)):
        rows, n, *weights = copy_to((x, norm, enter, gate_up, leave, head), side)
        w_in, w_gate, w_down, w_head = weights
        stream = rows[:1].clone()
        product(product(stream, w_in, norm=n), w_down, stream=stream)
        product(product(stream, w_gate, norm=n, gate="silu"), w_down, stream=stream)
        several = product(rows, w_gate, norm=n, gate="silu")
        sides.append((stream, product(stream, w_head, dtype=torch.float32), several))
    yield sides[0], sides[1]


def _swapped_products(dtype: torch.dtype, device: torch.device, random: torch.Generator) -> Pairs:
    """Yield products, as bits, for each shape of a tile. Magnitudes vary, so that another order
    of summation shows."""
    count, inputs, outputs = (200, 48, 20) if INTERPRETED else (2000, 1040, 2304)
    sizes = torch.logspace(-3, 1, inputs)[torch.randperm(inputs, generator=random)]
    x = (normal(random, torch.float32, count, inputs) * sizes).to(dtype).to(device)
    weight = normal(random, dtype, outputs, inputs).to(device)
    whole = invariant_linear(x, weight).view(torch.int16)
    for rows in (1, 20, 64, 200):
        yield invariant_linear(x[:rows], weight).view(torch.int16), whole[:rows].cpu()


def _experts_by_size(dtype: torch.dtype, device: torch.device, random: torch.Generator) -> Pairs:
    """Yield experts, as bits, for each height of a tile."""
    hidden, inner, count = (48, 24, 300) if INTERPRETED else (528, 264, 300)
    x = normal(random, dtype, count, hidden).to(device)
    gate_up, down = (
        normal(random, dtype, 4, 2 * inner, hidden),
        normal(random, dtype, 4, hidden, inner),
    )
    experts = ExpertTensors((gate_up / 20).to(device), (down / 16).to(device))
    ids = torch.stack([torch.randperm(4, generator=random)[:2] for _ in range(count)]).to(device)
    shares = torch.rand(count, 2, generator=random).to(device)
    whole = invariant_moe(x, experts, ids, shares)
    for rows in (5, 50, 100):
        some = invariant_moe(x[:rows], experts, ids[:rows], shares[:rows])
        yield some.view(torch.int16), whole[:rows].cpu().view(torch.int16)


def _scaled_products(
    codes: torch.dtype, dtype: torch.dtype, device: torch.device, random: torch.Generator
) -> Pairs:
    """Yield a product of the fewest rows, and of more; the reference's weight is widened."""
    x, bias = normal(random, dtype, 80, 64), normal(random, dtype, 48)
    weight = _SCALED[codes][1](normal(random, torch.float32, 48, 64))
    there, held, scales, added = copy_to((x, weight.codes, weight.scales, bias), device)
    for rows in (MAX_UNROUNDED_ROWS + 1, 80):
        rounded, steps = quantise_rows(x[:rows], codes)
        made = scaled_linear(there[:rows], held, scales, added, SCALED_KERNELS)
        yield made, linear_packed(rounded.float() * steps, weight, bias.float())
