"""Recurrent models: gated delta rules (Qwen3-Next and 3.5, OLMo Hybrid), short convolutions
(LFM2)."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.recurrence import GatedDeltaSpec, ShortConvSpec
from engine.models.rope_spec import MropeSpec, ProportionalScaling, RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

# LFM2 keys of initialisation, and duplicates of other keys.
_LFM2_UNUSED = (
    *("block_dim", "block_mlp_init_scale", "block_norm_eps", "block_out_init_scale"),
    *("block_use_xavier_init", "conv_dim", "conv_dim_out", "conv_use_xavier_init", "num_heads"),
)
# Keys of multi-token prediction layers; the tensors show whether there is one.
_MTP = ("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")


def qwen3_next(reader: ConfigReader) -> DecoderSpec:
    """Qwen3-Next: gated delta rules in three layers of four, gated attention, experts."""
    dense, step = reader.indices("mlp_only_layers"), reader.count("decoder_sparse_step", 1)
    layers = tuple(
        dataclasses.replace(layer, experts=(i + 1) % step == 0 and i not in dense)
        for i, layer in enumerate(_layers(reader))
    )
    moe = _experts(reader, normalised=reader.flag("norm_topk_prob", True))
    return with_checked_experts(reader, _qwen(reader, layers, moe=moe))


def qwen3_5(reader: ConfigReader, *, mrope: MropeSpec | None = None) -> DecoderSpec:
    """Qwen3.5, dense."""
    reader.ignore("mlp_only_layers")
    return _qwen(reader, tuple(_layers(reader)), mrope=mrope)


def qwen3_5_moe(reader: ConfigReader, *, mrope: MropeSpec | None = None) -> DecoderSpec:
    """Qwen3.5 with routed experts and a shared one."""
    reader.require("mlp_only_layers", [])
    layers = tuple(dataclasses.replace(layer, experts=True) for layer in _layers(reader))
    moe = _experts(reader, normalised=True)
    spec = _qwen(reader, layers, moe=moe, mrope=mrope)
    return with_checked_experts(reader, spec)


def olmo_hybrid(reader: ConfigReader) -> DecoderSpec:
    """OLMo Hybrid: OLMo 3's attention in every fourth layer, pre-norm layers between.

    Published models have no position embedding.
    """
    for key in ("a_log_min", "a_log_max", "dt_min", "dt_max", "dt_init_floor"):
        reader.ignore(f"linear_{key}")
    hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    num_key_heads = reader.count("linear_num_key_heads", num_heads)
    key_dim = reader.count("linear_key_head_dim", int(0.75 * hidden_size / num_key_heads) or 1)
    recurrence = GatedDeltaSpec(
        num_key_heads=num_key_heads,
        num_value_heads=reader.count("linear_num_value_heads", num_heads),
        key_dim=key_dim,
        value_dim=reader.count("linear_value_head_dim", 2 * key_dim),
        conv_width=reader.count("linear_conv_kernel_dim", 4),
        norm_eps=1e-5,
        allow_neg_eigval=reader.flag("linear_allow_neg_eigval", True),
        separate_projections=True,
    )
    turns = _has_theta(reader)
    layers = (
        dataclasses.replace(layer, placement="pre")
        if layer.recurrent
        else dataclasses.replace(layer, rope=turns)
        for layer in _layers(reader)
    )
    return read_decoder(
        reader,
        placement="post",
        wide_qk_norm=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        max_positions=65_536,
        layers=tuple(layers),
        recurrence=_checked(reader, recurrence),
    )


def lfm2(reader: ConfigReader) -> DecoderSpec:
    """LFM2: gated convolutions, with attention layers in between."""
    reader.require("block_use_swiglu", True)
    inner = reader.count("block_ff_dim", reader.count("intermediate_size", 12_288))
    multiplier = reader.number("block_ffn_dim_multiplier", 1.0)
    multiple = reader.count("block_multiple_of", 256)
    if reader.flag("block_auto_adjust_ff_dim", True):
        inner = int(multiplier * int(2 * inner / 3))
        inner = -(-inner // multiple) * multiple
    spec = _lfm2(reader, _lfm2_layers(reader))
    return dataclasses.replace(spec, intermediate_size=inner)


def lfm2_moe(reader: ConfigReader) -> DecoderSpec:
    """LFM2 with experts in all layers but the first few."""
    ignore_router_training(reader)
    dense = reader.non_negative("num_dense_layers", 2)
    moe = MoeSpec(
        num_experts=reader.count("num_experts", 32),
        top_k=reader.count("num_experts_per_tok", 4),
        intermediate_size=reader.count("moe_intermediate_size", 1792),
        normalised=reader.flag("norm_topk_prob", True),
        scoring="sigmoid",
        scale=reader.number("routed_scaling_factor", 1.0),
        has_correction_bias=reader.flag("use_expert_bias", True),
    )
    layers = tuple(
        dataclasses.replace(layer, experts=i >= dense)
        for i, layer in enumerate(_lfm2_layers(reader))
    )
    return with_checked_experts(reader, _lfm2(reader, layers, moe=moe))


def lfm3(reader: ConfigReader) -> DecoderSpec:
    """LFM3: LFM2 with sandwich norms, gated heads, and some windows with their own rope."""
    head_dim = reader.count("head_dim", 128)
    full, local = read_ropes_by_layer(
        reader,
        theta=1_000_000.0,
        local_theta=10_000.0,
        trained=reader.count("max_position_embeddings", 128_000),
        head_dim=head_dim,
        default=RopeSpec(1_000_000.0, ProportionalScaling(0.5)),
    )
    is_gated = reader.flag("use_attention_gate", True)
    return _lfm2(
        reader,
        _lfm3_layers(reader),
        width=7,
        head_dim=head_dim,
        rope=full,
        local_rope=local,
        placement="sandwich" if reader.flag("use_sandwich_norm", True) else "pre",
        attention_gate=is_gated,
        separate_gates=is_gated,
        naming="lfm3" if is_gated else "lfm3_ungated",
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        activation="silu",
    )


def _qwen(
    reader: ConfigReader,
    layers: tuple[LayerSpec, ...],
    *,
    moe: MoeSpec | None = None,
    mrope: MropeSpec | None = None,
) -> DecoderSpec:
    reader.require("attn_output_gate", True)
    reader.require("mamba_ssm_dtype", "float32")
    for key in _MTP:
        reader.ignore(key)
    eps = reader.number("rms_norm_eps", 1e-6)
    recurrence = GatedDeltaSpec(
        num_key_heads=reader.count("linear_num_key_heads", 16),
        num_value_heads=reader.count("linear_num_value_heads", 32),
        key_dim=reader.count("linear_key_head_dim", 128),
        value_dim=reader.count("linear_value_head_dim", 128),
        conv_width=reader.count("linear_conv_kernel_dim", 4),
        norm_eps=eps,
    )
    return read_decoder(
        reader,
        norm=NormSpec(eps, offset=1.0),
        head_dim=256,
        partial=0.25,
        max_positions=32_768,
        intermediate_size=moe.intermediate_size if moe else None,
        mrope=mrope,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        attention_gate=True,
        layers=layers,
        moe=moe,
        recurrence=_checked(reader, recurrence),
    )


def _experts(reader: ConfigReader, *, normalised: bool) -> MoeSpec:
    ignore_router_training(reader)
    return MoeSpec(
        num_experts=reader.count("num_experts"),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=reader.count("moe_intermediate_size"),
        normalised=normalised,
        shared_intermediate_size=reader.count("shared_expert_intermediate_size"),
        shared_gate=True,
    )


def _checked(reader: ConfigReader, spec: GatedDeltaSpec) -> GatedDeltaSpec:
    if spec.num_value_heads % spec.num_key_heads:
        raise reader.error(
            "linear_num_key_heads", f"must divide the {spec.num_value_heads} value heads"
        )
    if spec.conv_width < 2:
        raise reader.error("linear_conv_kernel_dim", "must be at least 2")
    return spec


def _layers(reader: ConfigReader) -> list[LayerSpec]:
    """Return ``layer_types``; if absent, attention is in the last of every few layers."""
    count, period = num_layers(reader), reader.count("full_attention_interval", 4)
    usual = ["linear_attention" if (i + 1) % period else "full_attention" for i in range(count)]
    return _kinds(reader, reader.list_of_length("layer_types", count) or usual, "linear_attention")


def _kinds(reader: ConfigReader, kinds: list[str], recurrent: str) -> list[LayerSpec]:
    for kind in kinds:
        if kind not in (recurrent, "full_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    if "full_attention" not in kinds:
        raise reader.error("layer_types", "has no attention, which is not supported")
    return [LayerSpec(recurrent=kind == recurrent) for kind in kinds]


def _has_theta(reader: ConfigReader) -> bool:
    """Return whether there are rotary positions; a null base means there are none."""
    section = reader.mapping("rope_parameters")
    return "rope_theta" not in section or section["rope_theta"] is not None


def _lfm2(
    reader: ConfigReader, layers: tuple[LayerSpec, ...], *, width: int = 3, **fields: Any
) -> DecoderSpec:
    """``width``: the family's default convolution width."""
    reader.require("use_pos_enc", True)
    for key in _LFM2_UNUSED:
        reader.ignore(key)
    recurrence = ShortConvSpec(
        channels=reader.count("hidden_size"),
        conv_width=reader.count("conv_L_cache", width),
        bias=reader.flag("conv_bias"),
    )
    if recurrence.conv_width < 2:
        raise reader.error("conv_L_cache", "must be at least 2")
    tied = reader.flag("tie_word_embeddings", True)
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("norm_eps", 1e-5)),
        tie_word_embeddings=reader.flag("tie_embedding", tied),
        theta=1_000_000.0,
        max_positions=128_000,
        intermediate_size=12_288,
        qk_norm=True,
        layers=layers,
        recurrence=recurrence,
        **fields,
    )


def _lfm3_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return ``layer_types``; by default full attention, a window and two convolutions in turn."""
    window, count = reader.optional_count("sliding_window"), num_layers(reader)
    usual = [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i and i % 4 == 0 else "conv"
        for i in range(count)
    ]
    of_kind = {
        "conv": LayerSpec(recurrent=True),
        "full_attention": LayerSpec(),
        "sliding_attention": LayerSpec(window, local_rope=True),
    }
    kinds = reader.list_of_length("layer_types", count) or usual
    for kind in kinds:
        if kind not in of_kind:
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    if all(kind == "conv" for kind in kinds):
        raise reader.error("layer_types", "has no attention, which is not supported")
    return tuple(of_kind[kind] for kind in kinds)


def _lfm2_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return ``layer_types``; if absent, attention is in ``full_attn_idxs``, or else everywhere."""
    count = num_layers(reader)
    attending = frozenset(range(count))
    if "full_attn_idxs" in reader:
        attending = reader.indices("full_attn_idxs")
    usual = ["full_attention" if i in attending else "conv" for i in range(count)]
    return tuple(_kinds(reader, reader.list_of_length("layer_types", count) or usual, "conv"))


FAMILIES: dict[str, Family] = {
    "lfm2": Family(lfm2, "LFM2 350M to 2.6B", "gated short convolutions, QK norms"),
    "lfm2_moe": Family(lfm2_moe, "LFM2-8B-A1B, 24B-A2B", "the same; experts by corrected sigmoids"),
    "lfm3": Family(
        lfm3,
        "LFM3 1.7B",
        "as `lfm2`; norms before and after, gated heads, windows with their own rope",
    ),
    "olmo_hybrid": Family(
        olmo_hybrid,
        "OLMo Hybrid 7B",
        "gated delta rule in three of four layers, norms after attention only",
    ),
    "qwen3_next": Family(
        qwen3_next, "Qwen3-Next", "as `qwen3_5_text`; experts and a gated shared expert"
    ),
}
