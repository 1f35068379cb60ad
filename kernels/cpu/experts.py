"""Mixtures of experts by ``native/experts.h``: all experts of a layer in one native call.

Weights are row-major in one tensor (``fused_moe``, for any processor and also in float32), or in
the panels of linear layers, dense or quantised (``PanelExperts``); both are read in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence

import torch

from kernels.cpu.bindings import (
    ACTIVATION_CODES,
    CODE,
    COUNT,
    DTYPE_CODES,
    FLAG,
    GATING_CODES,
    POINTER,
    REAL,
    function,
    pointer,
)
from kernels.cpu.linear import PanelLinear, Panels, has_amx
from kernels.moe import Activation, ExpertTensors, GatedActivation, RoutingRule
from kernels.reference import moe as reference
from kernels.tiled import TiledWeight

_PANEL_KINDS = {"dense": 0, "int8": 1, "nibbles": 2, "bytes": 3, "float8": 4}  # as Kind there


class _Rule(ctypes.Structure):
    """``Rule`` of native/routing.cpp."""

    _fields_ = (
        *((name, COUNT) for name in ("top_k", "num_groups", "top_groups", "group_best")),
        ("scale", REAL),
        ("margin", REAL),
        ("sigmoid", FLAG),
        ("late", FLAG),
        ("sparse_mixer", FLAG),
        ("normalised", FLAG),
    )


class _Mixture(ctypes.Structure):
    """``Mixture`` of native/experts.h."""

    _fields_ = (
        *((name, COUNT) for name in ("num_experts", "top_k", "hidden", "inner")),
        ("shared_gate", POINTER),
        ("gating", CODE),
        ("alpha", REAL),
        ("limit", REAL),
        ("activation", CODE),
        ("gated", FLAG),
        ("apply_router_weight_on_input", FLAG),
    )


class _Weight(ctypes.Structure):
    """``ExpertWeight`` of native/panels/panel_experts.cpp."""

    _fields_ = (
        *((name, POINTER) for name in ("packed", "scales", "zeros", "totals", "order", "bias")),
        ("factor", REAL),
    )


class _Projection(ctypes.Structure):
    """``Projection`` of native/panels/panel_experts.cpp."""

    _fields_ = (
        ("experts", POINTER),
        ("levels", POINTER),
        *((name, COUNT) for name in ("outputs", "columns", "inputs", "group")),
        ("kind", CODE),
        ("amx", FLAG),
    )


def route(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    correction: torch.Tensor | None,
    rule: RoutingRule,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kernels.reference.moe``. A token's experts are in descending order of score."""
    num_experts, hidden = weight.shape
    x, weight = x.contiguous(), weight.contiguous()
    ids = torch.empty((x.shape[0], rule.top_k), dtype=torch.int64)
    shares = torch.empty((x.shape[0], rule.top_k), dtype=torch.float32)
    native_rule = _Rule(
        rule.top_k,
        rule.num_groups,
        rule.top_groups,
        rule.group_best,
        rule.scale,
        rule.margin,
        rule.scoring in ("sigmoid", "late_sigmoid"),
        rule.scoring == "late_sigmoid",
        rule.scoring == "sparse_mixer",
        rule.normalised,
    )
    function("quire_route")(
        DTYPE_CODES[x.dtype],
        DTYPE_CODES[weight.dtype],
        ctypes.byref(native_rule),
        x.data_ptr(),
        x.shape[0],
        hidden,
        weight.data_ptr(),
        pointer(bias),
        pointer(correction),
        num_experts,
        ids.data_ptr(),
        shares.data_ptr(),
    )
    return ids, shares


def fused_moe(
    x: torch.Tensor,
    experts: ExpertTensors,
    expert_ids: torch.Tensor,
    expert_weights: torch.Tensor,
    activate: Callable[[torch.Tensor], torch.Tensor] | None = None,
    apply_router_weight_on_input: bool = False,
    some_elsewhere: bool = False,
) -> torch.Tensor:
    """See ``kernels.reference.moe``."""
    gate_up, down, *biases = experts
    gating = GatedActivation(reference.silu_mul, "silu") if activate is None else activate
    if (
        isinstance(gate_up, TiledWeight)
        or isinstance(down, TiledWeight)
        or not isinstance(gating, GatedActivation | Activation)
    ):
        return reference.fused_moe(
            x, experts, expert_ids, expert_weights, activate, apply_router_weight_on_input
        )
    assert not (apply_router_weight_on_input and experts.gate_up_bias is not None)
    x, ids, weights = x.contiguous(), expert_ids.contiguous(), expert_weights.contiguous()
    gate_up, down = gate_up.contiguous(), down.contiguous()
    biases = [None if bias is None else bias.contiguous() for bias in biases]
    num_experts, hidden, inner = down.shape
    mixture = _mixture(
        num_experts, ids.shape[1], hidden, inner, gating, apply_router_weight_on_input
    )
    out = torch.empty_like(x)
    function("quire_experts")(
        DTYPE_CODES[x.dtype],
        ctypes.byref(mixture),
        *(gate_up.data_ptr(), pointer(biases[0]), down.data_ptr(), pointer(biases[1])),
        *(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), None, out.data_ptr()),
        x.shape[0],
    )
    return out


class PanelExperts:
    """A layer's experts with weights in panels.

    Args:
        gate_ups, downs: of each expert; ``join`` checks whether they can be computed together.
        gating: the function between the two.
        top_k: experts of a token.
        apply_router_weight_on_input: see ``kernels.reference.moe.fused_moe``.
        shared_gate: [1, hidden] in the model's dtype: the shared expert's output is multiplied by
            the sigmoid of its product with the token. None: by 1.
    """

    def __init__(
        self,
        gate_ups: Sequence[PanelLinear],
        downs: Sequence[PanelLinear],
        gating: GatedActivation | Activation,
        top_k: int,
        *,
        apply_router_weight_on_input: bool = False,
        shared_gate: torch.Tensor | None = None,
    ) -> None:
        first, second = ([layer.panels() for layer in layers] for layers in (gate_ups, downs))
        gate = None if shared_gate is None else shared_gate.to(torch.bfloat16).contiguous()
        self._mixture = _mixture(
            *(
                len(first),
                top_k,
                second[0].outputs,
                second[0].columns,
                gating,
                apply_router_weight_on_input,
                gate,
            )
        )
        (gate_up, first_owned), (down, second_owned) = (
            make_projection(first),
            make_projection(second),
        )
        self._projections = gate_up, down
        self._owned = first_owned, second_owned, gate  # keeps the memory behind the addresses alive

    @classmethod
    def join(
        cls,
        gate_ups: Sequence[object],
        downs: Sequence[object],
        gating: GatedActivation | Activation,
        top_k: int,
        *,
        apply_router_weight_on_input: bool = False,
        shared_gate: torch.Tensor | None = None,
    ) -> PanelExperts | None:
        """Join the layers into one operation; None if some are not in panels of the same kind."""
        first, second = _same_layout(gate_ups), _same_layout(downs)
        if first is None or second is None:
            return None
        return cls(
            *(first, second, gating, top_k),
            apply_router_weight_on_input=apply_router_weight_on_input,
            shared_gate=shared_gate,
        )

    def __call__(
        self,
        x: torch.Tensor,
        expert_ids: torch.Tensor,
        expert_weights: torch.Tensor,
        shared: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See ``kernels.reference.moe.fused_moe``.

        Args:
            x: [n, hidden].
            expert_ids: [n, top_k] int64, distinct for each token, except for experts of other
                ranks.
            expert_weights: [n, top_k] float32.
            shared: [n, hidden], the shared expert's output; it is added.

        Returns:
            [n, hidden] in x's dtype, summed in float32.
        """
        dtype = x.dtype
        if dtype is not torch.bfloat16:
            x = x.to(torch.bfloat16)
            shared = None if shared is None else shared.to(torch.bfloat16)
        x = x.contiguous()
        out = torch.empty_like(x)
        function("quire_panel_experts")(
            ctypes.byref(self._mixture),
            *map(ctypes.byref, self._projections),
            x.data_ptr(),
            expert_ids.data_ptr(),
            expert_weights.data_ptr(),
            pointer(shared),
            out.data_ptr(),
            x.shape[0],
        )
        return out if dtype is torch.bfloat16 else out.to(dtype)


def _mixture(
    num_experts: int,
    top_k: int,
    hidden: int,
    inner: int,
    gating: GatedActivation | Activation,
    apply_router_weight_on_input: bool,
    shared_gate: torch.Tensor | None = None,
) -> _Mixture:
    mixture = _Mixture(
        *(num_experts, top_k, hidden, inner),
        pointer(shared_gate),
        gated=isinstance(gating, GatedActivation),
        apply_router_weight_on_input=apply_router_weight_on_input,
    )
    if isinstance(gating, GatedActivation):
        mixture.gating = GATING_CODES[gating.kind]
        mixture.alpha, mixture.limit = gating.alpha, gating.limit
    else:
        mixture.activation = ACTIVATION_CODES[gating.kind]
    return mixture


def _same_layout(layers: Sequence[object]) -> list[PanelLinear] | None:
    """Return the layers if a single description fits all of their weights."""
    panels = [layer for layer in layers if isinstance(layer, PanelLinear)]
    forms = {_layout_key(layer.panels()) for layer in panels}
    return panels if len(panels) == len(layers) and len(forms) == 1 else None


def _layout_key(held: Panels) -> tuple[object, ...]:
    levels = None if held.levels is None else tuple(held.levels.tolist())
    return held.kind, held.outputs, held.columns, held.inputs, held.group_size, levels


def make_projection(weights: Sequence[Panels]) -> tuple[_Projection, object]:
    """Describe weights of one form for native code; also return what that points into."""
    held = (_Weight * len(weights))(
        *(
            _Weight(
                *map(pointer, (of.packed, of.scales, of.zeros, of.code_sums, of.order, of.bias)),
                of.factor,
            )
            for of in weights
        )
    )
    first = weights[0]
    projection = _Projection(
        ctypes.addressof(held),
        pointer(first.levels),
        *(first.outputs, first.columns, first.inputs, first.group_size),
        _PANEL_KINDS[first.kind],
        has_amx(),
    )
    return projection, (held, weights)
