"""Models with experts in place of MLPs."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.llama import windowed_layers
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec


def mixtral(reader: ConfigReader) -> DecoderSpec:
    """Mixtral: eight experts, two for a token."""
    ignore_router_training(reader)
    window = reader.optional_count("sliding_window")
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
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


def qwen3_moe(reader: ConfigReader) -> DecoderSpec:
    """Qwen3-30B-A3B and Qwen3-235B-A22B."""
    spec = read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        layers=_qwen_layers(reader),
        moe=_qwen_experts(reader),
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
