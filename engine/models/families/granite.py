"""Granite and HyperCLOVA X: four multipliers; Granite with experts."""

from __future__ import annotations

from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec


def granite(reader: ConfigReader) -> DecoderSpec:
    """Granite 3.x, dense."""
    return _granite(
        reader,
        mlp_bias=reader.flag("mlp_bias"),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )


def granitemoe(reader: ConfigReader) -> DecoderSpec:
    """Granite 3.x with experts, all of which are in one tensor; some with one that all tokens go
    to."""
    ignore_router_training(reader)
    shared = reader.whole("shared_intermediate_size", 0)
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
        normalised=True,  # a softmax over the chosen ones alone, which is the same
        shared_intermediate_size=shared,
        width_key="intermediate_size",
        shared_width_key="shared_intermediate_size",
    )
    spec = _granite(
        reader,
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
        layers=(LayerSpec(experts=True),) * num_layers(reader),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def hyperclovax(reader: ConfigReader) -> DecoderSpec:
    """HyperCLOVA X SEED Think: Granite with norms on both sides, and logits multiplied."""
    head_dim = reader.count("hidden_size") // reader.count("num_attention_heads")
    return _granite(
        reader,
        placement="sandwich" if reader.flag("use_post_norm", True) else "pre",
        attention_scale=reader.number(
            "attention_multiplier", reader.count("head_dim", head_dim) ** -0.5
        ),
        logit_scale=reader.number("logits_scaling", 1.0),
        mlp_bias=reader.flag("mlp_bias"),
    )


def _granite(reader: ConfigReader, **fields: Any) -> DecoderSpec:
    bias = reader.flag("attention_bias")
    return read_decoder(
        reader,
        qkv_bias=bias,
        output_bias=bias,
        embedding_scale=reader.number("embedding_multiplier", 1.0),
        residual_scale=reader.number("residual_multiplier", 1.0),
        **{"attention_scale": reader.number("attention_multiplier", 1.0), **fields},
    )
