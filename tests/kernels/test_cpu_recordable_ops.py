"""Torch operations in captured programs: the same bits as torch gives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.cpu.native import build
from kernels.cpu.program import NotRecordableError, Recorder, Workspace

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")

dtypes = st.sampled_from([torch.float32, torch.bfloat16])


@torch.inference_mode()
def check(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> None:
    """Capture ``function`` while ``x`` is zero, then compare its result and effect on ``x``."""
    values = x.clone()
    x.zero_()
    program, result = Recorder(Workspace())(lambda: function(x))
    assert not x.any()
    x.copy_(values)
    program()
    left = x.clone()
    x.copy_(values)
    expected = function(x)
    assert result.dtype == expected.dtype
    assert torch.equal(result, expected)
    assert torch.equal(left, x)


@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 4),
    dim=st.integers(1, 300),
    others=st.sampled_from(["values", "rows", "columns", "one", "number"]),
    dtype=dtypes,
    other_dtype=dtypes,
    seed=st.integers(0, 2**16),
)
@settings(max_examples=120, deadline=None)
def test_sums_and_products(
    rows: int,
    heads: int,
    dim: int,
    others: str,
    dtype: torch.dtype,
    other_dtype: torch.dtype,
    seed: int,
) -> None:
    """In place and not, with broadcast and non-contiguous tensors; also products with a number."""
    random = torch.Generator().manual_seed(seed)
    shapes = {"values": (rows, heads, dim), "rows": (rows, 1, 1), "columns": (dim,), "one": (1,)}
    y: torch.Tensor | float = 1.0 / 3 + seed
    if others != "number":
        y = torch.randn(shapes[others], generator=random).to(other_dtype)
    wide = torch.randn(rows, heads, 2 * dim, generator=random).to(dtype)
    check(lambda x: x[..., dim:].mul_(y), wide.clone())
    is_new = torch.result_type(wide, y) == dtype
    if is_new:
        check(lambda x: x[..., dim:] * y, wide.clone())
    if others == "number":
        return
    check(lambda x: x[..., :dim].add_(y), wide.clone())
    if is_new:
        check(lambda x: x[..., :dim] + y, wide.clone())


def test_what_is_not_of_these_forms_is_refused() -> None:
    x, y = torch.zeros(3, 8, dtype=torch.bfloat16), torch.zeros(3, 8)
    ids = torch.zeros(4, dtype=torch.int64)
    for function in (
        lambda: x * y,  # float32 operands
        lambda: x + torch.ones(2, 3, 8, dtype=torch.bfloat16),  # a different shape
        lambda: torch.add(x, x, alpha=2),
        lambda: x + 1.0,  # would be rounded first
        lambda: ids * 2,  # integer operands
        lambda: functional.embedding(ids.int(), y),
        lambda: functional.embedding(ids[::2], y),
    ):
        with pytest.raises(NotRecordableError):
            Recorder(Workspace())(function)


def test_copies() -> None:
    """From part of wider rows, to one value, contiguous, and with trailing zeros."""
    wide = torch.randn(3, 20)
    check(lambda x: x[:, 4:12].copy_(x[:, 12:]), wide.clone())
    check(lambda x: x[:, 2:10].new_empty((3, 8)).copy_(x[:, 6:14]), wide.clone())
    check(lambda x: x.view(3, 5, 4)[:, 1:3].contiguous(), wide.clone())
    check(lambda x: x[:, 3:9].clone(), wide.clone())
    check(lambda x: torch.cat((x[:, 9:], x, x[:, :2]), dim=-1), wide.clone())
    check(lambda x: functional.pad(x[:, 1:], (0, 5)), wide.clone())
    with pytest.raises(NotRecordableError, match="copy_"):  # another dtype
        Recorder(Workspace())(lambda: wide.new_empty((3, 20), dtype=torch.float16).copy_(wide))
    with pytest.raises(NotRecordableError, match="clone"):
        Recorder(Workspace())(lambda: wide.t().contiguous())


def test_rows_of_a_table() -> None:
    """Embedding lookups, also at positions that may be padding."""
    table = torch.randn(50, 24).bfloat16()
    check(lambda ids: functional.embedding(ids, table), torch.randint(0, 50, (7,)))
    check(lambda ids: functional.embedding(ids, table), torch.randint(0, 50, (7, 2)))
    at = torch.tensor([4, -1, 0, 49])
    check(lambda x: functional.embedding(x.clamp(min=0), table), at)
