"""Inputs built on the device, fed-back tokens, mixtures of experts, compared with the reference."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from kernels.inputs import StepRows
from kernels.moe import (
    ExpertTensors,
    GatedActivation,
    GatedActivationKind,
    RouterWeights,
    RoutingRule,
)
from kernels.packed import PackedParts
from kernels.reference.feedback import feed_back as reference_feed_back
from kernels.reference.inputs import build_inputs as reference_inputs
from kernels.reference.layers import activate as reference_activate
from kernels.reference.layers import silu_mul
from kernels.reference.moe import add_experts as reference_add
from kernels.reference.moe import add_gated as reference_add_gated
from kernels.reference.moe import clamped_silu_mul as reference_silu
from kernels.reference.moe import clamped_swiglu as reference_swiglu
from kernels.reference.moe import fused_moe as reference_moe
from kernels.sampling import TokenCounts
from kernels.skinny import RowNorm
from kernels.tiled import tile_experts
from kernels.triton.feedback import feed_back
from kernels.triton.gates import add_gated
from kernels.triton.inputs import build_inputs
from kernels.triton.layers import clamped_silu_mul, clamped_swiglu
from kernels.triton.moe import add_experts, fused_moe
from tests.kernels.packed_weights import packed_weight


@pytest.mark.parametrize("block_size", [4, 16])
def test_inputs_equal_the_twins(block_size: int) -> None:
    random = torch.Generator().manual_seed(block_size)
    lengths = torch.tensor([1, 300, 1, 7, 1], dtype=torch.int32)  # one is longer than a tile
    fed = torch.randint(0, 1000, (int(lengths.sum()),), generator=random, dtype=torch.int32)
    fed[[0, 301]] = -1
    rows = StepRows(
        slots=torch.tensor([5, 0, 3, 2, 4], dtype=torch.int32),
        query_start=torch.cat((torch.zeros(1), lengths.cumsum(0))).to(torch.int32),
        starts=torch.tensor([77, 0, 15, 16, -1], dtype=torch.int32),  # the last is padding
        token_ids=fed,
    )
    newest = torch.randint(0, 1000, (6,), generator=random)
    tables = torch.randint(0, 10**6, (6, 90), generator=random, dtype=torch.int32)
    built = build_inputs(rows, newest, tables, block_size, int(lengths.max()))
    expected = reference_inputs(rows, newest, tables, block_size, int(lengths.max()))
    for name, actual, wanted in zip(built._fields, built, expected, strict=True):
        assert actual.dtype == wanted.dtype, name
        assert torch.equal(actual, wanted), name


@pytest.mark.parametrize("has_counts", [False, True])
def test_tokens_fed_back_equal_the_twins(has_counts: bool) -> None:
    """Requests with token counts and without, in more rows than a program handles."""
    random = torch.Generator().manual_seed(1)
    slots = torch.randperm(200, generator=random)[:150].to(torch.int32)
    token_ids = torch.randint(0, 30, (150,), generator=random)
    count_line = torch.full((200,), -1, dtype=torch.int32)
    count_line[slots[::10].long()] = torch.randperm(15, generator=random).to(torch.int32)
    expected, actual = (torch.zeros(200, dtype=torch.int64) for _ in range(2))
    told, counted = (
        TokenCounts(torch.ones(15, 30, dtype=torch.int32), torch.zeros(15, 30, dtype=torch.bool))
        for _ in range(2)
    )
    for _ in range(2):
        arguments = (slots, token_ids, count_line)
        reference_feed_back(expected, *arguments, told if has_counts else None)
        feed_back(actual, *arguments, counted if has_counts else None)
    assert torch.equal(actual[slots.long()], token_ids)
    assert torch.equal(actual, expected)
    assert torch.equal(counted.output, told.output)
    assert int(told.output.sum()) == 15 * 30 + 2 * 15 * has_counts


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "inner"),
    [(3, 8, 2, 64, 70), (50, 4, 2, 100, 32), (1, 5, 5, 33, 16), (40, 3, 1, 64, 130)],
)
@pytest.mark.parametrize(
    "kind", ["plain", "biased", "apply_router_weight_on_input", "some elsewhere", "ungated"]
)
def test_experts_equal_the_loop(
    tokens: int, experts: int, top_k: int, hidden: int, inner: int, kind: str
) -> None:
    random = torch.Generator().manual_seed(tokens)
    x = torch.randn(tokens, hidden, generator=random)
    activate, entered = None, 2 * inner
    if kind == "ungated":
        activate, entered = partial(reference_activate, kind="relu2"), inner
    gate_up = torch.randn(experts, entered, hidden, generator=random)
    down = torch.randn(experts, hidden, inner, generator=random)

    chosen = torch.rand(tokens, experts, generator=random).argsort(dim=1)[:, :top_k]
    if top_k == 1:
        chosen = torch.full_like(chosen, 2)  # the others get nothing
    elsewhere = kind == "some elsewhere"
    if elsewhere:  # all experts of one token, some of others
        chosen[torch.rand(chosen.shape, generator=random) < 0.4] = experts
        chosen[0] = experts
    weights = torch.rand(tokens, top_k, generator=random)
    tensors = ExpertTensors(gate_up, down)
    if kind == "biased":
        biases = (torch.randn(experts, 2 * inner), torch.randn(experts, hidden))
        tensors = ExpertTensors(gate_up, down, *biases)
    exact = ExpertTensors(*(None if part is None else part.double() for part in tensors))
    first, *rest = chosen, weights, activate, kind == "apply_router_weight_on_input", elsewhere
    actual = fused_moe(x, tensors, first, *rest).double()
    expected = reference_moe(x.double(), exact, first, *rest)
    assert (actual - expected).norm() <= expected.norm() * 1e-5


def test_experts_of_many_tokens_in_wide_tiles() -> None:
    """130 tokens and more for each of two experts; 280 outputs are not a multiple of a tile's."""
    random = torch.Generator().manual_seed(6)
    x = torch.randn(270, 300, generator=random).half()
    gate_up = torch.randn(2, 280, 300, generator=random).half() / 17
    down = torch.randn(2, 300, 140, generator=random).half() / 12
    chosen = (torch.arange(270) % 2)[:, None]
    weights = torch.rand(270, 1, generator=random)
    actual = fused_moe(x, ExpertTensors(gate_up, down), chosen, weights).double()
    exact = ExpertTensors(gate_up.double(), down.double())
    expected = reference_moe(x.double(), exact, chosen, weights)
    assert (actual - expected).norm() <= expected.norm() * 1e-3


@pytest.mark.parametrize(
    ("kind", "group", "form", "tokens", "experts", "top_k"),
    [
        ("e2m1", 32, "exponents", 3, 8, 2),
        ("e2m1", 32, "exponents", 70, 3, 2),
        ("int4", 32, "zeros and orders", 70, 3, 2),
        ("nf4", 64, "plain", 3, 8, 2),
        ("int8", 192, "zeros and orders", 3, 4, 1),
        ("e4m3", 192, "plain", 40, 3, 2),
        ("int8", 16, "plain", 3, 4, 2),
        ("nf4", 32, "plain", 70, 2, 2),
    ],
)
def test_experts_in_codes_equal_the_loop(
    kind: str, group: int, form: str, tokens: int, experts: int, top_k: int
) -> None:
    """First GPT-OSS's kind; few rows per expert and many."""
    hidden, inner = 192, 96
    stacks = []
    for outputs, inputs in ((2 * inner, hidden), (hidden, inner)):
        has_extras = form == "zeros and orders"
        parts = [
            packed_weight(
                kind,
                outputs,
                inputs,
                min(group, inputs),
                zeros=has_extras,
                order=has_extras,
                seed=e,
            )
            for e in range(experts)
        ]
        if form == "exponents":
            exponents = [torch.randint(-9, 0, part.scales.shape) for part in parts]
            parts = [
                replace(part, scales=torch.exp2(e))
                for part, e in zip(parts, exponents, strict=True)
            ]
        stacks.append(tile_experts(PackedParts(tuple(parts)), experts))
    random = torch.Generator().manual_seed(tokens)
    biases = torch.randn(experts, 2 * inner), torch.randn(experts, hidden)
    tensors = ExpertTensors(*stacks, *biases)
    x = torch.randn(tokens, hidden, generator=random)
    chosen = torch.rand(tokens, experts, generator=random).argsort(dim=1)[:, :top_k]
    weights = torch.rand(tokens, top_k, generator=random)
    activate = partial(reference_swiglu, alpha=1.702, limit=3.0)
    actual = fused_moe(x, tensors, chosen, weights, activate)
    exact = ExpertTensors(*stacks, *(bias.double() for bias in biases))
    expected = reference_moe(x.double(), exact, chosen, weights, activate)
    assert float((actual - expected).norm() / expected.norm()) < 1e-5


def test_experts_of_no_token() -> None:
    """As after a chunk of a prompt that yields no token."""
    experts = ExpertTensors(torch.randn(3, 64, 48), torch.randn(3, 48, 32))
    chosen = torch.empty((0, 2), dtype=torch.int64)
    assert fused_moe(torch.empty(0, 48), experts, chosen, torch.empty(0, 2)).shape == (0, 48)


def test_clamped_swiglu_equals_its_twin() -> None:
    gate_up = torch.randn(7, 2 * 1100) * 4  # beyond the limit on both sides
    torch.testing.assert_close(
        clamped_swiglu(gate_up, 1.702, 3.0), reference_swiglu(gate_up, 1.702, 3.0)
    )
    torch.testing.assert_close(clamped_silu_mul(gate_up, 1.5), reference_silu(gate_up, 1.5))


@pytest.mark.parametrize("gate", ["silu", "clamped_swiglu"])
@pytest.mark.parametrize("is_biased", [False, True])
@pytest.mark.parametrize("tokens", [0, 1, 4])
def test_what_experts_give_few_tokens_is_added_to_the_stream(
    tokens: int, is_biased: bool, gate: GatedActivationKind
) -> None:
    random = torch.Generator().manual_seed(tokens)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=random)

    biases = (noise(6, 64), noise(6, 48)) if is_biased else ()
    experts = ExpertTensors(noise(6, 64, 48) / 7, noise(6, 48, 32) / 6, *biases)
    apply = partial(reference_swiglu, alpha=1.702, limit=1.5) if gate != "silu" else silu_mul
    stream, norm = noise(tokens, 48), RowNorm(noise(48), 1e-5)
    router = RouterWeights(noise(6, 48), noise(6), None)
    given = norm, router, RoutingRule(3), experts, GatedActivation(apply, gate)
    actual, expected = stream.clone(), stream.clone()
    add_experts(actual, *given)
    reference_add(expected, *given)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hidden", [40, 2500])
def test_a_shared_experts_gate(hidden: int) -> None:
    random = torch.Generator().manual_seed(hidden)
    out, shared, x = torch.randn(3, 7, hidden, generator=random)
    weight = torch.randn(1, hidden, generator=random) / 20
    expected = reference_add_gated(out.clone(), shared, x, weight)
    assert add_gated(out, shared, x, weight) is out
    torch.testing.assert_close(out, expected)
