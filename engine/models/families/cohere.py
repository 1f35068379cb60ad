"""Cohere's models: attention and MLP, or experts, on one norm."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import layers_with_experts
from engine.models.families.family import Family
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec


def cohere(reader: ConfigReader) -> DecoderSpec:
    """Command R: parallel attention and MLP on one norm, interleaved rope.

    Command R+ also norms each head's query and key (``use_qk_norm``).
    """
    normed = reader.flag("use_qk_norm")
    return _cohere(reader, theta=500_000.0, qk_layer_norm=normed)


def cohere2(reader: ConfigReader) -> DecoderSpec:
    """Command R7B and Command A: Command R with windows and rope in three layers of four."""
    reader.require("use_gated_activation", True)
    window = reader.count("sliding_window", 4096)
    layers = (
        LayerSpec(window) if kind == "sliding_attention" else LayerSpec(rope=False)
        for kind in _layer_types(reader)
    )
    return _cohere(reader, theta=10_000.0, layers=tuple(layers))


def cohere2_moe(reader: ConfigReader) -> DecoderSpec:
    """Command A with experts: the first layers may have an MLP instead, and rope everywhere."""
    ignore_router_training(reader)
    reader.require("use_gated_activation", True)
    reader.refuse("use_qk_norm", "is true, which is not supported")
    sparse = [layer.experts for layer in layers_with_experts(reader, 0)]
    dense = reader.non_negative("first_k_dense_replace", 0)
    window = reader.optional_count("sliding_window")
    # Dense layers with this pattern have rope even where their attention is full.
    turns_dense = reader.count("prefix_dense_sliding_window_pattern", 1) == 1
    layers = tuple(
        LayerSpec(window, experts=has_experts)
        if kind == "sliding_attention" and window is not None
        else LayerSpec(rope=turns_dense and not has_experts, experts=has_experts)
        for kind, has_experts in zip(_layer_types(reader, dense), sparse, strict=True)
    )
    norm, moe = _norm(reader), _experts(reader)
    spec = _cohere(reader, theta=10_000.0, layers=layers, norm=norm, head_dim=128, moe=moe)
    if not all(sparse):
        inner = reader.optional_count("prefix_dense_intermediate_size")
        spec = dataclasses.replace(spec, intermediate_size=inner or spec.intermediate_size)
    return with_checked_experts(reader, spec)


def _experts(reader: ConfigReader) -> MoeSpec:
    scoring, inner = (
        reader.text("expert_selection_fn", "softmax"),
        reader.count("intermediate_size"),
    )
    is_normalised = reader.flag("norm_topk_prob", True)
    # Softmaxes are taken over a token's own experts: those over all, made to sum to one.
    if scoring not in ("softmax", "sigmoid"):
        raise reader.error("expert_selection_fn", f"is {scoring[:80]!r}, which is not supported")
    num_shared = reader.non_negative("num_shared_experts", 0)
    combining = reader.text("shared_expert_combination_strategy", "average")
    if combining not in ("average", "sum"):
        key = "shared_expert_combination_strategy"
        raise reader.error(key, f"is {combining[:80]!r}, which is not supported")
    share = 0.5 if num_shared and combining == "average" else 1.0
    return MoeSpec(
        num_experts=reader.count("num_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=inner,
        width_key="intermediate_size",
        normalised=scoring == "softmax" or is_normalised,
        scoring="softmax" if scoring == "softmax" else "sigmoid",
        scale=share,
        shared_scale=share,
        shared_intermediate_size=inner * num_shared,
        shared_width_key="num_shared_experts * intermediate_size",
    )


def _layer_types(reader: ConfigReader, dense: int = 0) -> list[str]:
    """Return the layers' attention: full in the last of every few; those that precede the experts
    have a pattern of their own."""
    count = num_layers(reader)
    period = reader.count("sliding_window_pattern", reader.count("_sliding_window_pattern", 4))
    before = reader.count("prefix_dense_sliding_window_pattern", 1) if dense else 1
    usual = [
        "full_attention"
        if ((i + 1) % before if i < dense else (i - dense + 1) % period) == 0
        else "sliding_attention"
        for i in range(count)
    ]
    return layer_types(reader, count) or usual


def _norm(reader: ConfigReader) -> NormSpec:
    """Return RMS norms if their epsilon is given, and layer norms otherwise."""
    eps = reader.number("layer_norm_eps", 1e-5)
    if "rms_norm_eps" in reader:
        return NormSpec(reader.number("rms_norm_eps"))
    return NormSpec(eps, "layer")


def _cohere(reader: ConfigReader, *, theta: float, **fields: Any) -> DecoderSpec:
    return read_decoder(
        reader,
        placement="parallel",
        shared_norm=True,
        interleaved=True,
        theta=theta,
        tied=True,
        max_positions=8192,
        logit_scale=reader.number("logit_scale", 0.0625),
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        **{"norm": NormSpec(reader.number("layer_norm_eps", 1e-5), "layer"), **fields},
    )


FAMILIES: dict[str, Family] = {
    "cohere": Family(
        cohere,
        "Command R and R+",
        "layer norms, parallel attention and MLP, interleaved rope, QK layer norms in R+",
    ),
    "cohere2": Family(
        cohere2,
        "Command R7B, Command A",
        "the same; windows, no rope in full-attention layers",
    ),
    "cohere2_moe": Family(
        cohere2_moe,
        "Command A with experts",
        "as `cohere2`; experts and a shared expert, RMS norms in some",
    ),
}
