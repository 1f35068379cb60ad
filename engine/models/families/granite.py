"""Granite and HyperCLOVA X: four multipliers; Granite with experts, and with windows."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_rope
from engine.models.families.shared import (
    ignore_router_training,
    layer_types,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec


def granite(reader: ConfigReader) -> DecoderSpec:
    """Granite 3.x, dense."""
    return _granite(
        reader,
        mlp_bias=reader.flag("mlp_bias"),
        logit_scale=1.0 / reader.number("logits_scaling", 1.0),
    )


def granitemoe(reader: ConfigReader) -> DecoderSpec:
    """Granite 3.x with experts, stacked in one tensor; some have a shared expert."""
    ignore_router_training(reader)
    shared = reader.non_negative("shared_intermediate_size", 0)
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 8),
        top_k=reader.count("num_experts_per_tok", 2),
        intermediate_size=reader.count("intermediate_size"),
        normalised=True,  # a softmax over the chosen experts only is the same
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


def granite_swa(reader: ConfigReader) -> DecoderSpec:
    """Granite with sinks, windows in three layers of four, and a rope base of each layer's own."""
    layers, ropes = _windowed(reader)
    return dataclasses.replace(granite(reader), has_sinks=True, layers=layers, **ropes)


def granitemoe_swa(reader: ConfigReader) -> DecoderSpec:
    """Granite with sinks, windows and experts."""
    layers, ropes = _windowed(reader)
    layers = tuple(dataclasses.replace(layer, experts=True) for layer in layers)
    return dataclasses.replace(granitemoe(reader), has_sinks=True, layers=layers, **ropes)


def hyperclovax(reader: ConfigReader) -> DecoderSpec:
    """HyperCLOVA X SEED Think: Granite with sandwich norms and scaled logits."""
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


def _windowed(reader: ConfigReader) -> tuple[tuple[LayerSpec, ...], dict[str, RopeSpec]]:
    """Return the layers, and the one or two ropes that they choose from."""
    window, count = reader.optional_count("sliding_window"), num_layers(reader)
    kinds = layer_types(reader, count) or [
        "sliding_attention" if i % 4 else "full_attention" for i in range(count)
    ]
    hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    rope = read_rope(
        reader,
        theta=10_000.0,
        trained=reader.count("max_position_embeddings", 8192),
        head_dim=reader.count("head_dim", hidden_size // num_heads),
    )
    bases = reader.list_of_length("layer_rope_theta", count) or [rope.theta] * count
    if not all(type(base) in (int, float) and 0 <= base < 1e12 for base in bases):
        raise reader.error("layer_rope_theta", "must be a list of numbers, 0 for none")
    theta, *others = list(dict.fromkeys(base for base in bases if base)) or [rope.theta]
    if len(others) > 1:
        raise reader.error("layer_rope_theta", "has more than two bases, which is not supported")
    ropes = {"rope": dataclasses.replace(rope, theta=float(theta))}
    if others:
        ropes["local_rope"] = dataclasses.replace(rope, theta=float(others[0]))
    layers = (
        LayerSpec(
            window if kind == "sliding_attention" else None,
            rope=base != 0,
            local_rope=base in others,
        )
        for kind, base in zip(kinds, bases, strict=True)
    )
    return tuple(layers), ropes


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


FAMILIES: dict[str, Family] = {
    "granite": Family(granite, "Granite 3 and 4, dense", "four multipliers"),
    "granite_swa": Family(
        granite_swa,
        "Granite Swash, dense",
        "as `granite`; sinks, windows, a rope base per layer",
    ),
    "granitemoe": Family(granitemoe, "Granite 3 1B-A400M and 3B-A800M", "the same; experts"),
    "granitemoe_swa": Family(
        granitemoe_swa, "Granite Swash with experts", "as `granite_swa`; experts"
    ),
    "granitemoeshared": Family(
        granitemoe, "Granite with a shared expert", "the same; a shared expert"
    ),
    "hyperclovax": Family(
        hyperclovax,
        "HyperCLOVA X SEED Think",
        "as `granite`; norms before and after",
        has_remote_code=True,
    ),
}
