"""The element-wise kernels, compared with the reference in float64 or bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import LayerCache
from kernels.reference import fused as reference
from kernels.reference.cache_quantisation import decode_cache
from kernels.reference.kv_store import copy_blocks as reference_copy
from kernels.reference.layers import rms_norm as reference_norm
from kernels.reference.layers import rope_tables
from kernels.reference.layers import silu_mul as reference_silu_mul
from kernels.reference.layers import xielu as reference_xielu
from kernels.triton import kv_store, layers

DTYPES = [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The relative error; nan if anything is nan."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("dim", [64, 257, 896])
def test_add_rms_norm(dtype: torch.dtype, tolerance: float, dim: int) -> None:
    x = torch.randn(5, 2 * dim).to(dtype)[:, :dim]  # rows are not contiguous
    residual, weight = torch.randn(5, dim).to(dtype), torch.randn(dim).to(dtype)
    kept = residual.clone()
    normed = layers.add_rms_norm(x, residual, weight, 1e-5)
    summed = kept + x
    # The interpreter truncates float32 to bf16 instead of rounding.
    assert error(residual, summed.double()) < (0.01 if dtype == torch.bfloat16 else 1e-9)
    assert error(normed, reference_norm(residual.double(), weight.double(), 1e-5)) < tolerance
    alone = layers.rms_norm(x, weight, 1e-5)
    assert error(alone, reference_norm(x.double(), weight.double(), 1e-5)) < tolerance
    assert reference.add_rms_norm(x, kept, weight, 1e-5).shape == normed.shape
    assert torch.equal(kept, summed)


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("dim", [1, 100, 2100])
def test_activations(dtype: torch.dtype, tolerance: float, dim: int) -> None:
    gate_up = (torch.randn(3, 2 * dim) * 4).to(dtype)
    wide = gate_up.double()
    assert error(layers.silu_mul(gate_up), reference_silu_mul(wide.clone())) < tolerance
    assert error(layers.gelu_mul(gate_up), reference.gelu_mul(wide.clone())) < tolerance


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("dim", [1, 100, 2100])
def test_xielu(dtype: torch.dtype, tolerance: float, dim: int) -> None:
    x = (torch.randn(3, 2 * dim) * 4).to(dtype)[:, :dim]  # rows are not contiguous
    coefficients = torch.tensor([0.9, 1.3, 0.5, -1e-6])
    expected = reference_xielu(x.double(), coefficients)
    assert error(layers.xielu(x, coefficients), expected) < tolerance


def test_xielu_of_small_values_is_as_precise_as_of_large_ones() -> None:
    """Without its slope, what remains near 0 is a small difference of large numbers."""
    x, curve = -torch.logspace(-5, 2, 100).view(1, -1), torch.tensor([1.0, 1.0, 0.0, -1e-6])
    expected = reference_xielu(x.double(), curve)
    torch.testing.assert_close(layers.xielu(x, curve).double(), expected, rtol=2e-6, atol=0)


@pytest.mark.parametrize("half", [1, 40, 64])
def test_rope_tables(half: int) -> None:
    frequencies = torch.logspace(0, -5, half)
    positions = torch.tensor([-1, 0, 1, 4095, 131_071, 999_983])
    for given, scale in ((positions, 1.0), (positions[1:], 0.7), (positions[:0], 1.0)):
        actual = layers.rope_tables(given, frequencies, scale)
        for table, expected in zip(actual, rope_tables(given, frequencies, scale), strict=True):
            torch.testing.assert_close(table, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 80), (9, 3, 96), (2, 2, 6)]
)
@pytest.mark.parametrize(("has_norm", "has_rope"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rope_store(
    heads: int, kv_heads: int, dim: int, has_norm: bool, has_rope: bool, dtype: torch.dtype
) -> None:
    """Checks queries and every slot of the cache: those of the step, and all others."""
    num_tokens, block_size = 6, 4
    fused = torch.randn(num_tokens, heads + 2 * kv_heads, dim).to(dtype)
    weight = torch.randn(heads + kv_heads, dim).to(dtype) if has_norm else None
    angles = torch.rand(num_tokens, 1, dim // 2) * 100
    rotation = (angles.cos(), angles.sin()) if has_rope else None
    slots = torch.randperm(5 * block_size)[:num_tokens]
    slots[2] = -1  # padding
    before = LayerCache(*torch.randn(2, 5, kv_heads, block_size, dim).to(dtype))
    cache = LayerCache(*(stored.clone() for stored in before.tensors()))
    query = kv_store.norm_rope_store(fused, weight, 1e-6, rotation, cache, slots)
    wide = LayerCache(*(stored.double() for stored in before.tensors()))
    expected = reference.norm_rope_store(
        fused.double(), None if weight is None else weight.double(), 1e-6, rotation, wide, slots
    )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert error(query, expected) < tolerance
    for stored, written, kept in zip(
        cache.tensors(), wide.tensors(), before.tensors(), strict=True
    ):
        assert error(stored, written) < tolerance
        is_kept = (written == kept.double()).all(dim=-1)
        assert torch.equal(stored[is_kept], kept[is_kept])


@pytest.mark.parametrize("codes", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(("has_norm", "has_rope"), [(True, True), (False, False)])
def test_norm_rope_store_of_codes(codes: torch.dtype, has_norm: bool, has_rope: bool) -> None:
    """Dequantised, they equal the reference up to a few codes; other slots do not change."""
    heads, kv_heads, dim, block_size = 7, 3, 80, 4
    fused = torch.randn(6, heads + 2 * kv_heads, dim)
    fused[1, heads + kv_heads] = 0.0
    fused[3, heads, 5] = float("nan")
    fused[4] *= 2.0 ** -torch.arange(dim)
    weight = torch.randn(heads + kv_heads, dim) if has_norm else None
    angles = torch.rand(6, 1, dim // 2) * 100
    rotation = (angles.cos(), angles.sin()) if has_rope else None
    slots = torch.tensor([3, 17, -1, 8, 0, 10])
    stored = torch.randint(0, 100, (2, 5, kv_heads, block_size, dim), dtype=torch.int8)
    before = LayerCache(*stored.view(codes), *torch.rand(2, 5, kv_heads, block_size))
    caches = [LayerCache(*(part.clone() for part in before.tensors())) for _ in range(2)]
    queries = [
        twin.norm_rope_store(fused, weight, 1e-6, rotation, cache, slots)
        for twin, cache in zip((kv_store, reference), caches, strict=True)
    ]
    torch.testing.assert_close(*queries, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(*map(decode_cache, caches), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        differences = (ours - theirs).abs().nan_to_num(0.0)
        largest = theirs.abs().nan_to_num(0.0).amax(dim=-1, keepdim=True)
        one_code = largest / 126 if codes == torch.int8 else theirs.abs().nan_to_num(0.0) / 7
        assert torch.all(differences <= one_code + 1e-4)
        assert (differences > 1e-4).float().mean() < 1e-3


def test_copy_blocks() -> None:
    caches = [LayerCache(*torch.randn(2, 9, 2, 16, 80, generator=torch.Generator().manual_seed(3)))]
    codes = [torch.randint(-100, 100, (9, 2, 16, 80), dtype=torch.int8) for _ in "kv"]
    caches.append(LayerCache(*codes, *torch.rand(2, 9, 2, 16)))
    copies = [LayerCache(*(stored.clone() for stored in cache.tensors())) for cache in caches]
    sources, targets = torch.tensor([0, 4, 4]), torch.tensor([8, 2, 3])
    for cache, copy in zip(caches, copies, strict=True):
        kv_store.copy_blocks(cache, sources, targets)
        reference_copy(copy, sources, targets)
        for copied, expected in zip(cache.tensors(), copy.tensors(), strict=True):
            assert torch.equal(copied, expected)
