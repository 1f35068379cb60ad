"""GPT-2 and GPT-NeoX: layer norms, MLPs without a gate."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.shared import (
    num_layers,
    read_activation,
    read_decoder,
    read_dtype,
)
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec


def gpt2(reader: ConfigReader) -> DecoderSpec:
    """GPT-2: learned positions."""
    for key in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        reader.require(key, False)
    reader.require("scale_attn_weights", True)
    for key in ("reorder_and_upcast_attn", "summary_use_proj", "summary_proj_to_labels"):
        reader.flag(key)
    for key in ("attn_pdrop", "summary_first_dropout", "summary_type", "n_ctx"):
        reader.ignore(key)
    hidden_size, num_heads = reader.count("n_embd", 768), reader.count("n_head", 12)
    if hidden_size % num_heads:
        raise reader.error("n_head", f"must divide the {hidden_size} dimensions")
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.optional_count("n_inner") or 4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=reader.count("n_positions", 1024),
        norm=NormSpec(reader.number("layer_norm_epsilon", 1e-5), "layer", bias=True),
        rope=None,
        layers=(LayerSpec(),) * num_layers(reader, "n_layer"),
        activation=read_activation(reader, "activation_function", "gelu_new"),
        gated=False,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def gpt_neox(reader: ConfigReader) -> DecoderSpec:
    """GPT-NeoX and Pythia: rope on a quarter of the head, attention and MLP side by side."""
    reader.flag("is_decoder")
    reader.ignore("classifier_dropout")
    bias = reader.flag("attention_bias", True)
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("layer_norm_eps", 1e-5), "layer", bias=True),
        placement="parallel" if reader.flag("use_parallel_residual", True) else "pre",
        activation=read_activation(reader, "hidden_act", "gelu"),
        gated=False,
        theta=reader.number("rotary_emb_base", 10_000.0, above=1.0),
        partial=reader.number("rotary_pct", 0.25),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=True,
    )
