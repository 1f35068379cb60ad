"""Llama, and models that differ from it in a few places."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import (
    TEMPERATURE_ROPE_KEYS,
    alternating_layers,
    layer_types,
    num_layers,
    read_decoder,
    read_temperature,
)
from engine.models.rope_spec import MropeSpec
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec


def llama(reader: ConfigReader) -> DecoderSpec:
    """Llama 2 and 3.x, SmolLM 1 and 2, and many others exported as Llama."""
    reader.require("rope_interleaved", False)
    return read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


def mistral(reader: ConfigReader) -> DecoderSpec:
    """Mistral 7B and later: a window in all layers or none."""
    reader.set_defaults({"sliding_window": 4096})  # null is none
    window = reader.optional_count("sliding_window")
    return read_decoder(reader, layers=(LayerSpec(window=window),) * num_layers(reader))


def ministral(reader: ConfigReader) -> DecoderSpec:
    """Ministral 8B: windows in the layers that ``layer_types`` names."""
    reader.set_defaults({"sliding_window": 4096})  # null is none
    window = reader.optional_count("sliding_window")
    kinds = alternating_layers(reader, window=window, period=num_layers(reader) + 1)
    return read_decoder(reader, layers=windowed(kinds, window))


def ministral3(reader: ConfigReader) -> DecoderSpec:
    """Ministral 3: no windows, and a query factor that grows with the position."""
    window = reader.optional_count("sliding_window")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        layers=(LayerSpec(window=window),) * num_layers(reader),
        rope_extra_keys=TEMPERATURE_ROPE_KEYS,
        temperature=read_temperature(reader),
    )


def seed_oss(reader: ConfigReader) -> DecoderSpec:
    """Seed-OSS: biases on queries, keys and values."""
    reader.ignore("residual_dropout")
    return read_decoder(
        reader,
        head_dim=128,
        qkv_bias=reader.flag("attention_bias", True),
        output_bias=reader.flag("attention_out_bias"),
        mlp_bias=reader.flag("mlp_bias"),
    )


def internlm3(reader: ConfigReader) -> DecoderSpec:
    """InternLM3, whose biases have different keys in older exports."""
    bias = reader.flag("bias", reader.flag("mlp_bias"))
    qkv_bias = reader.flag("qkv_bias", reader.flag("attention_bias"))
    if bias != qkv_bias:
        raise reader.error("qkv_bias", "differs from 'bias', which is not supported")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        max_positions=32_768,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
    )


def iquestcoder(reader: ConfigReader) -> DecoderSpec:
    """IQuest-Coder, without the other variant's loop."""
    reader.refuse("clip_qkv", "is set, which is not supported")
    reader.refuse("use_sliding_window", "is true, which is not supported")
    for key in ("sliding_window", "max_window_layers"):
        reader.ignore(key)
    return llama(reader)


def exaone4(reader: ConfigReader) -> DecoderSpec:
    """EXAONE 4.0: post-norm; if there are windows, only windowed layers have rope."""
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        placement="post",
        qk_norm=True,
        layers=exaone_layers(reader),
    )


def cwm(reader: ConfigReader) -> DecoderSpec:
    """Code World Model 32B: Llama 3 with windows in three layers of four, not in the first."""
    window, count = reader.optional_count("sliding_window"), num_layers(reader)
    kinds = layer_types(reader, count) or [
        "sliding_attention" if i % 4 else "full_attention" for i in range(count)
    ]
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        head_dim=128,
        theta=1_000_000.0,
        mlp_bias=reader.flag("mlp_bias"),
        layers=windowed(kinds, window),
    )


def helium(reader: ConfigReader) -> DecoderSpec:
    """Helium: interleaved rope."""
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-8)),
        head_dim=128,
        theta=100_000.0,
        interleaved=True,
        max_positions=4096,
        qkv_bias=reader.flag("attention_bias"),
        mlp_bias=reader.flag("mlp_bias"),
    )


def qwen2(reader: ConfigReader, *, mrope: MropeSpec | None = None) -> DecoderSpec:
    """Qwen2 and Qwen2.5."""
    reader.require("use_mrope", False)
    layers = windowed_layers(reader)
    return read_decoder(reader, qkv_bias=True, layers=layers, mrope=mrope)


def qwen3(reader: ConfigReader, *, mrope: MropeSpec | None = None) -> DecoderSpec:
    """Qwen3, dense."""
    return read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        head_dim=128,
        layers=windowed_layers(reader),
        mrope=mrope,
    )


def smollm3(reader: ConfigReader) -> DecoderSpec:
    """SmolLM3: no position embedding in every fourth layer."""
    return read_decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        tied=True,
        theta=2_000_000.0,
        layers=_smollm3_layers(reader),
    )


def phi3(reader: ConfigReader) -> DecoderSpec:
    """Phi-3, Phi-3.5 and Phi-4: fused projections, and in some rope on part of the head."""
    window = reader.optional_count("sliding_window")
    if window is not None and window >= reader.count("max_position_embeddings", 4096):
        window = None  # as in some published ones: no text is longer
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        max_positions=4096,
        qkv_bias=False,
        layers=(LayerSpec(window=window),) * num_layers(reader),
    )


def stablelm(reader: ConfigReader) -> DecoderSpec:
    """StableLM 2 and StableLM 3B: layer norms, rope on a quarter of the head.

    The 12B norms each head's query and key, too. Its norms have no biases as published; copies that
    Hugging Face's code has saved have some.
    """
    is_parallel, norms_heads = reader.flag("use_parallel_residual"), reader.flag("qk_layernorm")
    reader.ignore("use_norm_bias")
    reader.require("rotary_scaling_factor", 1.0)
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("layer_norm_eps", 1e-5), "layer", bias=True),
        optional=("norm_biases",),
        qk_layer_norm=norms_heads,
        separate_head_norms=norms_heads,
        placement="parallel" if is_parallel else "pre",
        shared_norm=is_parallel,
        qkv_bias=reader.flag("use_qkv_bias"),
        partial=0.25,
        max_positions=4096,
    )


def exaone_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return EXAONE's layers: windows and rope in three of four; without windows, rope in all."""
    window = reader.optional_count("sliding_window")
    reader.ignore("sliding_window_pattern")  # "LLLG" in some: windows in three of four
    kinds = alternating_layers(reader, window=window, period=4)
    return tuple(
        LayerSpec(window) if kind == "sliding_attention" else LayerSpec(rope=window is None)
        for kind in kinds
    )


def windowed_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return Qwen's layers: windows from ``max_window_layers`` on, or as ``layer_types`` says."""
    count = num_layers(reader)
    first_windowed = reader.non_negative("max_window_layers", 28)
    window = None
    if reader.flag("use_sliding_window"):
        window = reader.optional_count("sliding_window")
    else:
        reader.ignore("sliding_window")  # 0 in some
    kinds = layer_types(reader, count)
    if kinds is None:
        kinds = [
            "sliding_attention" if i >= first_windowed else "full_attention" for i in range(count)
        ]
    return windowed(kinds, window)


def windowed(kinds: list[str], window: int | None) -> tuple[LayerSpec, ...]:
    """Return layers that differ only in their window, by ``layer_types``."""
    return tuple(LayerSpec(window if kind == "sliding_attention" else None) for kind in kinds)


def _smollm3_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return layers without rope in every fourth one; windows, if used, are only in those."""
    count = num_layers(reader)
    reader.optional_count("max_window_layers")  # from Qwen's exporter; no effect
    interval = reader.count("no_rope_layer_interval", 4)
    rope = reader.list_of_length("no_rope_layers", count)  # 1: the layer has rope
    if rope is None:
        rope = [int((i + 1) % interval != 0) for i in range(count)]
    window = reader.optional_count("sliding_window")
    if not reader.flag("use_sliding_window"):
        window = None
    kinds = layer_types(reader, count)
    if kinds is None:
        kinds = ["full_attention" if has_rope else "sliding_attention" for has_rope in rope]
    return tuple(
        LayerSpec(window if kind == "sliding_attention" else None, bool(has_rope))
        for kind, has_rope in zip(kinds, rope, strict=True)
    )


FAMILIES: dict[str, Family] = {
    "cwm": Family(cwm, "Code World Model 32B", "windows in three layers of four"),
    "exaone4": Family(
        exaone4,
        "EXAONE 4.0",
        "norms after attention and MLP, QK norms; windows, no rope in full-attention layers",
    ),
    "helium": Family(helium, "Helium 1", "interleaved rope"),
    "internlm3": Family(internlm3, "InternLM3", "biases in some", has_remote_code=True),
    "iquestcoder": Family(iquestcoder, "IQuest-Coder V1", "", has_remote_code=True),
    "llama": Family(llama, "Llama 2 and 3.x, SmolLM 1 and 2, Yi, many more", ""),
    "ministral": Family(ministral, "Ministral 8B", "windows"),
    "ministral3": Family(
        ministral3, "Ministral 3, text model only", "queries that grow with position"
    ),
    "mistral": Family(mistral, "Mistral, Ministral", "windows in some"),
    "phi3": Family(
        phi3,
        "Phi-3, Phi-3.5, Phi-4",
        "windows, LongRoPE, partial rope in some",
        has_remote_code=True,
    ),
    "qwen2": Family(qwen2, "Qwen2, Qwen2.5", "biases, windows in some"),
    "qwen3": Family(qwen3, "Qwen3, dense", "QK norms"),
    "seed_oss": Family(seed_oss, "Seed-OSS", "biases"),
    "smollm3": Family(smollm3, "SmolLM3", "no rope in every fourth layer"),
    "stablelm": Family(
        stablelm,
        "StableLM",
        "layer norms, partial rope, QK layer norms in the 12B",
        has_remote_code=True,
    ),
}
