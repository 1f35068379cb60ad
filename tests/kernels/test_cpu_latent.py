"""Latent attention's stores and head products, compared with the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import LayerCache
from kernels.cpu import linear, operations
from kernels.cpu.latent import PanelHeads
from kernels.cpu.native import build
from kernels.reference import operations as reference

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")
needs_panels = pytest.mark.skipif(not linear.is_available(), reason="no panels here")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("rows", "heads", "rank", "rope_dim"), [(1, 2, 16, 8), (70, 3, 50, 6), (5, 16, 512, 64)]
)
def test_latent_rope_store(
    rows: int, heads: int, rank: int, rope_dim: int, dtype: torch.dtype
) -> None:
    width = rank + rope_dim
    query = torch.randn(rows, heads, width).to(dtype)
    latent = torch.randn(rows, width + 24).to(dtype)[:, 24:]  # as the projection leaves it
    weight = torch.randn(rank).to(dtype)
    angles = torch.rand(rows, 1, rope_dim // 2) * 9
    rotation = (angles.cos(), angles.sin())
    slots = torch.randperm(96)[:rows]
    slots[rows // 2] = -1 if rows > 1 else 5
    sides = []
    for kernels in (operations, reference):
        kept = torch.full((24, 1, 4, width), 7.0).to(dtype)
        cache, turned = LayerCache(kept, kept[..., :rank]), query.clone()
        kernels.latent_rope_store(turned, latent, weight, 1e-5, rotation, cache, slots)
        sides.append((turned, kept))
    bound = {"atol": 1e-5, "rtol": 1e-5} if dtype is torch.float32 else {"atol": 0.04, "rtol": 0.02}
    for actual, expected in zip(*sides, strict=True):
        torch.testing.assert_close(actual, expected, **bound)
    assert torch.equal(sides[0][1] == 7.0, sides[1][1] == 7.0)  # nothing else is written


@needs_panels
@pytest.mark.parametrize("rows", [0, 1, 3, 40])
@pytest.mark.parametrize(("inputs", "outputs", "keep"), [(32, 48, 8), (10, 16, 0), (128, 512, 64)])
def test_products_of_heads(rows: int, inputs: int, outputs: int, keep: int) -> None:
    weight = (torch.randn(5, outputs, inputs) / inputs**0.5).bfloat16()
    # A slice of a projection's output, as DeepSeek's queries are.
    x = torch.randn(rows, 7 + 5 * (inputs + keep)).bfloat16()[:, 7:].unflatten(1, (5, -1))
    made = PanelHeads(weight)(x, keep)
    expected = torch.einsum("nhi,hoi->nho", x[..., :inputs].double(), weight.double())
    assert made.shape == (rows, 5, outputs + keep)
    assert (made[..., :outputs] - expected).norm() <= 4e-3 * expected.norm()
    assert torch.equal(made[..., outputs:], x[..., inputs:])


def test_norms_of_rows_that_lie_apart() -> None:
    x, weight = torch.randn(9, 50)[:, 10:42], torch.randn(32)
    actual, expected = (k.rms_norm(x, weight, 1e-5) for k in (operations, reference))
    torch.testing.assert_close(actual, expected)
    assert actual.is_contiguous()
