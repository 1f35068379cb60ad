"""The CPU kernels' adapter products, compared with their definition token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu.native import build
from kernels.lora import AdapterWeights, adapter_rows, nonzero_spans
from kernels.reference import operations as reference

_SETS = [reference]
if build.load() is not None:
    from kernels.cpu import operations as cpu

    _SETS.append(cpu)


def make_weights(random, num_slots, ranks, inputs, parts, dtype):
    """Adapters of a fused layer: a part's ranks affect only that part; some slots use fewer."""
    rank, outputs = ranks * len(parts), sum(parts)
    down = torch.randn(num_slots, rank, inputs, generator=random) / inputs**0.5
    up = torch.zeros(num_slots, rank, outputs)
    for slot in range(num_slots):
        begin = 0
        for index, size in enumerate(parts):
            own = slice(index * ranks, index * ranks + 1 + slot % ranks)
            up[slot, own, begin : begin + size] = torch.randn(
                1 + slot % ranks, size, generator=random
            )
            begin += size
    down[(up == 0).all(dim=2)] = 0
    up = up.to(dtype)
    return AdapterWeights(down.to(dtype), up, torch.stack([nonzero_spans(own) for own in up]))


@pytest.mark.parametrize("operations", _SETS, ids=lambda module: module.__name__.split(".")[1])
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_each_token_gets_its_own_adapter_and_no_other(operations, data):
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16]))
    num_slots, ranks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 9))
    inputs = data.draw(st.sampled_from([5, 16, 48, 77]))
    parts = data.draw(st.lists(st.sampled_from([3, 16, 64, 90]), min_size=1, max_size=3))
    num_tokens = data.draw(st.integers(1, 80))
    used = data.draw(st.lists(st.integers(-1, num_slots - 1), min_size=1, max_size=4))
    slots = np.array([used[i % len(used)] for i in range(num_tokens)], np.int64)
    random = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    weights = make_weights(random, num_slots, ranks, inputs, parts, dtype)
    x = torch.randn(num_tokens, inputs, generator=random).to(dtype)
    out = torch.randn(num_tokens, sum(parts), generator=random).to(dtype)
    expected = out.double()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            inner = weights.down[slot].double() @ x[token].double()
            expected[token] += inner @ weights.up[slot].double()
    rows = adapter_rows(slots, num_slots, torch.device("cpu"))
    made = operations.add_adapters(out, x, weights, rows)
    assert made is out
    tolerance = 1e-5 if dtype == torch.float32 else 3e-2
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance * 3)


def test_the_span_of_a_rank_is_where_its_row_is_not_zero():
    up = torch.zeros(3, 10)
    up[0, 4:7] = 1
    up[2] = 1
    assert nonzero_spans(up).tolist() == [[4, 7], [0, 0], [0, 10]]


@pytest.mark.parametrize("operations", _SETS, ids=lambda module: module.__name__.split(".")[1])
def test_what_overflows_in_one_adapter_stays_there(operations):
    slots = np.array([0, -1, 1, 0, -1, 1], np.int64)
    weights = make_weights(torch.Generator().manual_seed(1), 2, 4, 16, [32], torch.float32)
    weights.down[0] = torch.inf
    rows = adapter_rows(slots, 2, torch.device("cpu"))
    made = operations.add_adapters(torch.zeros(6, 32), torch.randn(6, 16), weights, rows)
    assert made.isfinite().all(dim=1).tolist() == (slots != 0).tolist()
