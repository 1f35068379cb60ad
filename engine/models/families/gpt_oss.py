"""GPT-OSS: sinks, windows in every other layer, experts with biases and a clamped SwiGLU."""

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
from engine.models.spec import ClampedSwiglu, DecoderSpec, LayerSpec, MoeSpec, NormSpec


def gpt_oss(reader: ConfigReader) -> DecoderSpec:
    """GPT-OSS 20B and 120B."""
    ignore_router_training(reader)
    reader.require("hidden_act", "silu")
    reader.ignore("initial_context_length")  # also in the rope section
    if "rope_parameters" not in reader and "rope_scaling" not in reader:
        raise reader.error("rope_parameters", "is missing")
    top_k = reader.count("num_experts_per_tok", 4)
    reader.require("experts_per_token", top_k)
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 128),
        top_k=top_k,
        intermediate_size=reader.count("intermediate_size"),
        width_key="intermediate_size",
        normalised=True,  # a softmax over the chosen experts only is the same
        biased=True,
    )
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=64,
        theta=150_000.0,
        max_positions=131_072,
        qkv_bias=(bias := reader.flag("attention_bias", True)),
        output_bias=bias,
        has_sinks=True,
        activation=ClampedSwiglu(
            reader.number("swiglu_alpha", 1.702), reader.number("swiglu_limit", 7.0)
        ),
        layers=_layers(reader),
        moe=moe,
    )
    return with_checked_experts(reader, spec)


def _layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return layers with windows in every other one from the first, or by ``layer_types``."""
    count = num_layers(reader)
    reader.set_defaults({"sliding_window": 128})  # null is none
    window = reader.optional_count("sliding_window")
    kinds = layer_types(reader, count) or [
        "full_attention" if i % 2 else "sliding_attention" for i in range(count)
    ]
    return tuple(
        LayerSpec(window if kind == "sliding_attention" else None, experts=True) for kind in kinds
    )


FAMILIES: dict[str, Family] = {
    "gpt_oss": Family(
        gpt_oss,
        "GPT-OSS 20B and 120B",
        "sinks, windows, biases, experts with a clamped SwiGLU",
    ),
}
