"""Models with experts in place of MLPs."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.deepseek import corrected_experts, layers_with_experts
from engine.models.families.llama import windowed_layers
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import RopePlanes
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec

# Of MiniMax's earlier models, and of layers for multi-token prediction, which are not read.
_MINIMAX_UNUSED = (
    *("layernorm_full_attention_beta", "layernorm_linear_attention_beta", "layernorm_mlp_beta"),
    *("mlp_intermediate_size", "shared_moe_mode"),
    *("mtp_transformer_layers", "num_mtp_modules", "use_mtp"),
)


def mixtral(reader: ConfigReader) -> DecoderSpec:
    """Mixtral: eight experts, two for a token."""
    ignore_router_training(reader)
    window = reader.optional_count("sliding_window")
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
        width_key="intermediate_size",
        normalised=True,
    )
    layers = (LayerSpec(window, experts=True),) * num_layers(reader)
    return with_checked_experts(reader, read_decoder(reader, layers=layers, moe=moe))


def qwen2_moe(reader: ConfigReader) -> DecoderSpec:
    """Qwen1.5-MoE and Qwen2-57B-A14B: a gated shared expert beside the chosen ones."""
    reader.require("qkv_bias", True)
    moe = _qwen_experts(
        reader,
        shared_intermediate_size=reader.count("shared_expert_intermediate_size", 5632),
        shared_gate=True,
    )
    spec = read_decoder(reader, qkv_bias=True, layers=_qwen_layers(reader), moe=moe)
    return with_checked_experts(reader, spec)


def qwen3_moe(reader: ConfigReader, *, rope_planes: RopePlanes | None = None) -> DecoderSpec:
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""
    spec = read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        layers=_qwen_layers(reader),
        moe=_qwen_experts(reader),
        rope_planes=rope_planes,
    )
    return with_checked_experts(reader, spec)


def dots1(reader: ConfigReader) -> DecoderSpec:
    """dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""
    ignore_router_training(reader)
    reader.refuse("use_sliding_window", "is true, which is not supported")
    count, window = num_layers(reader), reader.optional_count("sliding_window")
    first_windowed = reader.whole("max_window_layers", count)
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
        moe=corrected_experts(reader, normalised=False),
    )
    return with_checked_experts(reader, spec)


def minimax_m2(reader: ConfigReader) -> DecoderSpec:
    """MiniMax-M2: norms over all heads of a query or key together, rope on half of the head."""
    ignore_router_training(reader)
    reader.require("scoring_func", "sigmoid")
    reader.require("use_routing_bias", True)
    reader.require("use_qk_norm", True)
    reader.require("qk_norm_type", "per_layer")
    reader.refuse("shared_intermediate_size", "is set, which is not supported")
    for key in _MINIMAX_UNUSED:
        reader.ignore(key)
    count = num_layers(reader)
    if any(kind != 1 for kind in reader.listed("attn_type_list", count) or ()):
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
        corrected=True,
        exact_router=True,
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
    """Experts in every ``decoder_sparse_step``-th layer, but for those in ``mlp_only_layers``."""
    step = reader.count("decoder_sparse_step", 1)
    dense = reader.indices("mlp_only_layers")
    return tuple(
        dataclasses.replace(layer, experts=(i + 1) % step == 0 and i not in dense)
        for i, layer in enumerate(windowed_layers(reader))
    )
