"""Attention that stores its own keys and values, against doing one after the other."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kernels.attention import LayerCache, NewTokens
from kernels.mixed_heads import MixedHeadsAttention
from kernels.reference import fused as reference
from kernels.reference.attention import ReferenceAttention
from kernels.triton import decode
from kernels.triton.backend import TritonAttention
from kernels.triton.kv_store import norm_rope_store
from tests.kernels.triton_kernels.interpreted.oracle import (
    Problem,
    attend,
    make_problem,
    project,
)

# A row's last slots begin a unit, fill it, or are the only ones; some rows are cut.
PAST = [0, 63, 64, 200, 321]


def poison_new_slots(problem: Problem, tokens: NewTokens) -> None:
    """What a step stores is not there before."""
    size = problem.spec.block_size
    for slot in tokens.slot_mapping.tolist():
        for stored in problem.cache.tensors() if slot >= 0 else ():
            stored[slot // size, :, slot % size] = float("nan")


def one_after_the_other(problem: Problem, tokens: NewTokens) -> tuple[torch.Tensor, LayerCache]:
    cache = LayerCache(*(stored.clone() for stored in problem.cache.tensors()))
    *projected, slots = tokens
    query = reference.norm_rope_store(*projected, cache, slots)
    return attend(replace(problem, query=query, cache=cache)), cache


def check(problem: Problem, tokens: NewTokens, tolerance: float = 2e-5) -> None:
    poison_new_slots(problem, tokens)
    expected, stored = one_after_the_other(problem, tokens)
    backend = TritonAttention()
    state = backend.plan(problem.geometry, problem.spec)
    output = backend.store_and_attend(state, problem.layer, tokens, problem.cache)
    assert output is not None
    assert (output.double() - expected).norm() < tolerance * expected.norm()
    for actual, wanted in zip(problem.cache.tensors(), stored.tensors(), strict=True):
        torch.testing.assert_close(actual, wanted, equal_nan=True)


@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [(2, 1, 64, 16), (1, 4, 80, 32), (2, 7, 96, 64), (1, 16, 128, 128), (2, 3, 32, 64)],
)
@pytest.mark.parametrize(
    ("has_norm", "has_rope"), [(True, True), (True, False), (False, True), (False, False)]
)
@pytest.mark.parametrize("window", [None, 37])
def test_new_tokens_are_stored_and_attended_to(
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
    has_norm: bool,
    has_rope: bool,
    window: int | None,
) -> None:
    problem = make_problem(
        [1] * len(PAST),
        PAST,
        num_kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        seed=group,
    )
    check(problem, project(problem, has_norm=has_norm, has_rope=has_rope))


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_caps_and_sinks_of_new_tokens(softcap: float | None, has_sinks: bool) -> None:
    sinks = torch.linspace(-3.0, 5.0, 4) if has_sinks else None
    problem = make_problem([1] * len(PAST), PAST, softcap=softcap, sinks=sinks)
    check(problem, project(problem))


@pytest.mark.parametrize("programs", [1, 3, 7, 20])
def test_rows_cut_anywhere(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new token is attended to once, whichever programs share its row."""
    monkeypatch.setattr(decode, "persistent_programs", lambda *_: programs)
    problem = make_problem([1] * len(PAST), PAST)
    check(problem, project(problem))


def test_half_precision_is_rounded_as_by_the_kernel_that_only_stores() -> None:
    """Steps of few rows and of many leave the same keys and values, but for the last place."""
    problem = make_problem([1] * len(PAST), PAST, head_dim=128, dtype=torch.float16)
    tokens, twin = project(problem), LayerCache(*(each.clone() for each in problem.cache.tensors()))
    *projected, slots = tokens
    query = norm_rope_store(*projected, twin, slots)
    backend = TritonAttention()
    state = backend.plan(problem.geometry, problem.spec)
    expected = backend.forward(state, problem.layer, query, twin)
    output = backend.store_and_attend(state, problem.layer, tokens, problem.cache)
    assert output is not None
    torch.testing.assert_close(output, expected, rtol=2e-3, atol=2e-3)
    for actual, wanted in zip(problem.cache.tensors(), twin.tensors(), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-3, atol=1e-6, equal_nan=True)


def test_padding_rows_store_nothing_and_are_zero() -> None:
    problem = make_problem([1, 1, 1], [70, -1, 5])
    tokens = project(problem)
    assert tokens.slot_mapping.tolist()[1] == -1
    check(problem, tokens)


def test_kinds_of_heads_are_stored_each_by_its_plan() -> None:
    problem = make_problem([1] * len(PAST), PAST)
    tokens = project(problem)
    poison_new_slots(problem, tokens)
    expected, _ = one_after_the_other(problem, tokens)
    backend = MixedHeadsAttention(TritonAttention())
    state = backend.plan(problem.geometry, problem.spec)
    output = backend.store_and_attend(state, problem.layer, tokens, problem.cache)
    assert output is not None
    assert (output.double() - expected).norm() < 2e-5 * expected.norm()


def test_steps_that_take_two_kernels_are_left_alone() -> None:
    """Those with prompts, with many rows, or over codes."""
    chunk, crowd = make_problem([1, 5], [70, 3]), make_problem([1] * 17, [3] * 17)
    coded = make_problem([1] * 2, [70, 3], cache_dtype=torch.int8)
    for problem in (chunk, crowd, coded):
        backend = TritonAttention()
        state = backend.plan(problem.geometry, problem.spec)
        tokens = NewTokens(
            torch.full((17, 8, 64), float("nan")), None, 1e-6, None, torch.zeros(17).long()
        )
        before = problem.cache.keys.clone()
        assert backend.store_and_attend(state, problem.layer, tokens, problem.cache) is None
        assert torch.equal(problem.cache.keys.nan_to_num(), before.nan_to_num())
    problem = make_problem([1, 1], [70, 3])
    invariant = TritonAttention(invariant=True)
    state = invariant.plan(problem.geometry, problem.spec)
    assert invariant.store_and_attend(state, problem.layer, tokens, problem.cache) is None
    plain = MixedHeadsAttention(ReferenceAttention())
    state = plain.plan(problem.geometry, problem.spec)
    assert plain.store_and_attend(state, problem.layer, tokens, problem.cache) is None
