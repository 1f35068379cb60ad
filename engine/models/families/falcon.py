"""Falcon: layer norms, one key for many heads, parallel attention and MLP."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.families.family import Family
from engine.models.families.rope import read_rope
from engine.models.families.shared import num_layers, read_activation, read_dtype
from engine.models.spec import DecoderSpec, LayerSpec, NormSpec


def falcon(reader: ConfigReader) -> DecoderSpec:
    """Falcon 7B and 11B, 40B and 180B, whose ``new_decoder_architecture`` groups heads."""
    reader.refuse("alibi", "is true: ALiBi position biases are not supported")
    reader.require("apply_residual_connection_post_layernorm", False)
    hidden_size = reader.count("hidden_size")
    num_heads = reader.count("num_attention_heads")
    if hidden_size % num_heads or hidden_size // num_heads % 2:
        raise reader.error("num_attention_heads", f"must cut {hidden_size} into even parts")
    is_grouped = reader.flag("new_decoder_architecture")
    is_parallel = reader.flag("parallel_attn", True)
    if is_grouped and not is_parallel:
        raise reader.error("parallel_attn", "is false, beside 'new_decoder_architecture'")
    num_norms = reader.count("num_ln_in_parallel_attn", 2 if is_grouped else 1)
    if num_norms > (2 if is_grouped else 1):
        raise reader.error("num_ln_in_parallel_attn", f"is {num_norms}, which is not supported")
    trained, bias = reader.count("max_position_embeddings", 2048), reader.flag("bias")
    head_dim = hidden_size // num_heads
    return DecoderSpec(
        architecture=reader.text("model_type"),
        naming="falcon_two_norms" if num_norms == 2 else "falcon",
        vocab_size=reader.count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("ffn_hidden_size", 4 * hidden_size),
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(reader, num_heads, is_grouped=is_grouped),
        head_dim=head_dim,
        max_position_embeddings=trained,
        norm=NormSpec(reader.number("layer_norm_epsilon", 1e-5), "layer", bias=True),
        rope=read_rope(reader, theta=10_000.0, trained=trained, head_dim=head_dim),
        layers=(LayerSpec(),) * num_layers(reader),
        placement="parallel" if is_parallel else "pre",
        shared_norm=is_parallel and num_norms == 1,
        activation=read_activation(reader, "activation", "gelu"),
        gated=False,
        tie_word_embeddings=reader.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        eos_token_ids=reader.token_ids("eos_token_id"),
        checkpoint_dtype=read_dtype(reader),
    )


def _num_kv_heads(reader: ConfigReader, num_heads: int, *, is_grouped: bool) -> int:
    """Return the config's number; without groups there is one KV head, or one for each head."""
    given = reader.count("num_kv_heads", num_heads)
    is_shared = reader.flag("multi_query", True)
    if not is_grouped:
        return 1 if is_shared else num_heads
    if num_heads % given:
        raise reader.error("num_kv_heads", f"must divide the {num_heads} attention heads")
    return given


FAMILIES: dict[str, Family] = {
    "falcon": Family(
        falcon,
        "Falcon 7B, 11B, 40B, 180B; not those with ALiBi",
        "layer norms, parallel attention and ungated MLP",
        has_remote_code=True,
    ),
}
