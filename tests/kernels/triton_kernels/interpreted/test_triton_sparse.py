"""Triton's kernels for attention to a selection, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from kernels.reference import sparse as reference
from kernels.sparse import SparseAttention
from kernels.triton import backend as backend_module
from kernels.triton import operations, sparse
from kernels.triton.backend import TritonAttention
from tests.kernels import sparse_cases


def test_slots_are_selected_as_by_the_definition() -> None:
    """More positions than one tile of the selection; padding; equal scores."""
    problem = sparse_cases.make_problem(
        [1, 1, 1, 1], [2099, 0, 40, 300], top_k=70, rounded=True, block_size=16
    )
    lens = problem.geometry.device.seq_lens.clone()
    slots = torch.full((4, 70), -1, dtype=torch.int32)
    longest = int(lens.max())
    lens[1] = 0  # as in a captured batch
    tokens = problem.geometry.device._replace(seq_lens=lens)
    sparse.select_slots(problem.index, problem.cache.index_keys, tokens, longest, slots)
    for token in (0, 2, 3):
        found = [slot for slot in slots[token].tolist() if slot >= 0]
        assert found == sparse_cases.selected(problem, token)
    assert (slots[1] == -1).all()


def test_groups_of_tokens_select_as_one(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = sparse_cases.make_problem([1] * 5, [20, 3, 50, 9, 70], top_k=8)
    made = []
    own = problem.geometry.device
    # As if there were more tokens: those are no part of the last group.
    behind = torch.full((3,), 60, dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    lengths, lines = (
        torch.cat(each) for each in zip((own.seq_lens, own.slots), behind, strict=True)
    )
    own = own._replace(seq_lens=lengths[:5], slots=lines[:5])
    for limit in (sparse._SCORES_BYTES, 2 * 71 * 4, 3 * 71 * 4):
        monkeypatch.setattr(sparse, "_SCORES_BYTES", limit)
        slots = torch.full((8, 8), -7, dtype=torch.int32)
        sparse.select_slots(problem.index, problem.cache.index_keys, own, 71, slots[:5])
        assert (slots[5:] == -7).all()
        made.append(slots[:5])
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.parametrize(
    ("queries", "past", "many"),
    [([1, 1, 1], [300, 0, 20], 9), ([3, 1, 6, 2], [90, 4, 0, 11], 9), ([1, 2], [14, 20], 3)],
    ids=["decode", "mixed", "many"],
)
@pytest.mark.parametrize("invariant", [False, True])
def test_attention_equals_the_definition(
    monkeypatch: pytest.MonkeyPatch, queries: list, past: list, many: int, invariant: bool
) -> None:
    monkeypatch.setattr(backend_module, "MANY_SELECTIONS", many)
    problem = sparse_cases.make_problem(queries, past, top_k=12, dtype=torch.float16, block_size=8)
    backend = SparseAttention(TritonAttention(invariant=invariant), operations)
    assert backend.refuse(problem.spec) is None
    state = backend.plan(problem.geometry, problem.spec)
    assert backend.selects(state)
    backend.select(state, problem.index, problem.cache.index_keys)
    actual = backend.forward(state, sparse_cases.layer(), problem.query, problem.cache)
    expected = sparse_cases.attend(problem)
    assert (actual.double() - expected).norm() / expected.norm() < 2e-3


@pytest.mark.parametrize("has_query", [True, False])
def test_index_keys_are_stored_as_by_the_twin(has_query: bool) -> None:
    random = torch.Generator().manual_seed(0)
    query, key = torch.randn(7, 5, 24, generator=random), torch.randn(7, 24, generator=random)
    norm = torch.randn(24, generator=random), torch.randn(24, generator=random)
    angles = torch.rand(7, 1, 4, generator=random) * 100
    slots = torch.tensor([3, 0, -1, 17, 5, 9, 30])
    sides = []
    for store in (sparse.index_rope_store, reference.index_rope_store):
        turned, keys = query.clone(), torch.zeros(4, 1, 8, 24)
        rotation = (angles.cos(), angles.sin())
        store(turned if has_query else None, key, norm, 1e-6, rotation, keys, slots)
        sides.append((turned, keys))
    torch.testing.assert_close(*sides, atol=2e-6, rtol=1e-5)


def test_weights_of_heads_equal_the_product() -> None:
    x, weight = torch.randn(3, 1500).half(), torch.randn(6, 1500)
    expected = reference.index_weights(x, weight)
    torch.testing.assert_close(sparse.index_weights(x, weight), expected, atol=1e-4, rtol=1e-5)
