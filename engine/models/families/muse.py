"""Muse Glimmer's text model; its encoder is not read."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.multimodal import text_part
from engine.models.families.shared import layer_types, num_layers, read_activation, read_decoder
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec

_SEEN = ("video_token_id", "out_hidden_size", "projector_hidden_size", "projector_hidden_act")


def muse_glimmer(reader: ConfigReader) -> DecoderSpec:
    """Muse Glimmer 30B."""

    def read(text: ConfigReader) -> DecoderSpec:
        text.require("model_type", "muse_glimmer_text")
        text.set_defaults({"model_type": "muse_glimmer_text"})
        return muse_glimmer_text(text)

    if "text_config" not in reader:
        raise reader.error("text_config", "is missing")
    spec = text_part(reader, read, _SEEN)
    return dataclasses.replace(_untied(reader, spec), naming="outer/muse_glimmer_text")


def muse_glimmer_text(reader: ConfigReader) -> DecoderSpec:
    """Its text model: norms on all sides, of embeddings, too; gated attention."""
    reader.require("attention_bias", False)
    eps, head_dim = reader.number("rms_norm_eps", 1e-5), reader.count("head_dim", 128)
    layers, bases = _layers(reader)
    spec = read_decoder(
        reader,
        norm=NormSpec(
            eps, offset=1.0, final_offset=0.0, output_eps=reader.number("post_norm_eps", 1e-8)
        ),
        head_dim=head_dim,
        max_positions=131_072,
        placement="sandwich",
        activation=read_activation(reader, "hidden_activation", "silu"),
        attention_gate=True,
        separate_gates=True,
        unit_qk_norm=True,
        unit_qk_norm_without_rope=True,
        attention_scale=head_dim**-0.5 * reader.number("qk_scale_factor", 3.87),
        logit_scale=reader.number("output_multiplier", 0.19611613513818404),
        logit_softcap=reader.number("final_logit_softcapping", 20.0),
        layers=layers,
    )
    assert spec.rope is not None
    if bases - {0, spec.rope.theta}:
        raise reader.error("layer_rope_theta", "has a base other than that of 'rope_parameters'")
    return _untied(reader, spec)


def _untied(reader: ConfigReader, spec: DecoderSpec) -> DecoderSpec:
    if spec.tie_word_embeddings:
        raise reader.error("tie_word_embeddings", "is true: the head would be normed, too")
    return spec


def _layers(reader: ConfigReader) -> tuple[tuple[LayerSpec, ...], set[float]]:
    """Return the layers, of which every fourth from the last has full attention and no rope, or as
    the config says; and the bases of their ropes, 0 for none."""
    count, window = num_layers(reader), reader.count("sliding_window", 2048)
    is_full = [(count - 1 - i) % 4 == 0 for i in range(count)]
    kinds = layer_types(reader, count) or [
        "full_attention" if full else "sliding_attention" for full in is_full
    ]
    given = reader.list_of_length("layer_rope_theta", count)
    bases = [0.0 if full else 1.0 for full in is_full] if given is None else given
    if not all(type(base) in (int, float) for base in bases):
        raise reader.error("layer_rope_theta", "must be a list of numbers, 0 for none")
    layers = (
        LayerSpec(window if kind == "sliding_attention" else None, rope=base != 0)
        for kind, base in zip(kinds, bases, strict=True)
    )
    return tuple(layers), set() if given is None else set(bases)


_DIFFERENCES = (
    "norms before and after, also of embeddings, unit QK norms, gated attention, windows, no rope "
    "in full-attention layers, scaled and capped logits"
)
FAMILIES: dict[str, Family] = {
    "muse_glimmer": Family(muse_glimmer, "Muse Glimmer 30B", "as `muse_glimmer_text`; text only"),
    "muse_glimmer_text": Family(muse_glimmer_text, "Muse Glimmer, text model only", _DIFFERENCES),
}
