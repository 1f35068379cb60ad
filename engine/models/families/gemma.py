"""Gemma: scaled embeddings, norms with weights stored less one, tanh GELU."""

from __future__ import annotations

import dataclasses
from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import layer_types, num_layers, read_activation, read_decoder
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec


def gemma(reader: ConfigReader) -> DecoderSpec:
    """Gemma 1."""
    reader.text("hidden_act", "gelu_pytorch_tanh")  # older exports' gelu means tanh GELU
    return _gemma(reader, head_dim=256)


def gemma2(reader: ConfigReader) -> DecoderSpec:
    """Gemma 2: sandwich norms, windows in every other layer, soft-capped scores."""
    reader.set_defaults({"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0})
    return _gemma2(
        reader,
        head_dim=256,
        layers=_layers(reader, period=2),
        attention_softcap=reader.optional_number("attn_logit_softcapping"),
        logit_softcap=reader.optional_number("final_logit_softcapping"),
    )


def vaultgemma(reader: ConfigReader) -> DecoderSpec:
    """VaultGemma 1B: Gemma 2 without norms after attention and MLP."""
    return dataclasses.replace(gemma2(reader), placement="pre")


def gemma3(reader: ConfigReader) -> DecoderSpec:
    """Gemma 3's text model: five windowed layers with their own rope to each full one."""
    full, local = read_ropes_by_layer(
        reader,
        theta=1_000_000.0,
        local_theta=10_000.0,
        trained=reader.count("max_position_embeddings", 131_072),
        head_dim=reader.count("head_dim", 256),
    )
    reader.refuse("attn_logit_softcapping", "is set, which is not supported")
    return _gemma2(
        reader,
        head_dim=256,
        layers=_layers(reader, period=6, local_rope=True),
        rope=full,
        local_rope=local,
        qk_norm=True,
        logit_softcap=reader.optional_number("final_logit_softcapping"),
        max_positions=131_072,
    )


def _gemma2(reader: ConfigReader, **fields: Any) -> DecoderSpec:
    scalar = reader.number("query_pre_attn_scalar", 256.0)
    return _gemma(reader, placement="sandwich", attention_scale=scalar**-0.5, **fields)


def _gemma(reader: ConfigReader, **fields: Any) -> DecoderSpec:
    reader.refuse("use_bidirectional_attention", "is true: an encoder, which is not supported")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-6), offset=1.0),
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        embedding_scale=reader.count("hidden_size") ** 0.5,
        tied=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
        **{"max_positions": 8192, **fields},
    )


def _layers(
    reader: ConfigReader, *, period: int, local_rope: bool = False
) -> tuple[LayerSpec, ...]:
    """Return layers of which every ``period``-th has full attention, or as ``layer_types`` says."""
    count = num_layers(reader)
    window = reader.count("sliding_window", 4096)
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        period = reader.count(key, period)
    kinds = layer_types(reader, count) or [
        "full_attention" if (i + 1) % period == 0 else "sliding_attention" for i in range(count)
    ]
    return tuple(
        LayerSpec(window, local_rope=local_rope) if kind == "sliding_attention" else LayerSpec()
        for kind in kinds
    )


FAMILIES: dict[str, Family] = {
    "gemma": Family(gemma, "Gemma 1", "scaled embeddings, GELU"),
    "gemma2": Family(
        gemma2, "Gemma 2", "norms before and after, windows, capped scores and logits"
    ),
    "gemma3_text": Family(
        gemma3, "Gemma 3, text", "norms before and after, windows with their own rope"
    ),
    "vaultgemma": Family(vaultgemma, "VaultGemma 1B", "as `gemma2`; norms before only"),
}
