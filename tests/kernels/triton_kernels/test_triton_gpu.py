"""The kernels on a real GPU, in bf16 and fp16: run by ``make gpu-check``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from kernels.attention import AttentionSpec, BatchGeometry, DeviceGeometry, LayerCache
from kernels.bench.suite import MakeCase, tiny_suite
from kernels.inputs import StepRows
from kernels.moe import ExpertTensors
from kernels.operations import Kernels
from kernels.packed import PackedParts
from kernels.recurrent import GatedDeltaShape, ScanShape
from kernels.reference import drafts as reference
from kernels.reference import operations as reference_operations
from kernels.reference.matmul import invariant_heads as reference_heads
from kernels.reference.quantised import quantise_mxfp4
from kernels.skinny import RowNorm
from kernels.tiled import tile_experts
from kernels.triton import launch as launcher
from kernels.triton import operations, widening
from kernels.triton.backend import TritonAttention
from kernels.triton.check_products import (
    check_experts,
    check_packed,
    check_packed_bits,
    check_scaled,
    check_skinny,
    check_swapped,
)
from kernels.triton.library import LibraryProducts
from kernels.triton.matmul import invariant_heads, invariant_linear
from kernels.triton.selfcheck import self_check
from kernels.triton.skinny import skinny_linear
from tests.kernels.recurrent_cases import step_rows
from tests.kernels.triton_kernels.interpreted.oracle import (
    Problem,
    attend,
    make_problem,
)

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")
BF16 = torch.bfloat16


def run(problem: Problem, *, invariant: bool = False) -> torch.Tensor:
    """The backend's result on the GPU, into output memory that held nan."""
    spec = replace(problem.spec, device=DEVICE)
    backend = TritonAttention(invariant=invariant)
    assert backend.refuse(spec) is None
    cache = LayerCache(*(stored.to(DEVICE) for stored in problem.cache.tensors()))
    query = problem.query.to(DEVICE)
    torch.full_like(query, float("nan"))  # freed, and likely reused for the output
    on_host = problem.geometry.device
    on_device = DeviceGeometry(*(None if part is None else part.to(DEVICE) for part in on_host))
    state = backend.plan(replace(problem.geometry, device=on_device), spec)
    return backend.forward(state, problem.layer, query, cache).cpu()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (37, None), (None, 20.0)])
@pytest.mark.parametrize(
    ("kv_heads", "group", "head_dim", "block_size"),
    [
        *((2, 1, 64, 16), (1, 4, 80, 32), (2, 7, 96, 64), (1, 16, 128, 128), (1, 2, 256, 16)),
        *((1, 8, 512, 64), (2, 3, 320, 16)),
    ],
)
def test_attention_equals_the_definition(
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
    kv_heads: int,
    group: int,
    head_dim: int,
    block_size: int,
) -> None:
    problem = make_problem(
        [1, 13, 1, 270, 2, 1],
        [0, 90, 1300, 0, 63, 511],
        num_kv_heads=kv_heads,
        group=group,
        head_dim=head_dim,
        block_size=block_size,
        window=window,
        softcap=softcap,
        dtype=dtype,
    )
    expected = attend(problem)
    actual = run(problem)
    assert (actual.double() - expected).norm() / expected.norm() < 1e-2
    # An error that varies is a race.
    assert torch.equal(run(problem), actual)


@pytest.mark.parametrize("window", [None, 37])
@pytest.mark.parametrize("head_dim", [128, 256, 512])
def test_queries_that_look_ahead_equal_the_definition(head_dim: int, window: int | None) -> None:
    problem = make_problem(
        [1, 13, 270, 150],
        [1300, 90, 0, 511],
        group=2,
        head_dim=head_dim,
        window=window,
        dtype=torch.bfloat16,
        is_bidirectional=True,
    )
    expected = attend(problem)
    assert (run(problem).double() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("nearness", [1.0, 0.05])
def test_prompts_meet_states_as_by_the_twin(nearness: float) -> None:
    """With the heads of real models; with identical keys, and with nearly identical ones."""
    random = torch.Generator().manual_seed(3)
    rows = step_rows([(2, 0, 300), (0, 9, 1), (3, 5, 20), (1, 64, 64)])
    delta, scan = GatedDeltaShape(2, 4, 128, 128, True), ScanShape(4, 1, 64, 128)
    tokens = int(rows.query_start[-1])
    mixed = torch.randn(tokens, delta.channels, generator=random)
    mixed = (mixed[:1] + nearness * mixed).bfloat16()
    gates = torch.randn(tokens, 8, generator=random).bfloat16()
    factors = torch.randn(3, 4, generator=random).unbind()
    sums, narrow = torch.randn(4, 4, 128, 128), mixed[:, : scan.channels].contiguous()
    scanned = sums[..., :64].contiguous()
    by_channel = delta._replace(decays_channels=True)
    decays = torch.randn(tokens, 4 * 129, generator=random).bfloat16() * 4  # some decay by e^-10
    bias = torch.randn(4 * 128, generator=random)
    channels = torch.randn(2, tokens, 256, generator=random).bfloat16()
    shared, rates = narrow[:, :32], -torch.randn(16, 256, generator=random).exp()
    skip, few = bias[:256].clone(), torch.randn(4, 16, 256)
    for name, given in (
        ("gated_delta", (mixed, gates, *factors[:2], sums, rows, delta)),
        ("gated_delta", (mixed, decays, factors[0], bias, sums.clone(), rows, by_channel)),
        (
            "channel_scan",
            (*channels.unbind(), shared[:, :16], shared[:, 16:], rates, skip, few, rows),
        ),
        ("selective_scan", (narrow, gates[:, :4], *factors, scanned, rows, scan)),
    ):
        at = -2 if name == "channel_scan" else -3
        state, moved = given[at], [_moved(each) for each in given]
        found = getattr(operations, name)(*moved)
        expected = getattr(reference_operations, name)(*given)
        assert (found.cpu().float() - expected.float()).norm() < 1e-2 * expected.float().norm()
        assert (moved[at].cpu() - state).norm() < 1e-3 * state.norm()


def _moved(value: Any) -> Any:
    """A copy of a tensor, or of rows, on the GPU."""
    if isinstance(value, StepRows):
        return StepRows(*(part.to(DEVICE) for part in value[:4]), value.longest)
    return value.clone().to(DEVICE) if isinstance(value, torch.Tensor) else value


# The benchmarks check the shapes of real models (``python -m kernels.bench --check``).
@pytest.mark.parametrize("make", tiny_suite(), ids=lambda make: make.args[0])
def test_benchmark_cases_are_right(make: MakeCase) -> None:
    case = make(DEVICE, torch.bfloat16)
    assert case.error() <= case.tolerance


def test_decode_is_captured_once_for_all_lengths() -> None:
    """One CUDA graph with plan and attention, replayed after the batch on the device has changed.

    No row's length fits its own bound, only their sum does.
    """
    problem = make_problem([1, 1, 1], [1200, 40, 700], group=4, dtype=torch.float16)
    spec = replace(problem.spec, device=DEVICE)
    cache = LayerCache(*(stored.to(DEVICE) for stored in problem.cache.tensors()))
    bounds = BatchGeometry.of(np.arange(4), np.full(3, 1024), problem.geometry.tables, DEVICE)
    query = problem.query.to(DEVICE)
    output = torch.full(query.shape, float("nan"), dtype=query.dtype, device=DEVICE)
    backend = TritonAttention()

    def step() -> None:
        state = backend.plan(bounds, spec)
        output.copy_(backend.forward(state, problem.layer, query, cache))

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for lens in ([1201, 41, 701], [600, 1, 513]):
        actual = replace(problem.geometry, seq_lens=np.array(lens, dtype=np.int32))
        assert backend.can_replay(bounds, actual, spec)
        bounds.device.seq_lens.copy_(torch.tensor(lens))
        output.fill_(float("nan"))
        graph.replay()
        expected = attend(replace(problem, geometry=actual))
        assert (output.cpu().double() - expected).norm() / expected.norm() < 1e-2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 128, 256, 512])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (60, None), (None, 20.0)])
def test_invariant_queries_have_the_same_bits_in_any_chunk(
    dtype: torch.dtype, head_dim: int, window: int | None, softcap: float | None
) -> None:
    """Not visible to the interpreter: the compiler must round alike in every part."""
    problem = make_problem(
        [300], [500], group=4, head_dim=head_dim, window=window, softcap=softcap, dtype=dtype
    )
    whole = run(problem, invariant=True)
    begin, tables = 0, problem.geometry.tables
    for end in (1, 2, 77, 78, 230, 299, 300):
        part = BatchGeometry.of(np.array([0, end - begin]), np.array([500 + end]), tables, DEVICE)
        chunk = replace(problem, geometry=part, query=problem.query[begin:end])
        assert torch.equal(run(chunk, invariant=True), whole[begin:end])
        begin = end


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_rows_product_has_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    x = torch.randn(2500, 4096, dtype=dtype, device=DEVICE)
    weight = torch.randn(2000, 4096, dtype=dtype, device=DEVICE)
    whole = invariant_linear(x, weight)  # in wide tiles
    assert check_swapped(dtype, DEVICE) is None
    for begin, end in ((0, 1), (3, 33), (5, 69), (64, 129), (333, 700), (100, 2400)):
        for varies in (False, True):
            part = invariant_linear(x[begin:end], weight, vary_tiles=varies)
            assert torch.equal(part, whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_layers_product_has_the_same_bits_where_the_library_multiplies(
    has_bias: bool, dtype: torch.dtype
) -> None:
    """For numbers of rows that the library multiplies whole, in parts, or not at all."""
    settings = torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k
    weight = torch.randn(2048, 1536, dtype=dtype, device=DEVICE)
    bias = torch.randn(2048, dtype=dtype, device=DEVICE) if has_bias else None
    x = torch.randn(9000, 1536, dtype=dtype, device=DEVICE)
    product = LibraryProducts().product_for(weight, bias)
    whole = product(x, weight, bias)
    for begin, end in ((0, 1), (0, 256), (7, 519), (100, 1124), (300, 8492), (8192, 9000)):
        assert torch.equal(product(x[begin:end].clone(), weight, bias), whole[begin:end])
    assert settings == torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_tokens_experts_and_heads_have_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    assert check_experts(dtype, DEVICE) is None
    assert check_packed_bits(dtype, DEVICE) is None
    x = torch.randn(300, 16, 576, dtype=dtype, device=DEVICE)
    weight = torch.randn(16, 128, 512, dtype=dtype, device=DEVICE)
    whole = invariant_heads(x, weight, 64)
    close = reference_heads(x, weight, 64)
    assert (whole - close).norm() < 1e-2 * close.norm()
    for begin, end in ((0, 1), (3, 40), (5, 140)):
        assert torch.equal(invariant_heads(x[begin:end], weight, 64), whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_experts_in_codes_are_widened_slice_by_slice(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """As a captured graph, for tokens that chose evenly and for those that all chose alike."""
    experts, hidden, inner, tokens = 5, 320, 288, 400
    monkeypatch.setattr(widening, "MAX_WIDENED_BYTES", 2 * (2 * inner * hidden * 2))
    shapes = (2 * inner, hidden), (hidden, inner)
    parts = [quantise_mxfp4(torch.randn(experts * rows, n) / n**0.5) for rows, n in shapes]
    stacks = [tile_experts(PackedParts((part.to(DEVICE),)), experts) for part in parts]
    biases = [torch.randn(experts, rows, dtype=dtype, device=DEVICE) for rows, _ in shapes]
    dense = (
        part.dequantise(torch.float32).view(experts, *shape).to(DEVICE)
        for part, shape in zip(parts, shapes, strict=True)
    )
    coded = ExpertTensors(stacks[0], stacks[1], *biases)
    exact = ExpertTensors(*dense, *(each.float() for each in biases))
    x = torch.randn(tokens, hidden, dtype=dtype, device=DEVICE)
    shares = torch.rand(tokens, 2, device=DEVICE)
    even = torch.rand(tokens, experts, device=DEVICE).argsort(dim=1)[:, :2].contiguous()
    chosen = even.clone()
    operations.fused_moe(x, coded, chosen, shares)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = operations.fused_moe(x, coded, chosen, shares)
    for ids in (even, torch.tensor([[0, 1]], device=DEVICE), torch.tensor([[4, 2]], device=DEVICE)):
        chosen.copy_(ids.expand(tokens, 2))
        graph.replay()
        expected = reference_operations.fused_moe(x.float(), exact, chosen, shares)
        assert (made.float() - expected).norm() < 1e-2 * expected.norm()


def test_a_rows_product_in_float32_has_the_same_bits_in_any_batch() -> None:
    x, weight = (torch.randn(n, 1000, device=DEVICE) for n in (300, 130))
    whole = invariant_linear(x, weight)
    for begin, end in ((0, 1), (3, 40), (5, 140)):
        assert torch.equal(invariant_linear(x[begin:end], weight), whole[begin:end])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_few_rows_are_trusted(dtype: torch.dtype) -> None:
    assert check_skinny(dtype, DEVICE) is None


@pytest.mark.parametrize("rows", [1, 3])
def test_kernels_that_overlap_wait_for_their_turns(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty layers of products, each reading the output of the previous one, captured.

    The result must equal that without overlap, every time.
    """
    hidden, inner, random = 1024, 3072, torch.Generator(DEVICE).manual_seed(rows)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random, device=DEVICE, dtype=torch.bfloat16)

    weights = [(noise(2 * inner, hidden) / 32, noise(hidden, inner) / 55) for _ in range(40)]
    norm, begin, stream = RowNorm(noise(hidden), 1e-6), noise(rows, hidden), noise(rows, hidden)

    def layers() -> None:
        stream.copy_(begin)
        for gate_up, down in weights:
            normed = operations.rms_norm(stream, norm.weight, norm.eps)
            skinny_linear(skinny_linear(normed, gate_up, gate="silu"), down, stream=stream)
            inside = skinny_linear(stream, gate_up, norm=norm, gate="silu")
            skinny_linear(inside, down, stream=stream)

    with monkeypatch.context() as patch:
        patch.setattr(launcher, "_supports_pdl", lambda _: False)
        layers()
    expected = stream.clone()
    layers()
    assert torch.equal(stream, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    for _ in range(100):
        graph.replay()
        assert torch.equal(stream, expected)


def test_parts_are_merged_by_whoever_finishes_last() -> None:
    """Seventy rows cut anywhere, over and over: a race would show as other bits."""
    random = np.random.default_rng(3)
    past = [int(n) for n in random.integers(0, 3000, 70)]
    problem = make_problem([1] * 70, past, group=4, head_dim=128, block_size=64, dtype=BF16)
    spec = replace(problem.spec, device=DEVICE)
    cache = LayerCache(*(stored.to(DEVICE) for stored in problem.cache.tensors()))
    geometry, query = problem.geometry, problem.query.to(DEVICE)
    tables = geometry.tables
    there = BatchGeometry.of(geometry.query_start, geometry.seq_lens, tables, DEVICE)
    backend = TritonAttention()
    state = backend.plan(there, spec)
    first = backend.forward(state, problem.layer, query, cache)
    expected = attend(problem)
    assert (first.cpu().double() - expected).norm() / expected.norm() < 1e-2
    for _ in range(300):
        assert torch.equal(backend.forward(state, problem.layer, query, cache), first)


@pytest.mark.parametrize("is_drawn", [True, False])
def test_drafts_are_judged_as_by_the_twin(is_drawn: bool) -> None:
    """Except for choices that the last bits of a logarithm decide."""
    random, rows, vocab = torch.Generator().manual_seed(1), 200, 9000
    shares = torch.randn(2, rows, vocab, generator=random).mul_(3).softmax(-1)
    seeds, positions = torch.arange(rows), torch.arange(rows) * 7
    drawn = reference.sample_from_probs(shares[1], seeds, positions, reference.DRAFT_STREAM)
    draft_ids = torch.where(seeds % 2 > 0, shares[0].argmax(-1), drawn)
    proposed = shares[1] if is_drawn else None
    given = shares[0], proposed, draft_ids, seeds, positions
    moved = [None if each is None else each.to(DEVICE) for each in given]
    tokens, kept = operations.verify_drafts(*moved)
    expected, expected_kept = reference.verify_drafts(*given)
    assert torch.equal(kept.cpu(), expected_kept)
    assert (tokens.cpu() == expected).float().mean() > 0.98
    on_device = [each.to(DEVICE) for each in (shares[1], seeds, positions)]
    assert (operations.sample_from_probs(*on_device, 1).cpu() == drawn).float().mean() > 0.98


def test_drafts_are_counted_and_the_next_token_kept() -> None:
    random = torch.Generator().manual_seed(2)
    sizes = torch.randint(1, 40, (70,), generator=random, dtype=torch.int32)
    slots = torch.randperm(70, generator=random).to(torch.int32).repeat_interleave(sizes)
    tokens = torch.randint(0, 2**17, (int(sizes.sum()),), generator=random)
    kept, newest = torch.rand(tokens.shape, generator=random) < 0.9, torch.full((70,), -1)
    there = newest.to(DEVICE)
    moved = [each.to(DEVICE) for each in (slots, tokens, kept, sizes)]
    accepted = operations.accept_drafts(there, *moved)
    expected = reference.accept_drafts(newest, slots, tokens, kept, sizes)
    assert torch.equal(accepted.cpu(), expected)
    assert torch.equal(there.cpu(), newest)


LLAMA = AttentionSpec(8, 2, 128, 64, torch.bfloat16, DEVICE, (None, 512))


@pytest.mark.parametrize(
    "spec",
    [
        LLAMA,
        replace(LLAMA, dtype=torch.float16),
        replace(LLAMA, dtype=torch.float32, head_dim=16),
        replace(LLAMA, cache_dtype=torch.int8),
        replace(LLAMA, cache_dtype=torch.float8_e4m3fn),
        replace(LLAMA, head_dim=256, softcap=50.0),
        replace(LLAMA, num_heads=14, head_dim=64, block_size=16, has_sinks=True),
        replace(LLAMA, num_heads=6, head_dim=8, block_size=4),
        AttentionSpec(16, 1, 576, 64, torch.bfloat16, DEVICE, value_dim=512),
        replace(LLAMA, has_experts=True),
        replace(LLAMA, has_experts=True, dtype=torch.float32),
        replace(LLAMA, has_recurrent_layers=True),
        replace(LLAMA, has_recurrent_layers=True, dtype=torch.float16),
    ],
    ids=lambda spec: f"{spec.num_heads}-{spec.head_dim}-{spec.dtype}-{spec.cache_dtype}",
)
def test_the_check_at_start_passes(spec: AttentionSpec) -> None:
    assert self_check(Kernels(TritonAttention(), operations), spec) is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_products_of_codes_are_trusted(dtype: torch.dtype) -> None:
    assert check_packed(dtype, DEVICE) is None
    assert check_scaled(torch.int8, dtype, DEVICE) is None
    assert dtype == torch.float16 or check_scaled(torch.float8_e4m3fn, dtype, DEVICE) is None
