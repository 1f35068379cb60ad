"""Experts in one native call, compared with the reference, which loops over experts."""

from __future__ import annotations

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from kernels.cpu import linear, operations
from kernels.cpu.experts import PanelExperts
from kernels.cpu.grouped import PanelGrouped
from kernels.cpu.native import build
from kernels.cpu.program import Recorder, Workspace
from kernels.moe import Activation, ExpertTensors, GatedActivation, RoutingRule
from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, NF4_LEVELS, PackedWeight, pack_nibbles
from kernels.reference import operations as reference
from tests.kernels import cpu_targets

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")
needs_panels = pytest.mark.skipif(not linear.is_available(), reason="no panels here")


GATINGS = {
    "silu": GatedActivation(reference.silu_mul, "silu"),
    "gelu": GatedActivation(reference.erf_gelu_mul, "gelu"),
    "gelu_tanh": GatedActivation(reference.gelu_mul, "gelu_tanh"),
    "clamped_swiglu": GatedActivation(
        functools.partial(reference.clamped_swiglu, alpha=1.702, limit=1.5),
        *("clamped_swiglu", 1.702, 1.5),
    ),
    "clamped_silu": GatedActivation(
        functools.partial(reference.clamped_silu_mul, limit=0.5), "clamped_silu", limit=0.5
    ),
}
# Activations of experts without a gate.
ACTIVATIONS = {
    kind: Activation(functools.partial(reference.activate, kind=kind), kind)
    for kind in ("relu2", "gelu_tanh")
}
BETWEEN = GATINGS | {f"{kind} alone": activating for kind, activating in ACTIVATIONS.items()}
_LEVELS = {"int4": INT4_LEVELS, "nf4": NF4_LEVELS, "mxfp4": MXFP4_LEVELS}


@st.composite
def mixtures(draw) -> dict:
    """Random shapes: few experts with many rows, and many experts, most of them without any."""
    num_experts = draw(st.integers(1, 64))
    most = 200 if num_experts < 16 else 24
    return {
        "num_experts": num_experts,
        "top_k": draw(st.integers(1, min(8, num_experts))),
        "rows": draw(st.sampled_from([1, 2, 5, 33]) | st.integers(1, most)),
        "hidden": draw(st.integers(3, 130)),
        "inner": draw(st.integers(3, 80)),
        "gating": draw(st.sampled_from(sorted(BETWEEN))),
        "biased": draw(st.booleans()),
        "apply_router_weight_on_input": draw(st.booleans()),
        "shared": draw(st.sampled_from(["none", "plain", "gated"])),
        "favoured": draw(st.booleans()),
        "elsewhere": draw(st.sampled_from([0.0, 0.0, 0.5, 1.0])),
        "seed": draw(st.integers(0, 2**16)),
    }


class Case:
    """Random weights and tokens of a drawn mixture, all in float32."""

    def __init__(self, drawn: dict) -> None:
        self.random = torch.Generator().manual_seed(drawn["seed"])
        experts, hidden, inner = drawn["num_experts"], drawn["hidden"], drawn["inner"]
        self.top_k, self.gating = drawn["top_k"], BETWEEN[drawn["gating"]]
        entered = 2 * inner if isinstance(self.gating, GatedActivation) else inner
        self.apply_router_weight_on_input = drawn["apply_router_weight_on_input"]
        is_biased = drawn["biased"] and not self.apply_router_weight_on_input
        self.weights = ExpertTensors(
            self.noise(experts, entered, hidden) / hidden**0.5,
            self.noise(experts, hidden, inner) / inner**0.5,
            self.noise(experts, entered) if is_biased else None,
            self.noise(experts, hidden) if is_biased else None,
        )
        rows = drawn["rows"]
        self.x = self.noise(rows, hidden)
        scores = torch.rand(rows, experts, generator=self.random)
        if drawn["favoured"]:  # most tokens go to the first few
            scores[:, : self.top_k] += 0.8
        self.ids = scores.topk(self.top_k, dim=1).indices
        is_elsewhere = torch.rand(self.ids.shape, generator=self.random) < drawn["elsewhere"]
        self.ids.masked_fill_(is_elsewhere, experts)  # some belong to experts of another rank
        self.shares = torch.rand(rows, self.top_k, generator=self.random)
        self.shared = None if drawn["shared"] == "none" else self.noise(rows, hidden)
        self.shared_gate = self.noise(1, hidden) if drawn["shared"] == "gated" else None

    def noise(self, *shape: int) -> torch.Tensor:
        # Rounded to bfloat16, so that both sides start from the same numbers.
        return torch.randn(*shape, generator=self.random).bfloat16().float()

    def expected(
        self, weights: ExpertTensors | None = None, *, shared: bool = True
    ) -> torch.Tensor:
        """The reference result, in float32."""
        out = reference.fused_moe(
            *(self.x, weights or self.weights, self.ids, self.shares),
            *(self.gating, self.apply_router_weight_on_input),
        )
        if self.shared is None or not shared:
            return out
        gate = 1.0
        if self.shared_gate is not None:
            gate = torch.sigmoid(self.x @ self.shared_gate.T)
        return out + gate * self.shared


def is_near(actual: torch.Tensor, expected: torch.Tensor, bound: float) -> bool:
    # Outputs are of order one, but a few of them may all be nearly zero.
    size = expected.norm() + 0.3 * expected.numel() ** 0.5
    return bool((actual.float() - expected).norm() < bound * size)


@given(mixtures())
@settings(max_examples=60, deadline=None)
def test_weights_that_lie_row_by_row(drawn: dict) -> None:
    case = Case(drawn)
    rest = case.ids, case.shares, case.gating, case.apply_router_weight_on_input
    actual = operations.fused_moe(case.x, case.weights, *rest)
    expected = case.expected(shared=False)
    torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
    narrow = ExpertTensors(*(None if t is None else t.bfloat16() for t in case.weights))
    assert is_near(operations.fused_moe(case.x.bfloat16(), narrow, *rest), expected, 0.012)


def _packed(weight: torch.Tensor, kind: str, case: Case) -> PackedWeight:
    """Random codes, of the magnitude of the weight they replace."""
    outputs, inputs = weight.shape
    group = 16 if inputs % 16 == 0 else inputs
    groups = -(-inputs // group)
    scales = torch.rand(outputs, groups, generator=case.random) + 0.1
    scales = (scales / (inputs**0.5 * (5 if kind in _LEVELS else 100))).half().float()
    codes = torch.randint(0, 16 if kind in _LEVELS else 256, weight.shape, generator=case.random)
    zeros = order = None
    if kind == "int4":
        zeros = torch.randint(-3, 4, (outputs, groups), generator=case.random)
        order = torch.randperm(inputs, generator=case.random)
    if kind in _LEVELS:
        return PackedWeight(pack_nibbles(codes), scales, inputs, group, _LEVELS[kind], zeros, order)
    codes = codes.to(torch.uint8)
    if kind == "fp8":
        codes[(codes & 0x7F) == 0x7F] = 0
    codes = codes.view(torch.int8 if kind == "bytes" else torch.float8_e4m3fn)
    return PackedWeight(codes, scales, inputs, group)


def panels(case: Case, kind: str) -> tuple[PanelExperts, ExpertTensors]:
    """The experts in panels of one kind, and their dequantised weights."""
    tables: tuple[list, list] = ([], [])
    dense: tuple[list, list] = ([], [])
    for which in (0, 1):
        for e, weight in enumerate(case.weights[which]):
            bias = case.weights[2 + which]
            bias = None if bias is None else bias[e]
            if kind == "dense":
                layer, meant = linear.PanelDense(weight, bias), weight
            elif kind in ("int8", "rounded4"):
                make = linear.PanelInt8 if kind == "int8" else linear.PanelInt4
                layer, meant = make(weight, bias), weight
            else:
                packed = _packed(weight, kind, case)
                layer = PanelGrouped(packed, bias, torch.bfloat16)
                meant = packed.dequantise(torch.float32)
            tables[which].append(layer)
            dense[which].append(meant)
    joined = PanelExperts.join(
        *(*tables, case.gating, case.top_k),
        apply_router_weight_on_input=case.apply_router_weight_on_input,
        shared_gate=case.shared_gate,
    )
    assert joined is not None
    return joined, ExpertTensors(*map(torch.stack, dense), *case.weights[2:])


# Upper bounds on the error of rounding weights (and, with int8, activations), or of bfloat16.
_BOUNDS = {"dense": 0.015, "int8": 0.06, "rounded4": 0.25}
_KINDS = ("dense", "int8", "rounded4", "int4", "nf4", "mxfp4", "bytes", "fp8")


@needs_panels
@pytest.mark.parametrize("way", cpu_targets.WAYS)
@pytest.mark.parametrize("kind", _KINDS)
def test_weights_in_panels(kind: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_targets.use(way, monkeypatch)

    @given(mixtures())
    @settings(max_examples=12, deadline=None)
    def check(drawn: dict) -> None:
        case = Case(drawn)
        experts, meant = panels(case, kind)
        shared = None if case.shared is None else case.shared.bfloat16()
        actual = experts(case.x.bfloat16(), case.ids, case.shares, shared)
        assert is_near(actual, case.expected(meant), _BOUNDS.get(kind, 0.02))

    check()


@needs_panels
@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_a_token_has_the_same_bits_alone_and_in_a_crowd(kind: str) -> None:
    case = Case(_drawn(num_experts=6, rows=150, shared="gated"))
    experts, _ = panels(case, kind)
    assert case.shared is not None
    x, shared = case.x.bfloat16(), case.shared.bfloat16()
    crowd = experts(x, case.ids, case.shares, shared)
    for i in (0, 77, 149):
        own = slice(i, i + 1)
        assert torch.equal(
            experts(x[own], case.ids[own], case.shares[own], shared[own]), crowd[own]
        )


def _drawn(**changes) -> dict:
    drawn = {"num_experts": 16, "top_k": 4, "rows": 9, "hidden": 96, "inner": 64}
    plain = {
        "gating": "silu",
        "biased": False,
        "apply_router_weight_on_input": False,
        "favoured": False,
    }
    return {**drawn, **plain, "elsewhere": 0.0, "shared": "none", "seed": 1, **changes}


@needs_panels
def test_a_step_of_experts_is_recorded() -> None:
    case = Case(_drawn(shared="gated"))
    experts, _ = panels(case, "dense")
    assert case.shared is not None
    x, shared = case.x.bfloat16(), case.shared.bfloat16()
    router, rule = case.noise(16, 96).bfloat16(), RoutingRule(4)

    def step() -> torch.Tensor:
        return experts(x, *operations.route(x, router, None, None, rule), shared)

    program, out = Recorder(Workspace())(step)
    assert len(program) == 2
    for _ in range(2):
        x.copy_(torch.randn(x.shape))
        program()
        assert torch.equal(out, step())


@needs_panels
def test_no_tokens_at_all() -> None:
    """As in the last layer, when no token's result is needed yet."""
    case = Case(_drawn(rows=0))
    experts, _ = panels(case, "dense")
    x = case.x.bfloat16()
    ids, shares = operations.route(x, case.noise(16, 96).bfloat16(), None, None, RoutingRule(4))
    assert experts(x, ids, shares).shape == (0, 96)
    assert operations.fused_moe(case.x, case.weights, ids, shares).shape == (0, 96)


@needs_panels
def test_layers_that_are_not_alike_are_not_joined() -> None:
    case = Case(_drawn())
    dense = [linear.PanelDense(weight, None) for weight in case.weights.gate_up]
    down = [linear.PanelDense(weight, None) for weight in case.weights.down]
    mixed = [*dense[1:], linear.PanelInt8(case.weights.gate_up[0], None)]
    gating = GATINGS["silu"]
    assert PanelExperts.join(dense, down, gating, 4) is not None
    assert PanelExperts.join(mixed, down, gating, 4) is None
    assert PanelExperts.join(dense, [*down[1:], functional.linear], gating, 4) is None


@st.composite
def rules(draw) -> tuple[RoutingRule, int]:
    scoring = draw(st.sampled_from(["softmax", "sigmoid", "late_sigmoid", "sparse_mixer"]))
    groups = 1 if scoring == "sparse_mixer" else draw(st.sampled_from([1, 1, 2, 4, 8]))
    size = draw(st.integers(2, 24))
    top_groups = draw(st.integers(1, groups))
    rule = RoutingRule(
        top_k=draw(st.integers(1, min(8, size * top_groups))),
        scoring=scoring,
        normalised=draw(st.booleans()),
        scale=draw(st.sampled_from([1.0, 2.5])),
        num_groups=groups,
        top_groups=top_groups,
        group_best=draw(st.integers(1, 2)),
        margin=draw(st.sampled_from([0.0, 0.4, 2.0])),
    )
    return rule, groups * size


# Fixed cases: occasionally two scores are equal up to the order of summation.
@given(rules(), st.integers(1, 70), st.integers(1, 100), st.integers(0, 2**16))
@settings(max_examples=80, deadline=None, derandomize=True)
def test_routing(drawn: tuple[RoutingRule, int], rows: int, hidden: int, seed: int) -> None:
    rule, experts = drawn
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, hidden, generator=random)
    weight = torch.randn(experts, hidden, generator=random) / hidden**0.5
    bias = torch.randn(experts, generator=random) if seed % 2 else None
    # With softmax, the correction is about as large as the scores.
    has_correction = seed % 3 and rule.scoring != "sparse_mixer"
    correction = torch.rand(experts, generator=random) / 10 if has_correction else None
    said = x, weight, bias, correction, rule
    ids, shares = operations.route(*said)
    expected_ids, expected = reference.route(*said)
    by_expert = torch.zeros(rows, experts).scatter(1, ids, shares)
    torch.testing.assert_close(
        by_expert,
        torch.zeros(rows, experts).scatter(1, expected_ids, expected),
        atol=1e-5,
        rtol=1e-4,
    )


def test_a_router_in_float32_reads_bfloat16() -> None:
    x, weight = torch.randn(5, 40).bfloat16(), torch.randn(12, 40)
    rule = RoutingRule(3)
    ids, shares = operations.route(x, weight, None, None, rule)
    expected_ids, expected = reference.route(x, weight, None, None, rule)
    assert torch.equal(ids, expected_ids)  # both in the order of the scores
    torch.testing.assert_close(shares, expected)


def test_a_token_that_is_no_number_harms_no_other() -> None:
    x, weight = torch.randn(6, 40), torch.randn(12, 40)
    spoilt = x.clone()
    spoilt[2, 7] = float("nan")
    for rule in (
        RoutingRule(3),
        RoutingRule(3, "sparse_mixer", margin=0.5),
        RoutingRule(3, num_groups=4, top_groups=2, group_best=2),
    ):
        ids, shares = operations.route(spoilt, weight, None, None, rule)
        assert all(len(set(row)) == 3 and 0 <= min(row) <= max(row) < 12 for row in ids.tolist())
        assert shares[2].isnan().all()
        others = [0, 1, 3, 4, 5]
        assert torch.equal(ids[others], operations.route(x, weight, None, None, rule)[0][others])
