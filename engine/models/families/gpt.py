"""GPT-2, GPT-Neo, GPT-J, GPT-NeoX, GPT-BigCode, CodeGen, OPT: layer norms, MLPs without a gate."""

from __future__ import annotations

import dataclasses

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import (
    num_layers,
    read_activation,
    read_decoder,
    read_dtype,
)
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec

# Keys of the code that StarCoder was published with.
_RUNNER = ("inference_runner", "max_batch_size", "pre_allocate_kv_cache", "validate_runner_input")


def gpt2(reader: ConfigReader) -> DecoderSpec:
    """GPT-2: learned positions."""
    reader.require("scale_attn_by_inverse_layer_idx", False)
    reader.flag("reorder_and_upcast_attn")
    return _gpt2(reader, "gelu_new")


def gpt_bigcode(reader: ConfigReader) -> DecoderSpec:
    """StarCoder and SantaCoder: GPT-2 with one key and value head for all queries."""
    for key in ("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32"):
        reader.flag(key)  # only affects rounding
    for key in _RUNNER:
        reader.ignore(key)
    spec = _gpt2(reader, "gelu_pytorch_tanh")
    if not reader.flag("multi_query", True):
        reader.require("num_key_value_heads", spec.num_heads)
        return dataclasses.replace(spec, naming="gpt_bigcode_by_head")
    reader.require("num_key_value_heads", 1)
    return dataclasses.replace(spec, num_kv_heads=1)


def opt(reader: ConfigReader) -> DecoderSpec:
    """OPT: learned positions, ReLU. OPT-350M (post-norm, narrow embeddings) is refused."""
    for key, value in (("do_layer_norm_before", True), ("_remove_final_layer_norm", False)):
        reader.require(key, value)
    reader.require("layer_norm_elementwise_affine", True)
    for key in ("activation_dropout", "dropout", "init_std", "layerdrop"):
        reader.ignore(key)
    hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    reader.require("word_embed_proj_dim", hidden_size)
    if hidden_size % num_heads:
        raise reader.error("num_attention_heads", f"must divide the {hidden_size} dimensions")
    bias = reader.flag("enable_bias", True)
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("ffn_dim"),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=reader.count("max_position_embeddings", 2048),
        norm=NormSpec(1e-5, "layer", bias=True),
        rope=None,
        layers=(LayerSpec(),) * num_layers(reader),
        activation=read_activation(reader, "activation_function", "relu", gated=False),
        gated=False,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def gptj(reader: ConfigReader) -> DecoderSpec:
    """GPT-J: interleaved rope on a part of the head, attention and MLP on one norm."""
    reader.require("rotary", True)
    reader.ignore("gradient_checkpointing")
    spec = _gpt2(reader, "gelu_new")
    turned = reader.count("rotary_dim", 64)
    if turned > spec.head_dim or turned % 2:
        raise reader.error("rotary_dim", f"must be an even part of {spec.head_dim} dimensions")
    num_dims = None if turned == spec.head_dim else turned
    return dataclasses.replace(
        spec,
        rope=RopeSpec(10_000.0, None, num_dims, interleaved=True),
        placement="parallel",
        shared_norm=True,
        qkv_bias=False,
        output_bias=False,
        head_bias=True,
        tie_word_embeddings=reader.flag("tie_word_embeddings"),
    )


def codegen(reader: ConfigReader) -> DecoderSpec:
    """CodeGen: GPT-J with one projection for queries, keys and values."""
    spec = gptj(reader)
    if spec.num_heads % 4:
        raise reader.error("n_head", "must be divisible by 4, as the projection is stored")
    return spec


def gpt_neo(reader: ConfigReader) -> DecoderSpec:
    """GPT-Neo: learned positions, windows in every other layer, scores that are not scaled."""
    for key in ("attention_layers", "gradient_checkpointing"):  # the former: types, written out
        reader.ignore(key)
    for key in ("classifier_dropout", "embed_dropout", "resid_dropout"):
        reader.ignore(key)
    _ignore_summary(reader)
    hidden_size, num_heads = reader.count("hidden_size", 2048), reader.count("num_heads", 16)
    if hidden_size % num_heads:
        raise reader.error("num_heads", f"must divide the {hidden_size} dimensions")
    return DecoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.optional_count("intermediate_size") or 4 * hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=hidden_size // num_heads,
        max_position_embeddings=reader.count("max_position_embeddings", 2048),
        norm=NormSpec(reader.number("layer_norm_epsilon", 1e-5), "layer", bias=True),
        rope=None,
        layers=_neo_layers(reader),
        activation=read_activation(reader, "activation_function", "gelu_new"),
        gated=False,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        attention_scale=1.0,
        output_bias=True,
        mlp_bias=True,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def _neo_layers(reader: ConfigReader) -> tuple[LayerSpec, ...]:
    """Return the layers of ``attention_types``, such as [[["global", "local"], 12]]."""
    count, window = num_layers(reader, "num_layers"), reader.count("window_size", 256)
    runs = reader.entries("attention_types") or [[["global", "local"], 12]]
    windows = {"global": None, "local": window}
    kinds: list[str] = []
    for run in runs:
        match run:
            # Names are compared, not hashed: a config may hold anything.
            case [list(names), int(times)] if 0 <= times <= count and all(
                name in tuple(windows) for name in names
            ):
                kinds += names * times
            case _:
                raise reader.error("attention_types", f"has {run!r:.80}, which is not supported")
    if len(kinds) != count:
        raise reader.error("attention_types", f"has {len(kinds)} layers, not {count}")
    return tuple(LayerSpec(windows[kind]) for kind in kinds)


def gpt_neox(reader: ConfigReader) -> DecoderSpec:
    """GPT-NeoX and Pythia: rope on a quarter of the head, parallel attention and MLP."""
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


def _gpt2(reader: ConfigReader, activation: str) -> DecoderSpec:
    reader.require("add_cross_attention", False)
    reader.require("scale_attn_weights", True)
    _ignore_summary(reader)
    for key in ("attn_pdrop", "n_ctx"):
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
        activation=read_activation(reader, "activation_function", activation),
        gated=False,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def _ignore_summary(reader: ConfigReader) -> None:
    """Ignore the keys of heads for other tasks."""
    for key in ("summary_use_proj", "summary_proj_to_labels"):
        reader.flag(key)
    for key in ("summary_first_dropout", "summary_type", "summary_activation"):
        reader.ignore(key)


FAMILIES: dict[str, Family] = {
    "codegen": Family(codegen, "CodeGen 350M to 16B; not CodeGen2", "as `gptj`"),
    "gpt2": Family(gpt2, "GPT-2", "learned positions, layer norms, ungated MLP"),
    "gpt_bigcode": Family(gpt_bigcode, "StarCoder, SantaCoder", "as `gpt2`; multi-query attention"),
    "gpt_neo": Family(
        gpt_neo,
        "GPT-Neo 125M to 2.7B",
        "learned positions, layer norms, ungated MLP, windows in every other layer",
    ),
    "gpt_neox": Family(gpt_neox, "GPT-NeoX, Pythia", "layer norms, partial rope, ungated MLP"),
    "gptj": Family(
        gptj,
        "GPT-J 6B",
        "layer norms, parallel attention and ungated MLP, interleaved partial rope",
    ),
    "opt": Family(
        opt,
        "OPT, except 350M",
        "learned positions, layer norms, biases, ungated MLP with ReLU",
    ),
}
