from __future__ import annotations

import pytest
import torch

from kernels.triton.backend import TritonAttention
from tests.kernels.triton.interpreted.oracle import Problem, attend, make_problem


def run(problem: Problem) -> torch.Tensor:
    backend = TritonAttention()
    assert backend.refuse(problem.spec) is None
    state = backend.plan(problem.geometry, problem.spec)
    return backend.forward(state, problem.layer, problem.query, problem.cache)


def check(problem: Problem, tolerance: float = 2e-5) -> None:
    expected = attend(problem)
    error = (run(problem).double() - expected).norm() / expected.norm()
    assert error < tolerance


SHAPES = [
    # kv heads, group, head_dim, block_size
    (2, 1, 64, 16),
    (1, 4, 80, 32),
    (2, 7, 96, 64),
    (1, 16, 128, 128),
    (1, 2, 256, 16),
    (2, 3, 32, 64),
]


@pytest.mark.parametrize(("kv_heads", "group", "head_dim", "block_size"), SHAPES)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 20.0)])
def test_mixed_batches_equal_the_definition(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """Decode rows, chunks with and without a past, and odd lengths, in one batch."""
    check(
        make_problem(
            [1, 13, 1, 70, 2, 1],
            [0, 90, 66, 0, 63, 127],
            num_kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            block_size=block_size,
            window=window,
            softcap=softcap,
            seed=group,
        )
    )
