"""The linear layers of a decoder layer: their names, and where their weights are."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from engine.models.expert_weights import ExpertWeights, MlpWeights
from engine.models.linear import Linear
from engine.models.modules import AttentionWeights, Layer
from engine.models.spec import DecoderSpec
from engine.models.weights import Parameter

Wrap = Callable[[str, Linear], Linear]


class Site(NamedTuple):
    """One linear layer, or a slice of one, whose outputs all have the same inputs."""

    label: str  # within the layer: "qkv", "experts.3.down"
    parameter: str  # "7.qkv.weight"
    begin: int  # first of its outputs within the parameter
    end: int
    inputs: int


def sites_of(spec: DecoderSpec, wanted: dict[str, Parameter], i: int) -> list[Site]:
    """The linear layers of layer ``i``."""

    def whole(label: str) -> Site:
        name = f"{i}.{label}.weight"
        rows, inputs = wanted[name].shape
        return Site(label, name, 0, rows, inputs)

    attention = [whole("qkv"), whole("output")]
    moe = spec.moe
    if not (spec.layers[i].experts and moe):
        return [*attention, whole("gate_up"), whole("down")]
    found = attention
    for which in ("gate_up", "down"):
        name = f"{i}.experts.{which}"
        rows, inputs = wanted[name].shape
        size = rows // moe.num_experts
        found += [
            Site(f"experts.{e}.{which}", name, e * size, (e + 1) * size, inputs)
            for e in range(moe.num_experts)
        ]
    if moe.shared_intermediate_size:
        found += [whole("shared.gate_up"), whole("shared.down")]
    return found


def wrap_linears(layer: Layer, wrap: Wrap) -> Layer:
    """The layer with each of its linear layers wrapped, given its label."""
    mlp = layer.mlp
    if isinstance(mlp, MlpWeights):
        wrapped: MlpWeights | ExpertWeights = _wrap_mlp(mlp, "", wrap)
    else:
        assert mlp is not None, "a layer that ends with its mixer is not rounded here"
        experts = tuple(_wrap_mlp(own, f"experts.{e}.", wrap) for e, own in enumerate(mlp.experts))
        shared = None if mlp.shared is None else _wrap_mlp(mlp.shared, "shared.", wrap)
        wrapped = replace(mlp, experts=experts, shared=shared)
    mixer = layer.mixer
    assert isinstance(mixer, AttentionWeights), "a layer that keeps a state is not rounded here"
    mixer = replace(mixer, qkv=wrap("qkv", mixer.qkv), output=wrap("output", mixer.output))
    return replace(layer, mixer=mixer, mlp=wrapped)


def _wrap_mlp(mlp: MlpWeights, prefix: str, wrap: Wrap) -> MlpWeights:
    gate_up, down = wrap(f"{prefix}gate_up", mlp.gate_up), wrap(f"{prefix}down", mlp.down)
    return mlp._replace(gate_up=gate_up, down=down)
