"""Flint: Qwen's attention with sinks and windows, experts by sigmoids."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec


def flint(reader: ConfigReader) -> DecoderSpec:
    """Flint: rope in windowed layers only, a shared expert without a gate."""
    ignore_router_training(reader)
    bias = reader.flag("attention_bias")
    moe = MoeSpec(
        num_experts=reader.count("num_experts", 256),
        top_k=reader.count("num_experts_per_tok", 6),
        intermediate_size=reader.count("moe_intermediate_size", 512),
        normalised=reader.flag("norm_topk_prob", True),
        scoring="sigmoid",
        router_in_float32=True,
        shared_intermediate_size=reader.count("shared_expert_intermediate_size", 1024),
    )
    spec = read_decoder(
        reader,
        head_dim=128,
        max_positions=262_144,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=True,
        has_sinks=True,
        layers=_layers(reader),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def _layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return the layers: full attention in the first two, in every fourth, and in the last."""
    count, window = num_layers(reader), reader.count("sliding_window", 513)
    kinds = layer_types(reader, count) or [
        "full_attention" if i < 2 or i % 4 == 1 or i == count - 1 else "sliding_attention"
        for i in range(count)
    ]
    step = reader.count("decoder_sparse_step", 1)
    dense = reader.indices("mlp_only_layers") if "mlp_only_layers" in reader else {0, 1}
    is_windowed = [kind == "sliding_attention" for kind in kinds]
    return tuple(
        LayerSpec(
            window if windowed else None,
            rope=windowed,
            experts=(i + 1) % step == 0 and i not in dense,
        )
        for i, windowed in enumerate(is_windowed)
    )


FAMILIES: dict[str, Family] = {
    "flint": Family(
        flint,
        "Flint",
        "QK norms, sinks, windows, no rope in full-attention layers, experts by sigmoids, a shared "
        "expert",
    ),
}
