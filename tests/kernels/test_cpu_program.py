"""Recorded programs of native calls, and the small kernels that came with them."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.cpu import linear, operations
from kernels.cpu.native import build
from kernels.cpu.program import NotRecordableError, Recorder, Workspace
from kernels.reference import operations as reference

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")
needs_panels = pytest.mark.skipif(not linear.is_available(), reason="no panels here")


def chain(x: torch.Tensor, weight: torch.Tensor, seen: set[int] | None = None) -> torch.Tensor:
    """Five norms of norms; notes where they lie."""
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
    x, weight = torch.randn(1 << 19, 32), torch.randn(32)  # 64 MiB, as a chunk
    program, results = Recorder(Workspace())(
        lambda: [operations.rms_norm(x, weight, 1e-5) for _ in range(2)]
    )
    program()
    assert torch.equal(*results)


def test_what_the_tensor_library_computes_is_refused_by_name() -> None:
    x = torch.randn(3, 32)
    with pytest.raises(NotRecordableError, match=r"aten\.add"):
        Recorder(Workspace())(lambda: x + 1)
    assert torch.equal(x + 1, 1 + x)  # and nothing of it is left behind


def test_a_table_of_embeddings_is_read_by_a_program() -> None:
    table, ids = torch.randn(50, 24).bfloat16(), torch.zeros(7, dtype=torch.int64)
    program, found = Recorder(Workspace())(lambda: functional.embedding(ids, table))
    ids.copy_(torch.randint(0, 50, (7,)))
    program()
    assert torch.equal(found, table[ids])


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
def test_a_part_of_wider_rows_is_copied_by_a_program() -> None:
    x, wide = torch.zeros(3, 8), torch.full((3, 20), 7.0)

    def copied() -> torch.Tensor:
        wide[:, 4:12].copy_(x)
        return wide[:, 2:10].new_empty((3, 8)).copy_(wide[:, 6:14])

    program, result = Recorder(Workspace())(copied)
    assert len(program) == 2
    assert (wide == 7.0).all()
    x.copy_(torch.randn(x.shape))
    program()
    assert torch.equal(wide[:, 4:12], x)
    assert (wide[:, :4] == 7.0).all()
    assert (wide[:, 12:] == 7.0).all()
    assert torch.equal(result, wide[:, 6:14])
    with pytest.raises(NotRecordableError, match="copy_"):  # another dtype
        Recorder(Workspace())(lambda: wide.new_empty((3, 20), dtype=torch.float16).copy_(wide))


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
