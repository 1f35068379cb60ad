"""Laguna: gated heads, more of them in windowed layers, experts by corrected sigmoids."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import layers_with_experts
from engine.models.families.family import Family
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, HeadSpec, LayerSpec, MoeSpec

_HEADS = "num_attention_heads_per_layer"


def laguna(reader: ConfigReader) -> DecoderSpec:
    """Laguna XS.2 and relatives (Poolside)."""
    ignore_router_training(reader)
    reader.refuse("moe_router_logit_softcapping", "is set, which is not supported")
    reader.refuse("attention_bias", "is true, which is not supported")
    reader.refuse("moe_apply_router_weight_on_input", "is true, which is not supported")
    gating = reader.value("gating") if "gating" in reader else True
    if gating not in (True, "per-head", "per-element"):
        raise reader.error("gating", f"is {gating!r:.80}, which is not supported")
    head_dim = reader.count("head_dim", 128)
    trained = reader.count("max_position_embeddings", 131_072)
    full, local = read_ropes_by_layer(
        reader,
        theta=500_000.0,
        local_theta=10_000.0,
        trained=trained,
        head_dim=head_dim,
        default=RopeSpec(500_000.0, None, head_dim // 2),
    )
    spec = read_decoder(
        reader,
        head_dim=head_dim,
        max_positions=trained,
        rope=full,
        local_rope=local,
        qk_norm=True,
        attention_gate=True,
        separate_gates=True,
        gates_by_head=gating != "per-element",
        gate_kind="softplus",
        layers=_layers(reader, head_dim),
        moe=MoeSpec(
            num_experts=reader.count("num_experts", 256),
            top_k=reader.count("num_experts_per_tok", 8),
            intermediate_size=reader.count("moe_intermediate_size", 512),
            normalised=True,
            scoring="sigmoid",
            has_correction_bias=True,
            scale=reader.number("moe_routed_scaling_factor", 1.0),
            shared_intermediate_size=reader.count("shared_expert_intermediate_size", 512),
        ),
    )
    return with_checked_experts(reader, spec)


def _layers(reader: ConfigReader, head_dim: int) -> tuple[LayerSpec, ...]:
    count, window = num_layers(reader), reader.count("sliding_window", 512)
    usual = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", usual)
    kinds = layer_types(reader, count) or ["full_attention"] * count
    sizes = reader.list_of_length(_HEADS, count) or [usual] * count
    for size in sizes:
        if type(size) is not int or size < 1 or size % num_kv_heads:
            problem = f"has {size!r:.80} heads for {num_kv_heads} KV heads"
            raise reader.error(_HEADS, problem)
    return tuple(
        LayerSpec(
            window if kind == "sliding_attention" else None,
            local_rope=kind == "sliding_attention",
            experts=layer.experts,
            heads=None if size == usual else HeadSpec(num_kv_heads, head_dim, num_heads=size),
        )
        for kind, size, layer in zip(kinds, sizes, layers_with_experts(reader, 1), strict=True)
    )


FAMILIES: dict[str, Family] = {
    "laguna": Family(
        laguna,
        "Laguna XS.2, S 2.1",
        "gated attention by softplus, QK norms, partial rope, windows with their own rope and more "
        "heads, experts by corrected sigmoids, a shared expert",
        has_remote_code=True,
    ),
}
