"""Latent attention by the kernels, compared with its definition and the reference."""

from __future__ import annotations

import pytest
import torch

from kernels.attention import LayerCache
from kernels.reference.fused import latent_rope_store as reference_store
from kernels.triton.backend import TritonAttention
from kernels.triton.latent import latent_rope_store
from tests.kernels.triton_kernels.interpreted.oracle import attend, make_problem


@pytest.mark.parametrize(
    ("heads", "head_dim", "value_dim", "block_size"),
    [(16, 40, 32, 32), (5, 24, 16, 4), (70, 24, 16, 16)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_mixed_batches_equal_the_definition(
    heads: int, head_dim: int, value_dim: int, block_size: int, dtype: torch.dtype
) -> None:
    """Decode rows in one split and in several, chunks with and without a past."""
    problem = make_problem(
        [1, 1, 6, 3, 1],
        [0, 300, 70, 0, 33],
        num_kv_heads=1,
        group=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        block_size=block_size,
        dtype=dtype,
    )
    backend = TritonAttention()
    assert backend.refuse(problem.spec) is None
    state = backend.plan(problem.geometry, problem.spec)
    actual = backend.forward(state, problem.layer, problem.query, problem.cache)
    expected = attend(problem)
    error = (actual.double() - expected).norm() / expected.norm()
    assert error < (2e-5 if dtype == torch.float32 else 2e-3)


def test_latents_are_stored_as_by_the_twin() -> None:
    random = torch.Generator().manual_seed(0)
    query = torch.randn(7, 5, 24, generator=random)
    fused, weight = torch.randn(7, 40, generator=random), torch.randn(16, generator=random)
    angles = torch.rand(7, 1, 4, generator=random) * 100
    slots = torch.tensor([3, 0, -1, 17, 5, 9, 30])
    sides = []
    for store in (latent_rope_store, reference_store):
        turned, keys = query.clone(), torch.zeros(4, 1, 8, 24)
        latent = fused[:, 16:]  # follows the part that queries are computed from
        rotation = (angles.cos(), angles.sin())
        store(turned, latent, weight, 1e-6, rotation, LayerCache(keys, keys[..., :16]), slots)
        sides.append((turned, keys))
    torch.testing.assert_close(*sides)
