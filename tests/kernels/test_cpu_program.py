"""Captured programs of native calls, and the small kernels added for them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.cpu import linear, operations
from kernels.cpu.native import build
from kernels.cpu.program import NotRecordableError, Recorder, Workspace
from kernels.reference import operations as reference

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")
needs_panels = pytest.mark.skipif(not linear.is_available(), reason="no panels here")


def chain(x: torch.Tensor, weight: torch.Tensor, seen: set[int] | None = None) -> torch.Tensor:
    """Five chained norms; adds the addresses of their results to ``seen``."""
    for _ in range(5):
        x = operations.rms_norm(x, weight, 1e-5)
        if seen is not None:
            seen.add(x.data_ptr())
    return x


def test_a_program_computes_anew_from_what_its_operands_hold() -> None:
    x, weight = torch.zeros(7, 32), torch.randn(32)
    program, result = Recorder(Workspace())(lambda: chain(x, weight))
    assert len(program) == 5
    for _ in range(3):
        x.copy_(torch.randn(x.shape))
        program()
        assert torch.equal(result, chain(x, weight))


def test_recording_computes_nothing() -> None:
    x, residual, weight = torch.randn(3, 32), torch.randn(3, 32), torch.randn(32)
    before = residual.clone()
    program, _ = Recorder(Workspace())(lambda: operations.add_rms_norm(x, residual, weight, 1e-5))
    assert torch.equal(residual, before)
    program()
    assert torch.equal(residual, before + x)


def test_memory_that_nobody_has_is_used_again_and_what_is_had_is_not() -> None:
    x, weight = torch.randn(4, 32), torch.randn(32)
    record = Recorder(Workspace())
    seen: set[int] = set()
    first, kept = record(lambda: chain(x, weight, seen))
    assert len(seen) == 2
    second, others = record(lambda: [chain(x, weight) for _ in range(20)])
    assert len({kept.data_ptr(), *(other.data_ptr() for other in others)}) == 21
    first()
    expected = kept.clone()
    second()
    assert torch.equal(kept, expected)
    assert all(torch.equal(other, expected) for other in others)


def test_a_workspace_grows() -> None:
    x, weight = torch.randn(1 << 19, 32), torch.randn(32)  # 64 MiB, as for a chunk
    program, results = Recorder(Workspace())(
        lambda: [operations.rms_norm(x, weight, 1e-5) for _ in range(2)]
    )
    program()
    assert torch.equal(*results)


def test_what_the_tensor_library_computes_is_refused_by_name() -> None:
    x = torch.randn(3, 32)
    with pytest.raises(NotRecordableError, match=r"aten\.exp"):
        Recorder(Workspace())(lambda: x.exp())
    assert torch.equal(x.exp(), torch.exp(x))  # and nothing remains of it


@given(
    positions=st.lists(st.integers(-1, 1 << 20), min_size=1, max_size=40),
    half=st.integers(1, 70),
    base=st.sampled_from([1e4, 1e6]),
    scale=st.sampled_from([1.0, 0.75]),
)
@settings(max_examples=40, deadline=None)
def test_rotations_are_exact_to_the_last_place(
    positions: list[int], half: int, base: float, scale: float
) -> None:
    at = torch.tensor(positions)
    frequencies = base ** -(torch.arange(half) / half)
    angles = torch.outer(at.float(), frequencies).unsqueeze(1).double()  # rounded as they are used
    for made, exact in zip(
        operations.rope_tables(at, frequencies, scale),
        (angles.cos() * scale, angles.sin() * scale),
        strict=True,
    ):
        assert made.shape == (len(positions), 1, half)
        torch.testing.assert_close(made.double(), exact, rtol=1.3e-7, atol=1e-9)
    twin = reference.rope_tables(at, frequencies, scale)[0]
    assert made.dtype == twin.dtype


@needs_panels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("columns", [31, 64, 100])
def test_rows_of_a_held_weight(dtype: torch.dtype, columns: int) -> None:
    weight = torch.randn(97, columns).bfloat16().to(dtype)
    ids = torch.tensor([0, 96, 31, 32, 5, 5])
    assert torch.equal(linear.PanelDense(weight, None).rows(ids), weight[ids])
    rounded = linear.PanelInt8(weight, None)
    product = rounded.logits(torch.eye(columns).bfloat16())  # of unit vectors: the rows themselves
    found = rounded.rows(ids)
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), product.T[ids], rtol=1e-2, atol=1e-2)
