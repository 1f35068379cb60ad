"""Phi-1 and 2: attention and MLP on one norm. Phi-3.5-MoE: experts chosen by SparseMixer."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_rope
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_activation,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import LongRopeScaling, RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec

_MSCALES = ("short_mscale", "long_mscale")


def phi(reader: ConfigReader) -> DecoderSpec:
    """Phi-1, Phi-1.5 and Phi-2: layer norms, biases, partial rope, ungated MLP."""
    reader.refuse("qk_layernorm", "is true, which is not supported")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("layer_norm_eps", 1e-5), "layer", bias=True),
        placement="parallel",
        shared_norm=True,
        partial=0.5,
        activation=read_activation(reader, "hidden_act", "gelu_new", gated=False),
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        head_bias=True,
    )


def phimoe(reader: ConfigReader) -> DecoderSpec:
    """Phi-3.5-MoE and Phi-mini-MoE: two experts, each weighted among those near it."""
    jitter = reader.non_negative_number("router_jitter_noise", 0.01)
    ignore_router_training(reader)
    reader.ignore("input_jitter_noise")
    reader.require("num_experts_per_tok", 2)
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 16),
        top_k=2,
        intermediate_size=reader.count("intermediate_size", 6400),
        normalised=False,
        scoring="sparse_mixer",
        margin=2 * jitter,
        width_key="intermediate_size",
    )
    hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    trained = reader.count("max_position_embeddings", 131_072)
    window, bias = reader.optional_count("sliding_window"), reader.flag("attention_bias")
    if window is not None and window >= trained:
        window = None  # as published: no text is longer
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5), "layer", bias=True),
        max_positions=131_072,
        intermediate_size=6400,
        rope=_rope(reader, trained, reader.count("head_dim", hidden_size // num_heads)),
        qkv_bias=bias,
        output_bias=bias,
        head_bias=reader.flag("lm_head_bias"),
        layers=(LayerSpec(window=window, experts=True),) * num_layers(reader),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def _rope(reader: ConfigReader, trained: int, head_dim: int) -> RopeSpec:
    """Read LongRoPE whose factors of the scores are given, one for each set of frequencies."""
    rope = read_rope(
        reader, theta=1_000_000.0, trained=trained, head_dim=head_dim, extra_keys=_MSCALES
    )
    if rope.scaling is None:
        return rope
    section = reader.section("rope_parameters") or reader.section("rope_scaling")
    assert section is not None
    if not isinstance(rope.scaling, LongRopeScaling):
        raise section.error("rope_type", "is not 'longrope', which is not supported here")
    short, long = (section.number(key) for key in _MSCALES)
    scaling = dataclasses.replace(rope.scaling, attention_factor=short, long_attention_factor=long)
    return dataclasses.replace(rope, scaling=scaling)


FAMILIES: dict[str, Family] = {
    "phi": Family(
        phi,
        "Phi-1, Phi-1.5, Phi-2",
        "layer norms, parallel attention and ungated MLP, biases, partial rope",
        has_remote_code=True,
    ),
    "phimoe": Family(
        phimoe,
        "Phi-3.5-MoE, Phi-mini-MoE, Phi-tiny-MoE",
        "layer norms, biases, LongRoPE in some, experts by SparseMixer",
        has_remote_code=True,
    ),
}
