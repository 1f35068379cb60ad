"""Llama 4, text only: chunks, layers without rope, experts whose inputs are weighted."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import (
    ignore_router_training,
    num_layers,
    read_decoder,
    with_checked_experts,
)
from engine.models.spec import DecoderSpec, LayerSpec, MoeSpec, NormSpec, TemperatureSpec


def llama4_text(reader: ConfigReader) -> DecoderSpec:
    """Llama 4 Scout and Maverick."""
    ignore_router_training(reader)
    reader.ignore("for_llm_compressor")
    inner = reader.count("intermediate_size")
    moe = MoeSpec(
        num_experts=reader.count("num_local_experts", 16),
        top_k=reader.count("num_experts_per_tok", 1),
        intermediate_size=inner,
        normalised=False,
        scoring="sigmoid",
        apply_router_weight_on_input=True,
        shared_intermediate_size=inner,
        width_key="intermediate_size",
        shared_width_key="intermediate_size",
    )
    temperature = TemperatureSpec(
        reader.number("attn_scale", 0.1), reader.count("floor_scale", 8192)
    )
    is_tuned = reader.flag_or_number("attn_temperature_tuning", True)
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        theta=500_000.0,
        max_positions=131_072,
        interleaved=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        unit_qk_norm=reader.flag("use_qk_norm", True),
        temperature=temperature if is_tuned else None,
        layers=_layers(reader),
        moe=moe,
    )
    dense = reader.count("intermediate_size_mlp", 16_384)
    return with_checked_experts(reader, dataclasses.replace(spec, intermediate_size=dense))


def _layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return layers with rope and chunks except every fourth, and experts at a fixed interval."""
    count = num_layers(reader)
    interval = reader.count("no_rope_layer_interval", 4)
    rope = reader.list_of_length("no_rope_layers", count)  # 1: the layer has rope
    if rope is None:
        rope = [int((i + 1) % interval != 0) for i in range(count)]
    chunk = reader.optional_count("attention_chunk_size")
    kinds = reader.list_of_length("layer_types", count)
    if kinds is None:
        kinds = ["chunked_attention" if has_rope else "full_attention" for has_rope in rope]
    for kind in kinds:
        if kind not in ("chunked_attention", "full_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    step = reader.count("interleave_moe_layer_step", 1)
    experts = range(step - 1, count, step)
    if "moe_layers" in reader:
        experts = reader.indices("moe_layers")
    return tuple(
        LayerSpec(
            rope=bool(rope[i]),
            experts=i in experts,
            chunk=chunk if kinds[i] == "chunked_attention" else None,
        )
        for i in range(count)
    )


FAMILIES: dict[str, Family] = {
    "llama4_text": Family(
        llama4_text,
        "Llama 4, text model only",
        "chunked attention, layers without rope, unit QK norms, experts weigh their inputs",
    ),
}
