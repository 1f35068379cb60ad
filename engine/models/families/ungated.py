"""Models like Llama except for an MLP without a gate."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import num_layers, read_activation, read_decoder
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec


def apertus(reader: ConfigReader) -> DecoderSpec:
    """Apertus: xIELU, whose coefficients are learned, and QK norms."""
    reader.require("hidden_act", "xielu")
    reader.require("mlp_bias", False)
    reader.require("post_norm", False)
    reader.require("qk_norm", True)
    if "rope_parameters" not in reader and "rope_scaling" not in reader:
        raise reader.error("rope_parameters", "is missing")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        activation="xielu",
        gated=False,
        theta=12_000_000.0,
        max_positions=65_536,
        qk_norm=True,
        qkv_bias=(bias := reader.flag("attention_bias")),
        output_bias=bias,
    )


def arcee(reader: ConfigReader) -> DecoderSpec:
    """AFM-4.5B: squared ReLU."""
    bias = reader.flag("attention_bias")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-5)),
        activation=read_activation(reader, "hidden_act", "relu2", gated=False),
        gated=False,
        max_positions=4096,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


def nanochat(reader: ConfigReader) -> DecoderSpec:
    """nanochat: no norm has weights, also that of embeddings; queries and keys turn clockwise."""
    reader.require("tie_word_embeddings", False)  # the embeddings' norm becomes part of them
    reader.require("attention_bias", False)
    reader.set_defaults({"final_logit_softcapping": 15.0})  # null is none
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("rms_norm_eps", 1e-6), has_weight=False),
        activation=read_activation(reader, "hidden_act", "relu2", gated=False),
        gated=False,
        unit_qk_norm=True,
        logit_softcap=reader.optional_number("final_logit_softcapping"),
    )
    assert spec.rope is not None
    return dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, clockwise=True))


def nemotron(reader: ConfigReader) -> DecoderSpec:
    """Nemotron-4 and Minitron: layer norms stored less one, rope on part of the head."""
    bias = reader.flag("attention_bias")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("norm_eps", 1e-5), "layer", bias=True, offset=1.0),
        activation=read_activation(reader, "hidden_act", "relu2", gated=False),
        gated=False,
        partial=0.5,
        max_positions=4096,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias"),
    )


def jais2(reader: ConfigReader) -> DecoderSpec:
    """Jais 2: layer norms, squared ReLU and biases everywhere."""
    bias = reader.flag("attention_bias", True)
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("layer_norm_eps", 1e-5), "layer", bias=True),
        activation=read_activation(reader, "hidden_act", "relu2", gated=False),
        gated=False,
        max_positions=8192,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=reader.flag("mlp_bias", True),
    )


def starcoder2(reader: ConfigReader) -> DecoderSpec:
    """StarCoder2: layer norms, GELU and biases; in some, a window in all layers."""
    reader.require("scale_attn_weights", True)
    for key in ("residual_dropout", "embedding_dropout"):
        reader.ignore(key)
    bias, window = reader.flag("use_bias", True), reader.optional_count("sliding_window")
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("norm_epsilon", 1e-5), "layer", bias=True),
        activation=read_activation(reader, "hidden_act", "gelu_pytorch_tanh", gated=False),
        gated=False,
        tied=True,
        max_positions=4096,
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        layers=(LayerSpec(window),) * num_layers(reader),
    )


FAMILIES: dict[str, Family] = {
    "apertus": Family(apertus, "Apertus 8B and 70B", "ungated MLP with xIELU, QK norms"),
    "arcee": Family(arcee, "AFM-4.5B", "ungated MLP with squared ReLU"),
    "jais2": Family(jais2, "Jais 2", "layer norms, biases, ungated MLP with squared ReLU"),
    "nanochat": Family(
        nanochat,
        "nanochat d20 to d34",
        "norms without weights, also of embeddings, unit QK norms, rope by negative angles, "
        "ungated MLP with squared ReLU, capped logits",
    ),
    "nemotron": Family(
        nemotron,
        "Nemotron-4, Minitron",
        "layer norms, partial rope, ungated MLP with squared ReLU",
    ),
    "starcoder2": Family(
        starcoder2, "StarCoder2", "layer norms, biases, ungated MLP, windows in some"
    ),
}
