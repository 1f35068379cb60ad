"""Models with experts instead of MLPs."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import (
    draft_layers,
    layers_with_experts,
    read_deepseek_v3_experts,
)
from engine.models.families.family import Family
from engine.models.families.llama import exaone_layers, windowed_layers
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import (
    alternating_layers,
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

_MTP = (
    *("num_mtp_layers", "num_nextn_predict_layers", "mtp_layer_types", "mtp_mlp_layer_types"),
    "mtp_loss_scaling_factor",
)
# Keys of MiniMax's earlier models, and of multi-token prediction layers, which are not read.
_MINIMAX_UNUSED = (
    *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    *("mlp_intermediate_size", "shared_moe_mode"),
    *("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
)


def mixtral(reader: ConfigReader) -> DecoderSpec:
    """Mixtral: eight experts, two per token."""
    ignore_router_training(reader)
    window = reader.optional_count("sliding_window")
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
        width_key="intermediate_size",
        normalised=True,
    )
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        theta=1_000_000.0,
        max_positions=131_072,
        layers=(LayerSpec(window, experts=True),) * num_layers(reader),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def qwen2_moe(reader: ConfigReader) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-57B-A14B: routed experts and a gated shared expert."""
    reader.require("qkv_bias", True)
    moe = _qwen_experts(
        reader,
        shared_intermediate_size=reader.count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    spec = read_decoder(reader, qkv_bias=True, layers=_qwen_layers(reader), moe=moe)
    return with_checked_experts(reader, spec)


def qwen3_moe(reader: ConfigReader, *, mrope: MropeSpec | None = None) -> DecoderSpec:
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""
    spec = read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        layers=_qwen_layers(reader),
        moe=_qwen_experts(reader),
        mrope=mrope,
    )
    return with_checked_experts(reader, spec)


def dots1(reader: ConfigReader) -> DecoderSpec:
    """dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""
    ignore_router_training(reader)
    reader.refuse("use_sliding_window", "is true, which is not supported")
    count, window = num_layers(reader), reader.optional_count("sliding_window")
    first_windowed = reader.non_negative("max_window_layers", count)
    kinds = layer_types(reader, count) or [
        "sliding_attention" if i >= first_windowed else "full_attention" for i in range(count)
    ]
    layers = (
        dataclasses.replace(layer, window=window if kind == "sliding_attention" else None)
        for layer, kind in zip(layers_with_experts(reader, 0), kinds, strict=True)
    )
    spec = read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        layers=tuple(layers),
        moe=read_deepseek_v3_experts(reader, normalised=False),
    )
    return with_checked_experts(reader, spec)


def exaone_moe(reader: ConfigReader) -> DecoderSpec:
    """K-EXAONE 236B-A23B: EXAONE's attention with norms before it, and DeepSeek-V3's experts."""
    ignore_router_training(reader)
    _ignore_mtp(reader)
    layers = (
        dataclasses.replace(layer, experts=kind.experts)
        for layer, kind in zip(exaone_layers(reader), layers_with_experts(reader, 1), strict=True)
    )
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        qk_norm=True,
        layers=tuple(layers),
        moe=read_deepseek_v3_experts(reader, scale=2.5),
    )
    return with_checked_experts(reader, spec)


def kolibri1(reader: ConfigReader) -> DecoderSpec:
    """Kolibri 1: EXAONE's attention between norms, experts chosen before their sigmoids."""
    ignore_router_training(reader)
    window = reader.optional_count("sliding_window")
    layers = tuple(
        LayerSpec(window, experts=True)
        if kind == "sliding_attention"
        else LayerSpec(rope=window is None, experts=True)
        for kind in alternating_layers(reader, window=window, period=5)
    )
    moe = dataclasses.replace(
        _qwen_experts(
            reader, shared_intermediate_size=reader.count("shared_expert_intermediate_size", 512)
        ),
        scoring="late_sigmoid",
        has_correction_bias=True,
        router_in_float32=True,
    )
    spec = read_decoder(
        reader,
        head_dim=128,
        intermediate_size=moe.intermediate_size,  # no layer has an MLP
        placement="sandwich",
        max_positions=262_144,
        qk_norm=True,
        layers=layers,
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def hy_v3(reader: ConfigReader) -> DecoderSpec:
    """Hy3: Qwen3's attention, experts by corrected sigmoids in all layers but the first."""
    ignore_router_training(reader)
    reader.ignore("enable_moe_fp32_combine")  # adding the shared expert in float32
    inner = reader.count("moe_intermediate_size", 1536)
    moe = MoeSpec(
        num_experts=reader.count("num_experts", 192),
        top_k=reader.count("num_experts_per_tok", 8),
        intermediate_size=inner,
        normalised=True,
        scoring="sigmoid",
        has_correction_bias=True,
        router_in_float32=True,
        scale=reader.number("router_scaling_factor", 2.826),
        shared_intermediate_size=inner * reader.non_negative("num_shared_experts", 1),
        shared_width_key="num_shared_experts * moe_intermediate_size",
    )
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        theta=11_158_840.0,
        qk_norm=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        layers=layers_with_experts(reader, 1),
        moe=moe,
        num_draft_layers=draft_layers(reader),
    )
    return with_checked_experts(reader, spec)


def mellum(reader: ConfigReader) -> DecoderSpec:
    """Mellum 2: Qwen3's experts, windows with their own rope."""
    _ignore_mtp(reader)
    head_dim = reader.count("head_dim", 128)
    full, local = read_ropes_by_layer(
        reader,
        theta=500_000.0,
        local_theta=10_000.0,
        trained=reader.count("max_position_embeddings", 131_072),
        head_dim=head_dim,
    )
    window, count = reader.optional_count("sliding_window"), num_layers(reader)
    kinds = layer_types(reader, count) or ["full_attention"] * count
    layers = (
        LayerSpec(window, local_rope=True, experts=mlp.experts)
        if kind == "sliding_attention"
        else LayerSpec(experts=mlp.experts)
        for kind, mlp in zip(kinds, layers_with_experts(reader, 0), strict=True)
    )
    spec = read_decoder(
        reader,
        head_dim=head_dim,
        rope=full,
        local_rope=local,
        qk_norm=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        max_positions=131_072,
        layers=tuple(layers),
        moe=_qwen_experts(reader),
    )
    return with_checked_experts(reader, spec)


def afmoe(reader: ConfigReader) -> DecoderSpec:
    """Trinity Nano, Mini and Large: gated attention, rope only in windowed layers.

    All layers but the first few have experts by corrected sigmoids.
    """
    ignore_router_training(reader)
    for key in ("load_balance_coeff", "use_grouped_mm"):  # training, and other code
        reader.ignore(key)
    reader.require("score_func", "sigmoid")
    reader.require("route_norm", True)
    for key in ("n_group", "topk_group", "num_expert_groups", "num_limited_groups"):
        reader.require(key, 1)
    window, count = reader.optional_count("sliding_window"), num_layers(reader)
    period = reader.count("global_attn_every_n_layers", 4)
    kinds = layer_types(reader, count) or [
        "sliding_attention" if (i + 1) % period else "full_attention" for i in range(count)
    ]
    dense = reader.non_negative("num_dense_layers", 1)
    layers = (
        LayerSpec(window, experts=i >= dense)
        if kind == "sliding_attention"
        else LayerSpec(rope=False, experts=i >= dense)
        for i, kind in enumerate(kinds)
    )
    inner, hidden_size = reader.count("moe_intermediate_size", 1408), reader.count("hidden_size")
    moe = MoeSpec(
        num_experts=reader.count("num_experts", 64),
        top_k=reader.count("num_experts_per_tok", 6),
        intermediate_size=inner,
        normalised=True,
        scoring="sigmoid",
        has_correction_bias=True,
        scale=reader.number("route_scale", 1.0),
        shared_intermediate_size=inner * reader.non_negative("num_shared_experts", 2),
        shared_width_key="num_shared_experts * moe_intermediate_size",
    )
    reader.require("attention_bias", False)
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        placement="sandwich",
        max_positions=16_384,
        qk_norm=True,
        attention_gate=True,
        separate_gates=True,
        embedding_scale=hidden_size**0.5 if reader.flag("mup_enabled") else 1.0,
        layers=tuple(layers),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def minimax_m2(reader: ConfigReader) -> DecoderSpec:
    """MiniMax-M2: norms over all heads of a query or key, rope on half of the head."""
    ignore_router_training(reader)
    reader.require("scoring_func", "sigmoid")
    reader.require("use_routing_bias", True)
    reader.require("use_qk_norm", True)
    reader.require("qk_norm_type", "per_layer")
    reader.refuse("shared_intermediate_size", "is set, which is not supported")
    for key in _MINIMAX_UNUSED:
        reader.ignore(key)
    count = num_layers(reader)
    if any(kind != 1 for kind in reader.list_of_length("attn_type_list", count) or ()):
        raise reader.error("attn_type_list", "has linear attention, which is not supported")
    reader.refuse("sliding_window", "is set, which is not supported")
    head_dim = reader.count("head_dim", 128)
    partial = reader.count("rotary_dim", head_dim) / head_dim
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 256),
        top_k=reader.count("num_experts_per_tok", 8),
        intermediate_size=reader.count("intermediate_size"),
        width_key="intermediate_size",
        normalised=True,
        scoring="sigmoid",
        has_correction_bias=True,
        router_in_float32=True,
    )
    spec = read_decoder(
        reader,
        head_dim=head_dim,
        theta=5_000_000.0,
        partial=partial,
        max_positions=196_608,
        wide_qk_norm=True,
        layers=(LayerSpec(experts=True),) * count,
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def _ignore_mtp(reader: ConfigReader) -> None:
    """Ignore the keys of multi-token prediction heads, which are not read."""
    for key in _MTP:
        reader.ignore(key)


def _qwen_experts(
    reader: ConfigReader, *, shared_intermediate_size: int = 0, shared_gate: bool = False
) -> MoeSpec:
    ignore_router_training(reader)
    experts = "num_experts" if "num_experts" in reader else "num_local_experts"
    return MoeSpec(
        num_experts=reader.count(experts),
        top_k=reader.count("num_experts_per_tok"),
        intermediate_size=reader.count("moe_intermediate_size"),
        normalised=reader.flag("norm_topk_prob"),
        shared_intermediate_size=shared_intermediate_size,
        shared_gate=shared_gate,
    )


def _qwen_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return layers with experts every ``decoder_sparse_step``, except ``mlp_only_layers``."""
    step = reader.count("decoder_sparse_step", 1)
    dense = reader.indices("mlp_only_layers")
    return tuple(
        dataclasses.replace(layer, experts=(i + 1) % step == 0 and i not in dense)
        for i, layer in enumerate(windowed_layers(reader))
    )


FAMILIES: dict[str, Family] = {
    "afmoe": Family(
        afmoe,
        "Trinity Nano, Mini and Large",
        "norms before and after, QK norms, gated attention, windows, no rope in full-attention "
        "layers, experts by corrected sigmoids",
        has_remote_code=True,
    ),
    "dots1": Family(
        dots1, "dots.llm1", "QK norms, experts as in DeepSeek-V3", has_remote_code=True
    ),
    "exaone_moe": Family(
        exaone_moe,
        "K-EXAONE 236B-A23B",
        "QK norms, windows, no rope in full-attention layers, experts as in DeepSeek-V3",
    ),
    "hy_v3": Family(hy_v3, "Hy3", "QK norms, experts by corrected sigmoids, shared experts"),
    "kolibri1": Family(
        kolibri1,
        "Kolibri 1",
        "norms before and after, QK norms, windows, no rope in full-attention layers, experts "
        "chosen by corrected outputs and weighed by sigmoids, a shared expert",
    ),
    "mellum": Family(mellum, "Mellum 2 12B-A2.5B", "as `qwen3_moe`; windows with their own rope"),
    "minimax_m2": Family(
        minimax_m2,
        "MiniMax-M2 to M2.5",
        "QK norms over all heads, partial rope, experts by corrected sigmoids",
        has_remote_code=True,
    ),
    "mixtral": Family(mixtral, "Mixtral", "experts"),
    "qwen2_moe": Family(
        qwen2_moe, "Qwen1.5-MoE, Qwen2-57B-A14B", "biases, experts and a gated shared expert"
    ),
    "qwen3_moe": Family(qwen3_moe, "Qwen3-30B-A3B, Qwen3-235B-A22B", "QK norms, experts"),
}
