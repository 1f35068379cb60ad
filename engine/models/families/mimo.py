"""MiMo-V2: values narrower than keys, windowed layers with sinks, experts by corrected sigmoids."""

from __future__ import annotations

from collections.abc import Sequence

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import read_deepseek_v3_experts
from engine.models.families.family import Family
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, HeadSpec, LayerSpec, NormSpec

_PARTIAL = 0.334  # 64 of 192 dimensions


def mimo_v2_flash(reader: ConfigReader) -> DecoderSpec:
    """MiMo-V2-Flash, with the keys that it was published with or those of transformers.

    Windowed layers have sinks and twice the KV heads of the others.
    """
    ignore_router_training(reader)
    reader.set_defaults({"attention_value_scale": 0.707})  # null is 1
    reader.refuse("n_shared_experts", "is set, which is not supported")
    reader.refuse("hybrid_block_size", "is set, which is not supported")
    reader.require("add_swa_attention_sink_bias", True)
    reader.require("add_full_attention_sink_bias", False)
    reader.ignore("attention_chunk_size")  # windows in a published config, which they repeat
    head_dim, value_dim = reader.count("head_dim", 192), reader.count("v_head_dim", 128)
    if value_dim > head_dim:
        raise reader.error("v_head_dim", f"exceeds the {head_dim} dimensions of a key")
    num_heads = reader.count("num_attention_heads", 64)
    reader.require("swa_head_dim", head_dim)
    reader.require("swa_v_head_dim", value_dim)
    reader.require("swa_num_attention_heads", num_heads)
    trained = reader.count("max_position_embeddings", 131_072)
    rope, local_rope = read_ropes_by_layer(
        reader,
        theta=5_000_000.0,
        local_theta=reader.number("swa_rope_theta", 10_000.0, above=1.0),
        trained=trained,
        head_dim=head_dim,
        partial=_PARTIAL,
    )
    if rope.num_dims != local_rope.num_dims:
        raise reader.error("rope_parameters", "rotates other parts of heads in windowed layers")
    eps = reader.number("layernorm_epsilon", 1e-5)
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", eps)),
        head_dim=head_dim,
        max_positions=trained,
        rope=rope,
        local_rope=local_rope,
        qkv_bias=reader.flag("attention_bias"),
        has_sinks=True,
        value_head_dim=value_dim,
        value_scale=reader.optional_number("attention_value_scale") or 1.0,
        layers=_layers(reader, num_heads, head_dim),
        moe=read_deepseek_v3_experts(reader),
    )
    return with_checked_experts(reader, spec)


def _layers(reader: ConfigReader, num_heads: int, head_dim: int) -> tuple[LayerSpec, ...]:
    """Return layers with full attention in the first and in every sixth, and windows in others."""
    num_kv_heads = reader.count("num_key_value_heads", 4)
    windowed_heads = reader.count("swa_num_key_value_heads", 2 * num_kv_heads)
    if num_heads % windowed_heads:
        problem = f"gives windowed layers {windowed_heads} KV heads for {num_heads} heads"
        raise reader.error("num_key_value_heads", problem)
    window = _window(reader)
    return tuple(
        LayerSpec(
            window,
            local_rope=True,
            experts=has_experts,
            heads=HeadSpec(windowed_heads, head_dim),
        )
        if is_windowed
        else LayerSpec(experts=has_experts, sinks=False)
        for is_windowed, has_experts in zip(_windowed(reader), _sparse(reader), strict=True)
    )


def _window(reader: ConfigReader) -> int:
    """Return the window, own token included; the published key counts the others alone."""
    window = reader.count("sliding_window", 129)
    before = reader.optional_count("sliding_window_size")
    return window if before is None else before + 1


def _windowed(reader: ConfigReader) -> list[bool]:
    """Return which layers have a window."""
    count = num_layers(reader)
    pattern = reader.list_of_length("hybrid_layer_pattern", count)
    kinds = layer_types(reader, count)
    if kinds is not None:
        return [kind == "sliding_attention" for kind in kinds]
    if pattern is None:
        return [i > 0 and (i + 1) % 6 != 0 for i in range(count)]
    return _bits(reader, "hybrid_layer_pattern", pattern)


def _sparse(reader: ConfigReader) -> list[bool]:
    """Return which layers have experts: all but the first, unless the config says otherwise."""
    count = num_layers(reader)
    pattern = reader.list_of_length("moe_layer_freq", count)
    kinds = reader.list_of_length("mlp_layer_types", count)
    if kinds is None:
        default = [0, *[1] * (count - 1)]
        return _bits(reader, "moe_layer_freq", default if pattern is None else pattern)
    if any(kind not in ("dense", "sparse") for kind in kinds):
        raise reader.error("mlp_layer_types", "must name 'dense' or 'sparse' for each layer")
    return [kind == "sparse" for kind in kinds]


def _bits(reader: ConfigReader, key: str, pattern: Sequence[object]) -> list[bool]:
    if any(type(bit) is not int or bit not in (0, 1) for bit in pattern):
        raise reader.error(key, "must have 0 or 1 for each layer")
    return [bit == 1 for bit in pattern]


FAMILIES: dict[str, Family] = {
    "mimo_v2_flash": Family(
        mimo_v2_flash,
        "MiMo-V2-Flash",
        "values narrower than keys, windows with sinks, experts as in DeepSeek-V3",
        has_remote_code=True,
    ),
}
