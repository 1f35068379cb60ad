"""BLOOM and MPT: scores that fall with distance (ALiBi, Press et al. 2022) tell positions."""

from __future__ import annotations

import math

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.shared import num_layers, read_decoder, set_aliases
from engine.models.rope_spec import RopeSpec
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec

_NO_ROPE = RopeSpec(10_000.0)  # of no layer; None would be learned positions
_BLOOM_NAMES = {
    **{"n_embed": "hidden_size", "n_layer": "num_hidden_layers"},
    **{"n_head": "num_attention_heads", "seq_length": "max_position_embeddings"},
}
_MPT_NAMES = {
    **{"d_model": "hidden_size", "n_layers": "num_hidden_layers"},
    **{"n_heads": "num_attention_heads", "max_seq_len": "max_position_embeddings"},
}


def bloom(reader: ConfigReader) -> DecoderSpec:
    """BLOOM and BLOOMZ, 560M to 176B: the embeddings are normed."""
    set_aliases(reader, _BLOOM_NAMES)
    reader.require("apply_residual_connection_post_layernorm", False)
    reader.ignore("slow_but_exact")  # sums as the training's ranks did
    hidden_size, num_heads = _shape(reader)
    return read_decoder(
        reader,
        norm=NormSpec(reader.number("layer_norm_epsilon", 1e-5), "layer", bias=True),
        mlp_width=4 * hidden_size,
        rope=_NO_ROPE,
        layers=(LayerSpec(rope=False),) * num_layers(reader),
        alibi_slopes=slopes(num_heads),
        embedding_norm=True,
        activation="gelu_tanh",
        gated=False,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        tied=True,
    )


def mpt(reader: ConfigReader) -> DecoderSpec:
    """MPT 7B and 30B: no biases.

    ALiBi is required: Hugging Face's code always has it. That code does not read its steepness
    ``alibi_bias_max``, of which MPT-7B-StoryWriter's, published with code that does, is not 8.
    """
    set_aliases(reader, _MPT_NAMES)
    for key, value in (("no_bias", True), ("expansion_ratio", 4), ("logit_scale", None)):
        reader.require(key, value)
    for key in ("emb_pdrop", "embedding_fraction", "init_device", "learned_pos_emb", "norm_type"):
        reader.ignore(key)
    hidden_size, num_heads = _shape(reader)
    attention = reader.section("attn_config") or ConfigReader({}, "config.json, 'attn_config'")
    attention.require("attn_type", "multihead_attention")
    attention.require("alibi", True)
    for key in ("qk_ln", "prefix_lm", "attn_uses_sequence_id"):
        attention.require(key, False)
    for key in ("attn_impl", "attn_pdrop", "model_type"):
        attention.ignore(key)
    spec = read_decoder(
        reader,
        norm=NormSpec(reader.number("layer_norm_epsilon", 1e-5), "layer"),
        mlp_width=4 * hidden_size,
        rope=_NO_ROPE,
        layers=(LayerSpec(rope=False),) * num_layers(reader),
        alibi_slopes=slopes(num_heads, attention.number("alibi_bias_max", 8.0)),
        attention_scale=attention.optional_number("softmax_scale"),
        qkv_clip=attention.optional_number("clip_qkv"),
        activation="gelu",
        gated=False,
        tied=True,
    )
    attention.finish()
    return spec


def _shape(reader: ConfigReader) -> tuple[int, int]:
    """Return the hidden size and the number of heads, which divides it."""
    hidden_size, num_heads = reader.count("hidden_size"), reader.count("num_attention_heads")
    if hidden_size % num_heads:
        raise reader.error("num_attention_heads", f"must divide the {hidden_size} dimensions")
    return hidden_size, num_heads


def slopes(num_heads: int, largest: float = 8.0) -> tuple[float, ...]:
    """Return 2^(-largest/n), 2^(-2 largest/n) ... 2^(-largest) for n heads, a power of two. Of
    fewer heads, the first ones have every other slope, from the second on."""
    power = 2 ** math.ceil(math.log2(num_heads))
    all_of_them = tuple(2.0 ** (-largest * (i + 1) / power) for i in range(power))
    if power == num_heads:
        return all_of_them
    return (all_of_them[1::2] + all_of_them[::2])[:num_heads]


FAMILIES: dict[str, Family] = {
    "bloom": Family(
        bloom, "BLOOM, BLOOMZ", "ALiBi, layer norms (also of embeddings), biases, no gate"
    ),
    "mpt": Family(mpt, "MPT", "ALiBi, layer norms, no gate", has_remote_code=True),
}
