"""Adapters' products: right for each token, and with the same bits in any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.lora import AdapterRows, AdapterWeights, adapter_rows
from kernels.triton import lora
from kernels.triton.lora import add_adapters, plan_adapters

CPU = torch.device("cpu")


def make_weights(
    random: torch.Generator, shape: tuple[int, int, int, int], dtype: torch.dtype = torch.float32
) -> AdapterWeights:
    """Dense matrices; kernels do not read the spans."""
    num_slots, rank, inputs, outputs = shape
    down = torch.randn(num_slots, rank, inputs, generator=random) / inputs**0.5
    up = torch.randn(num_slots, rank, outputs, generator=random) / rank**0.5
    return AdapterWeights(down.to(dtype), up.to(dtype), torch.zeros(0, dtype=torch.int32))


def rows_of(slots: list[int], num_slots: int) -> AdapterRows:
    return adapter_rows(np.array(slots, np.int64), num_slots, CPU)


@given(data=st.data())
@settings(max_examples=12, deadline=None)
def test_each_token_gets_its_own_adapter_and_no_other(data: st.DataObject) -> None:
    """With inputs in one group, in several and in none that is whole; ranks in one tile and in
    several; few tokens and many."""
    num_slots = data.draw(st.integers(1, 5))
    rank, outputs = data.draw(st.sampled_from([1, 16, 70])), data.draw(st.sampled_from([5, 130]))
    inputs = data.draw(st.sampled_from([5, 512, 1100]))
    used = data.draw(st.lists(st.integers(-1, num_slots - 1), min_size=1, max_size=4))
    num_tokens = data.draw(st.sampled_from([1, 7, 40, 150]))
    slots = [used[place % len(used)] for place in range(num_tokens)]
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    weights = make_weights(random, (num_slots, rank, inputs, outputs))
    x = torch.randn(num_tokens, inputs, generator=random)
    out = torch.randn(num_tokens, outputs, generator=random)
    expected = out.double()
    for token, slot in enumerate(slots):
        if slot >= 0:
            inner = weights.down[slot].double() @ x[token].double()
            expected[token] += inner @ weights.up[slot].double()
    most = data.draw(st.sampled_from([0, 512]))  # 0: one program sums all groups
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lora, "_MAX_CUT_TOKENS", most)
        made = add_adapters(out, x, weights, rows_of(slots, num_slots))
    assert made is out
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=3e-5)


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_tokens_without_an_adapter_are_left_as_they_are() -> None:
    """Whatever the adapters of others make of it."""
    random = torch.Generator().manual_seed(0)
    weights = make_weights(random, (2, 16, 64, 48), torch.bfloat16)
    weights.down[0] = torch.inf
    slots = [0, -1, 1, -1, 0]
    x, out = torch.randn(5, 64).bfloat16(), torch.randn(5, 48).bfloat16()
    x[1] = torch.nan
    before = out.clone()
    add_adapters(out, x, weights, rows_of(slots, 2))
    assert torch.equal(out[[1, 3]], before[[1, 3]])
    assert out[2].isfinite().all()
    assert not out[[0, 4]].isfinite().any()


@pytest.mark.usefixtures("matrix_units")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, with others, in tiles of every height, its inputs cut into groups or not."""
    monkeypatch.setattr(lora, "_MAX_CUT_TOKENS", 60)
    random = torch.Generator().manual_seed(1)
    weights = make_weights(random, (3, 20, 600, 70), dtype)
    x = torch.randn(280, 600, generator=random).to(dtype)
    out = torch.randn(280, 70, generator=random).to(dtype)
    slots = [(0, 2, -1, 0)[token % 4] for token in range(280)]
    whole = add_adapters(out.clone(), x, weights, rows_of(slots, 3))
    for begin, end in ((0, 1), (37, 42), (3, 60), (64, 264)):
        part = add_adapters(
            out[begin:end].clone(), x[begin:end], weights, rows_of(slots[begin:end], 3)
        )
        assert torch.equal(part, whole[begin:end])


def test_a_step_plans_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What only orders the launches is not read: kernels begin before it can be seen."""
    random = torch.Generator().manual_seed(2)
    slots = rows_of([1, 0, -1], 2)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "clone", lambda each: torch.full_like(each, 99))
        rows = plan_adapters(slots, 2)
    for shape in ((2, 8, 32, 24), (2, 24, 24, 70)):
        weights = make_weights(random, shape)
        x, out = torch.randn(3, shape[2]), torch.zeros(3, shape[3])
        add_adapters(out, x, weights, rows)
        for token, slot in ((0, 1), (1, 0)):
            expected = weights.down[slot] @ x[token] @ weights.up[slot]
            torch.testing.assert_close(out[token], expected, rtol=1e-5, atol=1e-5)
        assert not out[2].any()
