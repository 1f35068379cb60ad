"""OLMo 1, and OLMo 2 and 3: post-norm, and norms over all heads of a query or key."""

from __future__ import annotations

from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import (
    alternating_layers,
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec


def olmo(reader: ConfigReader) -> DecoderSpec:
    """OLMo 1: layer norms without weights; queries, keys and values are clipped in some."""
    return read_decoder(
        reader,
        norm=NormSpec(1e-5, "layer", has_weight=False),
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qkv_clip=reader.optional_number("clip_qkv"),
    )


def olmo2(reader: ConfigReader) -> DecoderSpec:
    """OLMo 2."""
    return _olmo(reader, placement="post")


def olmo3(reader: ConfigReader) -> DecoderSpec:
    """OLMo 3: windows in three layers of four, with unscaled rope."""
    trained = reader.count("max_position_embeddings", 2048)
    theta = reader.number("rope_theta", 500_000.0, above=1.0)
    hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    full, local = read_ropes_by_layer(
        reader,
        theta=theta,
        local_theta=theta,
        trained=trained,
        head_dim=reader.count("head_dim", hidden_size // num_heads),
    )
    window = reader.optional_count("sliding_window")
    kinds = alternating_layers(reader, window=window, period=4)
    return _olmo(
        reader,
        placement="post",
        rope=full,
        local_rope=local,
        layers=tuple(
            LayerSpec(window, local_rope=True) if kind == "sliding_attention" else LayerSpec()
            for kind in kinds
        ),
    )


def flex_olmo(reader: ConfigReader) -> DecoderSpec:
    """FlexOlmo: OLMo 2 with experts in all layers."""
    reader.set_defaults({"num_experts": 7, "num_experts_per_tok": 5, "rms_norm_eps": 1e-6})
    return _with_experts(reader, placement="post", theta=500_000.0)


def olmoe(reader: ConfigReader) -> DecoderSpec:
    """OLMoE: pre-norm, experts in all layers."""
    return _with_experts(reader, placement="pre")


def _with_experts(reader: ConfigReader, **fields: Any) -> DecoderSpec:
    ignore_router_training(reader)
    reader.refuse("clip_qkv", "is set, which is not supported")
    moe = MoeSpec(
        num_experts=reader.count("num_experts", 64),
        top_k=reader.count("num_experts_per_tok", 8),
        intermediate_size=reader.count("intermediate_size"),
        width_key="intermediate_size",
        normalised=reader.flag("norm_topk_prob"),
    )
    layers = (LayerSpec(experts=True),) * num_layers(reader)
    spec = _olmo(reader, moe=moe, layers=layers, **fields)
    return with_checked_experts(reader, spec)


def _olmo(reader: ConfigReader, **fields: Any) -> DecoderSpec:
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        wide_qk_norm=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        **fields,
    )


FAMILIES: dict[str, Family] = {
    "flex_olmo": Family(flex_olmo, "FlexOlmo 7x7B", "as `olmo2`; experts"),
    "olmo": Family(
        olmo,
        "OLMo 1B and 7B, OLMo 1.7",
        "layer norms without weights, clipped queries, keys and values in some",
    ),
    "olmo2": Family(olmo2, "OLMo 2", "norms after attention and MLP, QK norms over all heads"),
    "olmo3": Family(olmo3, "OLMo 3", "the same; windows with their own rope"),
    "olmoe": Family(olmoe, "OLMoE", "QK norms over all heads, experts"),
}
