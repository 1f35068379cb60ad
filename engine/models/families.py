"""Family readers: a Hugging Face config becomes a DecoderSpec, or is refused by name.

A reader asks for the keys its family has. What is left over and not known to be harmless is an
error: a key that is ignored today is a wrong answer tomorrow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from engine.errors import ModelLoadError
from engine.models.config_reader import ConfigReader
from engine.models.spec import (
    DecoderSpec,
    DynamicScaling,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    RopeScaling,
    RopeSpec,
    YarnScaling,
)

_MAX_LAYERS = 10_000


def read_spec(config: dict[str, Any]) -> DecoderSpec:
    """The spec of a model from its parsed config.json.

    Raises:
        ModelLoadError: the architecture is not known, a value is out of range, or a key is not
            understood; one line that names it.
    """
    reader = ConfigReader(config)
    reader.refuse("auto_map", "asks for code from the model's directory, which is never run")
    reader.refuse("quantization_config", "is set: quantised checkpoints are not supported yet")
    model_type = reader.text("model_type", "")
    family = _FAMILIES.get(model_type)
    if family is None:
        known = ", ".join(sorted(_FAMILIES))
        raise ModelLoadError(
            f"config.json: architecture {model_type[:80]!r} is not supported (known: {known})"
        )
    spec = family(reader)
    reader.finish()
    return spec


def _llama(reader: ConfigReader) -> DecoderSpec:
    reader.require("rope_interleaved", False)
    return _decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


def _mistral(reader: ConfigReader) -> DecoderSpec:
    window = reader.optional_count("sliding_window")
    return _decoder(reader, layers=lambda count: (LayerSpec(window=window),) * count)


def _qwen2(reader: ConfigReader) -> DecoderSpec:
    reader.require("use_mrope", False)
    return _decoder(reader, qkv_bias=True, layers=lambda count: _windowed_layers(reader, count))


def _qwen3(reader: ConfigReader) -> DecoderSpec:
    return _decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        qk_norm=True,
        head_dim=128,
        layers=lambda count: _windowed_layers(reader, count),
    )


def _smollm3(reader: ConfigReader) -> DecoderSpec:
    return _decoder(
        reader,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
        tied=True,
        theta=2_000_000.0,
        layers=lambda count: _smollm3_layers(reader, count),
    )


_FAMILIES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "llama": _llama,  # Llama 2 and 3.x, SmolLM 1 and 2
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "smollm3": _smollm3,
}


# ------------------------------------------------------------------------- shared parts


def _decoder(
    reader: ConfigReader,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    tied: bool = False,
    head_dim: int | None = None,
    theta: float = 10_000.0,
    layers: Callable[[int], tuple[LayerSpec, ...]] | None = None,
) -> DecoderSpec:
    """What all families share; ``tied``, ``head_dim`` and ``theta`` are the family's defaults."""
    reader.require("hidden_act", "silu")
    hidden_size = reader.count("hidden_size")
    num_heads = reader.count("num_attention_heads")
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide the {num_heads} attention heads")
    head_dim = reader.count("head_dim", head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise reader.error("head_dim", f"must be even for rotary positions, not {head_dim}")
    num_layers = reader.count("num_hidden_layers", limit=_MAX_LAYERS)
    trained = reader.count("max_position_embeddings", 2048)
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=trained,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        rope=_rope(reader, theta, trained, head_dim),
        layers=layers(num_layers) if layers else (LayerSpec(),) * num_layers,
        tie_word_embeddings=reader.flag("tie_word_embeddings", tied),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        mlp_bias=mlp_bias,
        qk_norm=qk_norm,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=_dtype(reader),
    )


def _dtype(reader: ConfigReader) -> str | None:
    """``dtype``, or ``torch_dtype`` as it was called before transformers 5."""
    older = reader.text("torch_dtype", "")
    return reader.text("dtype", older) or None


def _windowed_layers(reader: ConfigReader, count: int) -> tuple[LayerSpec, ...]:
    """Qwen: a window in the layers from ``max_window_layers`` on, or as ``layer_types`` says."""
    window = reader.optional_count("sliding_window")
    first_windowed = reader.optional_count("max_window_layers") or 0
    if not reader.flag("use_sliding_window"):
        window = None
    kinds = _layer_types(reader, count)
    if kinds is None:
        kinds = [
            "sliding_attention" if i >= first_windowed else "full_attention" for i in range(count)
        ]
    return tuple(LayerSpec(window if kind == "sliding_attention" else None) for kind in kinds)


def _smollm3_layers(reader: ConfigReader, count: int) -> tuple[LayerSpec, ...]:
    """No position embedding in every fourth layer; where windows are used, only in those."""
    reader.optional_count("max_window_layers")  # written by Qwen's exporter, and without effect
    interval = reader.count("no_rope_layer_interval", 4)
    rope = reader.listed("no_rope_layers", count)  # 1: the layer has rope
    if rope is None:
        rope = [int((i + 1) % interval != 0) for i in range(count)]
    window = reader.optional_count("sliding_window")
    if not reader.flag("use_sliding_window"):
        window = None
    kinds = _layer_types(reader, count)
    if kinds is None:
        kinds = ["full_attention" if has_rope else "sliding_attention" for has_rope in rope]
    return tuple(
        LayerSpec(window if kind == "sliding_attention" else None, bool(has_rope))
        for kind, has_rope in zip(kinds, rope, strict=True)
    )


def _layer_types(reader: ConfigReader, count: int) -> list[str] | None:
    kinds = reader.listed("layer_types", count)
    for kind in kinds or ():
        if kind not in ("full_attention", "sliding_attention"):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    return kinds


def _rope(reader: ConfigReader, theta: float, trained: int, head_dim: int) -> RopeSpec:
    """Both spellings: ``rope_parameters`` (transformers 5), ``rope_theta`` + ``rope_scaling``."""
    reader.require("partial_rotary_factor", 1.0)
    theta = reader.number("rope_theta", theta, above=1.0)
    original = reader.count("original_max_position_embeddings", trained)
    older, newer = reader.section("rope_scaling"), reader.section("rope_parameters")
    section = newer or older
    if section is None:
        return RopeSpec(theta)
    theta = section.number("rope_theta", theta, above=1.0)
    section.require("partial_rotary_factor", 1.0)
    kind = section.text("type", "default")
    kind = section.text("rope_type", kind)
    if kind == "default":
        section.finish()
        return RopeSpec(theta)
    read = _SCALINGS.get(kind)
    if read is None:
        known = ", ".join(("default", *sorted(_SCALINGS)))
        raise section.error("rope_type", f"is {kind[:80]!r}; known: {known}")
    scaling = read(section, trained, original)
    section.finish()
    if isinstance(scaling, LongRopeScaling):
        for name in ("short_factor", "long_factor"):
            if len(getattr(scaling, name)) != head_dim // 2:
                raise section.error(name, f"must have {head_dim // 2} entries")
    return RopeSpec(theta, scaling)


def _factor(section: ConfigReader, default: float | None = None) -> float:
    """By how much the context is stretched."""
    factor = section.number("factor", default)
    if factor < 1.0:
        raise section.error("factor", f"must be at least 1, not {factor:g}")
    return factor


def _linear(section: ConfigReader, trained: int, original: int) -> LinearScaling:
    return LinearScaling(_factor(section))


def _dynamic(section: ConfigReader, trained: int, original: int) -> DynamicScaling:
    return DynamicScaling(_factor(section))


def _llama3(section: ConfigReader, trained: int, original: int) -> Llama3Scaling:
    scaling = Llama3Scaling(
        factor=_factor(section),
        low_freq_factor=section.number("low_freq_factor"),
        high_freq_factor=section.number("high_freq_factor"),
        original_max_position_embeddings=section.count(
            "original_max_position_embeddings", original
        ),
    )
    if scaling.high_freq_factor <= scaling.low_freq_factor:
        raise section.error("high_freq_factor", "must be above low_freq_factor")
    return scaling


def _yarn(section: ConfigReader, trained: int, original: int) -> YarnScaling:
    original = section.count("original_max_position_embeddings", original)
    factor = _factor(section, trained / original)
    mscale = section.optional_number("mscale")
    mscale_all_dim = section.optional_number("mscale_all_dim")
    attention_factor = _yarn_mscale(factor, 1.0)
    if mscale and mscale_all_dim:
        attention_factor = _yarn_mscale(factor, mscale) / _yarn_mscale(factor, mscale_all_dim)
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", attention_factor),
        beta_fast=section.number("beta_fast", 32.0),
        beta_slow=section.number("beta_slow", 1.0),
        truncate=section.flag("truncate", True),
    )


def _yarn_mscale(factor: float, mscale: float) -> float:
    """Attention temperature of YaRN's equation 22: ``0.1 m ln(factor) + 1``."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(section: ConfigReader, trained: int, original: int) -> LongRopeScaling:
    original = section.count("original_max_position_embeddings", original)
    if original == 1:
        raise section.error("original_max_position_embeddings", "must be above 1")
    factor = _factor(section, trained / original)
    scale = 1.0
    if factor > 1.0:
        scale = math.sqrt(1.0 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factor=section.numbers("short_factor"),
        long_factor=section.numbers("long_factor"),
        original_max_position_embeddings=original,
        attention_factor=section.number("attention_factor", scale),
    )


_SCALINGS: dict[str, Callable[[ConfigReader, int, int], RopeScaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "su": _longrope,  # the name longrope had at first
}
