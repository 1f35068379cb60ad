"""Quantised keys and values: their precision, and that each kernel set writes the same codes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.attention import LayerCache
from kernels.cpu import kv_store as native
from kernels.cpu.backend import CpuAttention
from kernels.cpu.native import build
from kernels.reference import fused as reference
from kernels.reference.attention import ReferenceAttention
from kernels.reference.cache_quantisation import MAX_CODES, decode, decode_cache, encode
from kernels.reference.kv_store import copy_blocks
from tests.kernels.triton_kernels.interpreted.oracle import attend, make_problem

codes_dtypes = st.sampled_from(list(MAX_CODES))
needs_native = pytest.mark.skipif(build.load() is None, reason="no native kernels here")


def rounding(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest error of a value in these rows, apart from float32 rounding."""
    largest = rows.abs().amax(dim=-1, keepdim=True)
    if dtype == torch.int8:
        return largest / 254
    return torch.maximum(rows.abs() / 16, largest / 448 * 2**-10)


def empty_cache(blocks: int, heads: int, size: int, dim: int, dtype: torch.dtype) -> LayerCache:
    """A cache with arbitrary codes and scales."""
    keys, values = torch.randint(0, 100, (2, blocks, heads, size, dim), dtype=torch.int8)
    scales = torch.rand(2, blocks, heads, size) + 0.5
    return LayerCache(keys.view(dtype), values.view(dtype), *scales)


@given(
    rows=st.integers(1, 20),
    dim=st.integers(1, 200),
    exponent=st.integers(-25, 30),
    dtype=codes_dtypes,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_a_row_comes_back_within_the_rounding_of_its_codes(
    rows: int, dim: int, exponent: int, dtype: torch.dtype, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    spread = torch.randint(-12, 1, (rows, dim), generator=random)
    wide = torch.randn(rows, dim, generator=random).double() * 2.0**spread * 10.0**exponent
    wide[0] = 0.0
    codes, scales = encode(wide, dtype)
    assert codes.dtype == dtype
    assert scales.dtype == torch.float32
    back = decode(codes, scales).double()
    assert torch.all((back - wide).abs() <= rounding(wide, dtype) + 1e-6 * wide.abs() + 1e-30)
    # The largest value of a row is exact.
    places = wide.abs().argmax(dim=-1, keepdim=True)
    torch.testing.assert_close(
        back.gather(1, places), wide.gather(1, places), rtol=1e-6, atol=1e-30
    )


@pytest.mark.parametrize("dtype", MAX_CODES)
@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_a_broken_row_reads_as_no_number_and_harms_no_other(
    dtype: torch.dtype, broken: float
) -> None:
    rows = torch.randn(3, 64)
    rows[1, 7] = broken
    back = decode(*encode(rows, dtype))
    assert back[1].isnan().all()
    assert back[[0, 2]].isfinite().all()


@needs_native
@given(
    num_tokens=st.integers(1, 40),
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 3),
    head_dim=st.sampled_from([8, 24, 64, 80, 96, 128, 256]),
    block_size=st.sampled_from([1, 8, 16]),
    has_norm=st.booleans(),
    has_rope=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    codes=codes_dtypes,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=60, deadline=None)
def test_the_native_store(
    num_tokens: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    has_norm: bool,
    has_rope: bool,
    dtype: torch.dtype,
    codes: torch.dtype,
    seed: int,
) -> None:
    """Each stored row is within its codes' rounding of the exact one; other slots do not change."""
    torch.manual_seed(seed)
    fused = torch.randn(num_tokens, heads + 2 * kv_heads, head_dim).to(dtype)
    weight = torch.randn(heads + kv_heads, head_dim).to(dtype) if has_norm else None
    angles = torch.rand(num_tokens, 1, head_dim // 2) * 100
    rotation = (angles.cos(), angles.sin()) if has_rope else None
    blocks = -(-num_tokens // block_size) + 2
    slots = torch.randperm(blocks * block_size)[:num_tokens]
    slots[num_tokens // 2] = -1  # padding
    before = empty_cache(blocks, kv_heads, block_size, head_dim, codes)
    cache = LayerCache(*(stored.clone() for stored in before.tensors()))
    query = native.norm_rope_store(fused, weight, 1e-6, rotation, cache, slots)

    shape = (blocks, kv_heads, block_size, head_dim)
    exact = LayerCache(*torch.full((2, *shape), torch.nan, dtype=torch.float64))
    wide_weight = None if weight is None else weight.double()
    expected = reference.norm_rope_store(fused.double(), wide_weight, 1e-6, rotation, exact, slots)
    tolerance = 1e-6 if dtype == torch.float32 else 5e-3
    assert float((query.double() - expected).norm() / expected.norm().clamp(min=1)) < tolerance
    for kind in (0, 1):
        stored, wide = decode_cache(cache)[kind].double(), exact[kind]
        is_written = wide[..., 0].isfinite()
        rows = wide[is_written]
        allowed = rounding(rows, codes) + 2e-5 * rows.abs().amax(-1, keepdim=True)
        assert torch.all((stored[is_written] - rows).abs() <= allowed)
        assert torch.equal(
            decode_cache(cache)[kind][~is_written], decode_cache(before)[kind][~is_written]
        )


@needs_native
@pytest.mark.parametrize("codes", MAX_CODES)
def test_the_native_store_rounds_as_the_reference(codes: torch.dtype) -> None:
    """The same codes and scales to the last bit, including ties, tiny and broken rows."""
    fused = torch.randn(4096, 3, 64)
    fused[0, 1:] = torch.arange(64) - 31.5  # halves, with 32.5 as the largest
    fused[1, 1:] = torch.linspace(0, 448, 64)
    fused[2, 1:] = 1e-33
    fused[3, 1:, 5] = float("nan")
    fused[4, 1:] *= 2.0 ** -torch.arange(64)
    slots = torch.arange(4096)
    caches = [empty_cache(256, 1, 16, 64, codes) for _ in range(2)]
    for cache, store in zip(caches, (native, reference), strict=True):
        store.norm_rope_store(fused, None, 1e-6, None, cache, slots)
    ours, theirs = caches
    for kind in (2, 3):
        torch.testing.assert_close(ours[kind], theirs[kind], rtol=0, atol=0, equal_nan=True)
    is_whole = slots != 3
    for kind in (0, 1):
        codes_of = [cache[kind].view(torch.uint8).view(4096, 64)[is_whole] for cache in caches]
        assert torch.equal(*codes_of)


@pytest.mark.parametrize("codes", MAX_CODES)
@pytest.mark.parametrize("store", [copy_blocks, native.copy_blocks])
def test_a_copied_block_keeps_its_scales(codes: torch.dtype, store) -> None:
    if store is not copy_blocks and build.load() is None:
        pytest.skip("no native kernels here")
    before = empty_cache(9, 2, 16, 80, codes)
    cache = LayerCache(*(stored.clone() for stored in before.tensors()))
    store(cache, torch.tensor([0, 4, 4]), torch.tensor([8, 2, 3]))
    for copied, old in zip(decode_cache(cache), decode_cache(before), strict=True):
        assert torch.equal(copied[[8, 2, 3]], old[[0, 4, 4]])
        assert torch.equal(copied[[0, 1, 4, 5, 6, 7]], old[[0, 1, 4, 5, 6, 7]])


@given(
    rows=st.lists(st.tuples(st.just(1) | st.integers(1, 20), st.integers(0, 60)), min_size=1),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 4),
    block_size=st.sampled_from([1, 4, 16]),
    window=st.none() | st.integers(1, 40),
    softcap=st.none() | st.just(3.0),
    has_sinks=st.booleans(),
    has_slopes=st.booleans(),
    codes=codes_dtypes,
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_the_reference_reads_codes_as_the_definition_says(
    rows: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    block_size: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
    has_slopes: bool,
    codes: torch.dtype,
    seed: int,
) -> None:
    problem = make_problem(
        [queries for queries, _ in rows],
        [past for _, past in rows],
        num_kv_heads=kv_heads,
        group=group,
        head_dim=24,
        block_size=block_size,
        window=window,
        softcap=softcap,
        sinks=torch.linspace(-2, 6, kv_heads * group) if has_sinks else None,
        slopes=torch.linspace(0, 0.5, kv_heads * group) if has_slopes else None,
        cache_dtype=codes,
        seed=seed,
    )
    backend = ReferenceAttention()
    state = backend.plan(problem.geometry, problem.spec)
    output = backend.forward(state, problem.layer, problem.query, problem.cache)
    torch.testing.assert_close(output.double(), attend(problem), atol=1e-5, rtol=1e-4)


@needs_native
@pytest.mark.parametrize("head_dim", [64, 40])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_code_of_fp8_is_widened_to_its_very_value(dtype: torch.dtype, head_dim: int) -> None:
    """Including subnormals: a token that only sees itself gets its own value back."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # the nans
    num_rows = -(-256 // (2 * head_dim))
    shape = num_rows, 2, head_dim
    values = codes.repeat(2)[: num_rows * 2 * head_dim].view(torch.float8_e4m3fn).view(shape)
    kinds = {"dtype": dtype, "cache_dtype": torch.float8_e4m3fn}
    problem = make_problem([1] * num_rows, [0] * num_rows, head_dim=head_dim, **kinds)
    cache, geometry = problem.cache, problem.geometry
    assert cache.value_scales is not None
    for row, slot in enumerate(geometry.slots):
        block = int(geometry.tables[slot, 0])
        cache.values[block, :, 0] = values[row]
        cache.value_scales[block, :, 0] = 1.0
    backend = CpuAttention()
    state = backend.plan(problem.geometry, problem.spec)
    output = backend.forward(state, problem.layer, problem.query, cache)
    expected = values.to(dtype).repeat_interleave(2, dim=1)  # two query heads share a KV head
    torch.testing.assert_close(output.view(expected.shape), expected, atol=0, rtol=0)
