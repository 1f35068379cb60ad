"""Family readers of EmbeddingGemma: text models of Gemma whose tokens attend to both sides."""

from __future__ import annotations

from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.encoder.config import (
    MAX_LAYERS,
    WITHOUT_EFFECT,
    read_activation,
    read_dtype,
)
from engine.models.encoder.families import EncoderFamily
from engine.models.encoder.spec import EncoderSpec
from engine.models.families.gemma4 import per_layer_heads
from engine.models.families.rope import read_ropes_by_layer
from engine.models.families.shared import layer_types
from engine.models.output_head import read_head

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
_TRAINED_2 = 8192  # tokens; its table of positions is longer
_WHOLE = "embedding_gemma2"
# Of the encoders of images and sound, which are not used, and of the tokens that stand for those.
_MEDIA = (
    *("audio_config", "audio_token_id", "boa_token_id", "boi_token_id", "eoa_token_id"),
    *("eoa_token_index", "eoi_token_id", "image_token_id", "video_token_id", "vision_config"),
)


def embedding_gemma(reader: ConfigReader) -> EncoderSpec:
    """EmbeddingGemma (Schechter Vera et al. 2025): Gemma 3 whose tokens attend to both sides.

    ``sliding_window`` is the width of the whole window: half of it to either side.
    """
    reader.require("use_bidirectional_attention", True)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        reader.refuse(key, "is set, which is not supported in encoders")
    heads = reader.count("num_key_value_heads", 4), reader.count("head_dim", 256)
    return _read(
        reader,
        heads=heads,
        global_heads=heads,
        longest=reader.count("max_position_embeddings", 131_072),
        kinds=_kinds(reader, 26),
        window=reader.count("sliding_window", 4096) // 2,
        attention_scale=reader.number("query_pre_attn_scalar", 256.0) ** -0.5,
        rms_offset=1.0,
    )


def embedding_gemma2(reader: ConfigReader) -> EncoderSpec:
    """The text model of EmbeddingGemma 2 (Google 2026), alone or in the config of the whole."""
    if not reader.has_value("model_type", _WHOLE):
        return _embedding_gemma2_text(reader)
    for key in (*WITHOUT_EFFECT, *_MEDIA):
        reader.ignore(key)
    text = reader.section("text_config")
    if text is None:
        raise reader.error("text_config", "is missing")
    dtype = read_dtype(reader)
    text.require("model_type", f"{_WHOLE}_text")
    text.set_defaults({"dtype": dtype} if dtype else {})
    spec = _embedding_gemma2_text(text)
    text.finish()
    return spec


def _embedding_gemma2_text(reader: ConfigReader) -> EncoderSpec:
    kinds = [*_kinds(reader, 24)[:-1], _GLOBAL]  # the last one, whatever the config says
    usual = reader.count("num_key_value_heads", 2), reader.count("head_dim", 256)
    wide = reader.count("num_global_key_value_heads", 1), reader.count("global_head_dim", 512)
    if "per_layer_config" in reader:
        found = per_layer_heads(reader, list(kinds), usual)
        usual, wide = found.get(_LOCAL, usual), found[_GLOBAL]
    return _read(
        reader,
        heads=usual,
        global_heads=wide,
        longest=reader.count("max_position_embeddings", 262_144),
        kinds=kinds,
        window=reader.count("sliding_window", 512),
        attention_scale=1.0,
        rms_offset=0.0,
        value_norm=True,
        per_layer_size=reader.count("hidden_size_per_layer_input", 512),
        layer_scales=True,
        projected_size=reader.count("embedding_dim", 768),
        usual_context_len=_TRAINED_2,
    )


def _read(
    reader: ConfigReader,
    *,
    heads: tuple[int, int],
    global_heads: tuple[int, int],
    longest: int,
    kinds: list[str],
    **fields: Any,
) -> EncoderSpec:
    """Read what both generations have.

    Args:
        reader: the config.
        heads: KV heads and their width in local layers.
        global_heads: the same in other layers.
        longest: the longest text.
        kinds: the attention of each layer.
        fields: fields of the spec.
    """
    for key in (*WITHOUT_EFFECT, "use_cache"):
        reader.ignore(key)
    if read_head(reader).num_labels:
        raise reader.error("architectures", "has a classification head, which is not supported")
    num_heads = reader.count("num_attention_heads")
    for num_kv_heads, head_dim in (heads, global_heads):
        if num_heads % num_kv_heads or head_dim % 2:
            raise reader.error(
                "num_attention_heads",
                f"({num_heads}) does not go with {num_kv_heads} KV heads of width {head_dim}",
            )
    rope, local_rope = read_ropes_by_layer(
        reader, theta=1_000_000.0, local_theta=10_000.0, trained=longest, head_dim=heads[1]
    )
    if rope.num_dims is not None or local_rope.num_dims is not None:
        raise reader.error("rope_parameters", "rotates a part of each head: not supported")
    hidden_size, bias = reader.count("hidden_size"), reader.flag("attention_bias")
    return EncoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 262_144),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size"),
        num_heads=num_heads,
        num_layers=len(kinds),
        max_position_embeddings=longest,
        rope=rope,
        local_rope=local_rope,
        local_layers=frozenset(i for i, kind in enumerate(kinds) if kind == _LOCAL),
        num_kv_heads=heads[0],
        head_size=heads[1],
        global_heads=global_heads,
        qk_norm=True,
        embedding_scale=hidden_size**0.5,
        embedding_norm=False,
        placement="sandwich",
        norm_eps=reader.number("rms_norm_eps", 1e-6),
        norm_bias=False,
        attention_bias=bias,
        activation=read_activation(reader, "hidden_activation", "gelu_pytorch_tanh"),
        gated=True,
        up_bias=False,
        down_bias=False,
        checkpoint_dtype=read_dtype(reader),
        **fields,
    )


def _kinds(reader: ConfigReader, default: int) -> list[str]:
    """Return the attention of each layer: by default, full in every sixth only."""
    count = reader.count("num_hidden_layers", default, limit=MAX_LAYERS)
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
EMBEDDING_GEMMAS: dict[str, EncoderFamily] = {
    "embedding_gemma2": EncoderFamily(embedding_gemma2, "EmbeddingGemma 2, for text"),
    "embedding_gemma2_text": EncoderFamily(embedding_gemma2, "its text model alone"),
}
