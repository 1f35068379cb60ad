"""The element-wise kernels against their twins, computed in float64 or from the same bits."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import LayerCache
from kernels.reference import fused as reference
from kernels.reference.kv_store import copy_blocks as reference_copy
from kernels.reference.layers import rms_norm as reference_norm
from kernels.reference.layers import silu_mul as reference_silu_mul
from kernels.triton import kv_store, layers

DTYPES = [(torch.float32, 1e-6), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)]


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative, nan if anything is nan."""
    return float((actual.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize("dim", [64, 257, 896])
def test_add_rms_norm(dtype: torch.dtype, tolerance: float, dim: int) -> None:
    x = torch.randn(5, 2 * dim).to(dtype)[:, :dim]  # rows not side by side
    residual, weight = torch.randn(5, dim).to(dtype), torch.randn(dim).to(dtype)
    kept = residual.clone()
    normed = layers.add_rms_norm(x, residual, weight, 1e-5)
    summed = kept + x
    # The interpreter cuts float32 to bf16 instead of rounding.
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


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(4, 2, 64), (7, 1, 80), (9, 3, 96), (2, 2, 6)]
)
@pytest.mark.parametrize(("has_norm", "has_rope"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_rope_store(
    heads: int, kv_heads: int, dim: int, has_norm: bool, has_rope: bool, dtype: torch.dtype
) -> None:
    """Queries, and every slot of the cache: those of the step, and those that must stay."""
    num_tokens, block_size = 6, 4
    fused = torch.randn(num_tokens, heads + 2 * kv_heads, dim).to(dtype)
    weight = torch.randn(heads + kv_heads, dim).to(dtype) if has_norm else None
    angles = torch.rand(num_tokens, 1, dim // 2) * 100
    rotation = (angles.cos(), angles.sin()) if has_rope else None
    slots = torch.randperm(5 * block_size)[:num_tokens]
    slots[2] = -1  # padding
    before = LayerCache(*torch.randn(2, 5, kv_heads, block_size, dim).to(dtype))
    cache = LayerCache(*(stored.clone() for stored in before))
    query = kv_store.norm_rope_store(fused, weight, 1e-6, rotation, cache, slots)
    wide = LayerCache(*(stored.double() for stored in before))
    expected = reference.norm_rope_store(
        fused.double(), None if weight is None else weight.double(), 1e-6, rotation, wide, slots
    )
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    assert error(query, expected) < tolerance
    for stored, written, kept in zip(cache, wide, before, strict=True):
        assert error(stored, written) < tolerance
        is_kept = (written == kept.double()).all(dim=-1)
        assert torch.equal(stored[is_kept], kept[is_kept])


def test_copy_blocks() -> None:
    caches = [LayerCache(*torch.randn(2, 9, 2, 16, 80, generator=torch.Generator().manual_seed(3)))]
    caches.append(LayerCache(*(stored.clone() for stored in caches[0])))
    sources, targets = torch.tensor([0, 4, 4]), torch.tensor([8, 2, 3])
    kv_store.copy_blocks(caches[0], sources, targets)
    reference_copy(caches[1], sources, targets)
    for copied, expected in zip(*caches, strict=True):
        assert torch.equal(copied, expected)
