"""The CPU kernels apart from attention, compared with the reference in float64 or bit for bit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.activations import ActivationKind
from kernels.attention import LayerCache
from kernels.cpu import operations
from kernels.cpu.native import build
from kernels.inputs import StepRows
from kernels.reference import operations as reference
from kernels.sampling import TokenCounts
from tests.kernels.neighbours import others_are_untouched, side_by_side

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 5e-3}
dtypes = st.sampled_from([torch.float32, torch.bfloat16])

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The error relative to a norm of at least 1; nan if anything is nan."""
    return float((actual.double() - expected).norm() / expected.norm().clamp(min=1.0))


@given(rows=st.integers(1, 40), dim=st.integers(1, 1000), dtype=dtypes)
@settings(max_examples=40, deadline=None)
def test_norms(rows: int, dim: int, dtype: torch.dtype) -> None:
    x = torch.randn(rows, 2 * dim).to(dtype)[:, :dim]  # rows are not contiguous
    residual, weight = torch.randn(rows, dim).to(dtype), torch.randn(dim).to(dtype)
    summed = residual + x
    normed = operations.add_rms_norm(x, residual, weight, 1e-5)
    assert torch.equal(residual, summed)
    wide = reference.rms_norm(summed.double(), weight.double(), 1e-5)
    assert error(normed, wide) < TOLERANCE[dtype]
    assert torch.equal(operations.rms_norm(summed, weight, 1e-5), normed)


@given(rows=st.integers(1, 40), dim=st.integers(1, 1000), has_bias=st.booleans(), dtype=dtypes)
@settings(max_examples=40, deadline=None)
def test_layer_norm(rows: int, dim: int, has_bias: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(rows, 2 * dim) + 3).to(dtype)[:, :dim]  # rows are not contiguous
    weight, bias = torch.randn(2, dim).to(dtype)
    own = bias if has_bias else None
    expected = reference.layer_norm(
        x.double(), weight.double(), None if own is None else own.double(), 1e-5
    )
    # The mean is rounded like its row, and the remainder may be far smaller.
    lost = x.double().abs().amax(1) / (x.double().var(1, correction=0) + 1e-5).sqrt()
    tolerance = TOLERANCE[dtype] * max(4.0, float(lost.max()))
    assert error(operations.layer_norm(x, weight, own, 1e-5), expected) < tolerance


@given(
    rows=st.integers(1, 40),
    dim=st.integers(1, 1000),
    kind=st.sampled_from(["silu", "gelu", "gelu_tanh", "relu", "relu2"]),
    dtype=dtypes,
)
@settings(max_examples=60, deadline=None)
def test_activations(rows: int, dim: int, kind: ActivationKind, dtype: torch.dtype) -> None:
    wide = (torch.randn(rows, 2 * dim) * 4).to(dtype)
    wide[0, :2] = torch.tensor((-300.0, 300.0))
    x = wide[:, :dim]  # rows are not contiguous
    expected = reference.activate(x.double(), kind)
    assert error(operations.activate(x, kind), expected) < TOLERANCE[dtype]
    if kind.startswith("relu"):
        assert torch.equal(operations.activate(x, kind), reference.activate(x, kind))


@given(rows=st.integers(1, 40), dim=st.integers(1, 1000), dtype=dtypes)
@settings(max_examples=30, deadline=None)
def test_xielu(rows: int, dim: int, dtype: torch.dtype) -> None:
    wide = (torch.randn(rows, 2 * dim) * 4).to(dtype)
    wide[0, :2] = torch.tensor((-300.0, 300.0))
    x = wide[:, :dim]  # rows are not contiguous
    coefficients = torch.tensor([0.9, 1.3, 0.5, -1e-6])
    expected = reference.xielu(x.double(), coefficients)
    assert error(operations.xielu(x, coefficients), expected) < TOLERANCE[dtype]


def test_xielu_of_small_values_is_as_precise_as_of_large_ones() -> None:
    """Without its slope, what remains near 0 is a small difference of large numbers."""
    x, curve = -torch.logspace(-5, 2, 100).view(1, -1), torch.tensor([1.0, 1.0, 0.0, -1e-6])
    expected = reference.xielu(x.double(), curve)
    torch.testing.assert_close(operations.xielu(x, curve).double(), expected, rtol=2e-6, atol=0)


@given(rows=st.integers(1, 5), dim=st.integers(1, 9000), cap=st.sampled_from([4.0, 30.0]))
@settings(max_examples=40, deadline=None)
def test_softcap(rows: int, dim: int, cap: float) -> None:
    x = torch.randn(rows, dim) * 40
    x[0, 0] = float("inf")
    expected = reference.softcap(x.double(), cap)
    capped = operations.softcap(x, cap)
    assert capped.data_ptr() == x.data_ptr()
    torch.testing.assert_close(capped.double(), expected, rtol=0, atol=cap * 4e-7)
    assert operations.softcap(torch.tensor([[float("nan")]]), cap).isnan().all()


@given(
    positions=st.lists(st.integers(0, 1 << 22), min_size=1, max_size=40),
    first=st.integers(0, 1),
    every=st.sampled_from([1, 8, 8192]),
)
def test_temperatures(positions: list[int], first: int, every: int) -> None:
    at = torch.tensor(positions)
    made = operations.attention_temperatures(at, first, every, 0.5)
    torch.testing.assert_close(made, reference.attention_temperatures(at, first, every, 0.5))


@given(
    num_tokens=st.integers(1, 40),
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([8, 24, 64, 256, 512]),
    num_weights=st.sampled_from(["none", "one", "each"]),
    has_rope=st.booleans(),
    dtype=dtypes,
)
@settings(max_examples=40, deadline=None)
def test_norm_rope(
    num_tokens: int, heads: int, head_dim: int, num_weights: str, has_rope: bool, dtype: torch.dtype
) -> None:
    query = torch.randn(num_tokens, heads, head_dim).to(dtype)
    weight = torch.randn(heads if num_weights == "each" else 1, head_dim).to(dtype)
    angles = torch.rand(num_tokens, 1, head_dim // 2) * 100
    rotation = (angles.cos(), angles.sin()) if has_rope else None
    own = None if num_weights == "none" else weight
    expected = reference.norm_rope(
        query.double(), None if own is None else own.double(), 1e-6, rotation
    )
    turned = operations.norm_rope(query, own, 1e-6, rotation)
    assert turned.is_contiguous()
    assert error(turned, expected) < TOLERANCE[dtype]


def test_a_norm_with_a_weight_for_each_head() -> None:
    x, weight = torch.randn(5, 3, 24), torch.randn(3, 24)
    expected = reference.rms_norm(x.double(), weight.double(), 1e-6)
    assert error(operations.rms_norm(x, weight, 1e-6), expected) < 1e-6


@pytest.mark.parametrize("name", ["silu_mul", "gelu_mul", "erf_gelu_mul"])
@given(rows=st.integers(1, 40), dim=st.integers(1, 1000), dtype=dtypes)
@settings(max_examples=40, deadline=None)
def test_gates(name: str, rows: int, dim: int, dtype: torch.dtype) -> None:
    gate_up = (torch.randn(rows, 2 * dim) * 8).to(dtype)
    # Results that nearly cancel must not be the only measure of errors.
    gate_up[-1, dim - 1] = gate_up[-1, -1] = 4.0
    gate_up[0, 0] = -300.0
    expected = getattr(reference, name)(gate_up.double())
    assert error(getattr(operations, name)(gate_up), expected) < TOLERANCE[dtype]


@given(
    num_tokens=st.integers(1, 70),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 8, 16]),
    has_norm=st.booleans(),
    has_rope=st.booleans(),
    dtype=dtypes,
)
@settings(max_examples=60, deadline=None)
def test_norm_rope_store(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    has_norm: bool,
    has_rope: bool,
    dtype: torch.dtype,
) -> None:
    """Checks queries and every slot of the cache: those of the step, and all others."""
    fused = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    weight = torch.randn(heads + kv_heads, head_dim).to(dtype) if has_norm else None
    angles = torch.rand(num_tokens, 1, head_dim // 2) * 100
    rotation = (angles.cos(), angles.sin()) if has_rope else None
    blocks = -(-num_tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size)[:num_tokens]
    slots[num_tokens // 2] = -1  # padding
    before = LayerCache(*torch.randn(2, blocks, kv_heads, block_size, head_dim).to(dtype))
    cache = side_by_side(before)
    query = operations.norm_rope_store(fused, weight, 1e-6, rotation, cache, slots)
    wide = LayerCache(*(stored.double() for stored in before.tensors()))
    expected = reference.norm_rope_store(
        fused.double(), None if weight is None else weight.double(), 1e-6, rotation, wide, slots
    )
    assert query.is_contiguous()
    assert error(query, expected) < TOLERANCE[dtype]
    for stored, written, kept in zip(
        cache.tensors(), wide.tensors(), before.tensors(), strict=True
    ):
        assert error(stored, written) < TOLERANCE[dtype]
        is_kept = (written == kept.double()).all(dim=-1)
        assert torch.equal(stored[is_kept], kept[is_kept])
    assert others_are_untouched(cache)


def test_rounding_is_torchs() -> None:
    """Round to nearest, ties to even; infinities and nan are preserved."""
    bits = torch.randint(-(2**31), 2**31 - 1, (40_000,)).to(torch.int32)
    bits[:8] = torch.tensor([0x7F800000, -0x800000, 0x7FC00001, 0x7F800001, 0x3F808000, 0, 1, -1])
    bits[8:5000] = bits[8:5000] & ~0xFFFF | 0x8000  # ties
    x = torch.stack((bits.view(torch.float32), torch.zeros(bits.shape)))
    # x + 0 is x in float32; the sum is returned through the residual, rounded to bfloat16.
    wide = x[:1]
    residual = wide.to(torch.bfloat16)
    other = (wide - residual.float()).nan_to_num(0.0, 0.0, 0.0).to(torch.bfloat16)
    expected = residual + other
    operations.add_rms_norm(other, residual, torch.ones(40_000, dtype=torch.bfloat16), 1e-6)
    assert torch.equal(residual.isnan(), expected.isnan())
    assert torch.equal(residual.nan_to_num(0.0), expected.nan_to_num(0.0))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=6),
    block_size=st.sampled_from([1, 4, 16]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_inputs(lengths: list[int], block_size: int, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    counts = torch.tensor([*lengths, 1], dtype=torch.int32)
    starts = torch.randint(0, 50, (len(counts),), generator=random, dtype=torch.int32)
    starts[-1] = -1  # padding
    rows = StepRows(
        slots=torch.randperm(9, generator=random)[: len(counts)].to(torch.int32),
        query_start=torch.cat((torch.zeros(1), counts.cumsum(0))).to(torch.int32),
        starts=starts,
        token_ids=torch.randint(-1, 5, (int(counts.sum()),), generator=random).to(torch.int32),
    )
    newest = torch.randint(0, 1000, (9,), generator=random)
    tables = torch.randint(0, 10**6, (9, 120), generator=random, dtype=torch.int32)
    built = operations.build_inputs(rows, newest, tables, block_size, 60)
    expected = reference.build_inputs(rows, newest, tables, block_size, 60)
    for name, actual, wanted in zip(built._fields, built, expected, strict=True):
        assert actual.dtype == wanted.dtype, name
        assert torch.equal(actual, wanted), name


@pytest.mark.parametrize("is_counted", [False, True])
def test_feed_back(is_counted: bool) -> None:
    slots = torch.tensor([4, 0, 2], dtype=torch.int32)
    token_ids = torch.tensor([7, 3, 7])
    count_line = torch.tensor([1, 0, -1, 0, 1], dtype=torch.int32)
    results = []
    for twin in (operations, reference):
        newest = torch.arange(5)
        counts = TokenCounts(torch.ones(2, 9, dtype=torch.int32), torch.zeros(2, 9).bool())
        twin.feed_back(newest, slots, token_ids, count_line, counts if is_counted else None)
        results.append((newest, counts.output))
    for ours, theirs in zip(*results, strict=True):
        assert torch.equal(ours, theirs)


@given(st.lists(st.lists(st.booleans(), min_size=1, max_size=5), min_size=1, max_size=6))
def test_accept_drafts(groups: list[list[bool]]) -> None:
    """Values after the last token of a group are ignored."""
    is_kept = torch.tensor([kept for group in groups for kept in group])
    sizes = torch.tensor([len(group) for group in groups], dtype=torch.int32)
    token_ids = torch.arange(100, 100 + is_kept.numel())
    slots = torch.arange(len(groups), dtype=torch.int32).flip(0).repeat_interleave(sizes)
    wanted = [([*group[:-1], False]).index(False) for group in groups]
    for twin in (operations, reference):
        newest = torch.zeros(len(groups) + 1, dtype=torch.int64)
        accepted = twin.accept_drafts(newest, slots, token_ids, is_kept, sizes)
        assert accepted.tolist() == wanted
        begins = sizes.cumsum(0) - sizes
        assert newest.tolist() == [*(token_ids[begins + accepted].flip(0).tolist()), 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copy_blocks(dtype: torch.dtype) -> None:
    before = LayerCache(*torch.randn(2, 9, 2, 16, 80).to(dtype))
    ours, theirs = (LayerCache(*(stored.clone() for stored in before.tensors())) for _ in "ab")
    sources, targets = torch.tensor([0, 4, 4]), torch.tensor([8, 2, 3])
    operations.copy_blocks(ours, sources, targets)
    reference.copy_blocks(theirs, sources, targets)
    assert torch.equal(ours.keys, theirs.keys)
    assert torch.equal(ours.values, theirs.values)
    among_others = side_by_side(before)
    operations.copy_blocks(among_others, sources, targets)
    assert torch.equal(among_others.keys, theirs.keys)
    assert others_are_untouched(among_others)
