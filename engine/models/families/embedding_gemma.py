"""Family reader of Gemma 3's text model with bidirectional attention: EmbeddingGemma."""

from __future__ import annotations

from engine.models.config_reader import ConfigReader
from engine.models.encoder.config import (
    MAX_LAYERS,
    WITHOUT_EFFECT,
    read_activation,
    read_dtype,
)
from engine.models.encoder.families import EncoderFamily
from engine.models.encoder.spec import EncoderSpec
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import layer_types
from engine.models.output_head import read_head

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"


def embedding_gemma(reader: ConfigReader) -> EncoderSpec:
    """EmbeddingGemma (Schechter Vera et al. 2025): Gemma 3 whose tokens attend to both sides.

    ``sliding_window`` is the width of the whole window: half of it to either side.
    """
    reader.require("use_bidirectional_attention", True)
    for key in (*WITHOUT_EFFECT, "use_cache"):
        reader.ignore(key)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.refuse(key, "is set, which is not supported in encoders")
    if read_head(reader).num_labels:
        raise reader.error("architectures", "has a classification head, which is not supported")
    count = reader.count("num_hidden_layers", 26, limit=MAX_LAYERS)
    num_heads = reader.count("num_attention_heads", 8)
    num_kv_heads = reader.count("num_key_value_heads", 4)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide the {num_heads} attention heads")
    head_dim = reader.count("head_dim", 256)
    if head_dim % 2:
        raise reader.error("head_dim", f"must be even for rotary positions, not {head_dim}")
    longest = reader.count("max_position_embeddings", 131_072)
    rope, local_rope = read_ropes_by_layer(
        reader, theta=1_000_000.0, local_theta=10_000.0, trained=longest, head_dim=head_dim
    )
    if rope.num_dims is not None or local_rope.num_dims is not None:
        raise reader.error("rope_parameters", "rotates a part of each head: not supported")
    kinds, bias = _kinds(reader, count), reader.flag("attention_bias")
    hidden_size = reader.count("hidden_size", 2304)
    return EncoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 262_208),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size", 9216),
        num_heads=num_heads,
        num_layers=count,
        max_position_embeddings=longest,
        rope=rope,
        local_rope=local_rope,
        local_layers=frozenset(i for i, kind in enumerate(kinds) if kind == _LOCAL),
        window=reader.count("sliding_window", 4096) // 2,
        num_kv_heads=num_kv_heads,
        head_size=head_dim,
        qk_norm=True,
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        embedding_scale=hidden_size**0.5,
        embedding_norm=False,
        placement="sandwich",
        rms_norm=True,
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        norm_bias=False,
        attention_bias=bias,
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        gated=True,
        up_bias=False,
        down_bias=False,
        checkpoint_dtype=read_dtype(reader),
    )


def _kinds(reader: ConfigReader, count: int) -> list[str]:
    """Return the attention of each layer: by default, full in every sixth only."""
    period = 6
    for key in ("sliding_window_pattern", "_sliding_window_pattern"):
        period = reader.count(key, period)
    kinds = layer_types(reader, count)
    return kinds or [_LOCAL if (i + 1) % period else _GLOBAL for i in range(count)]


# Decoders' model_types whose configs describe an encoder if tokens attend to both sides.
BIDIRECTIONAL: dict[str, EncoderFamily] = {
    "gemma3_text": EncoderFamily(
        embedding_gemma, "EmbeddingGemma, if `use_bidirectional_attention` is true"
    )
}
