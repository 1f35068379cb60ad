"""Family readers of encoders with rotary positions."""

from __future__ import annotations

from typing import Any

from engine.models.config_reader import ConfigReader
from engine.models.encoder.config import (
    MAX_LAYERS,
    WITHOUT_EFFECT,
    read_activation,
    read_dtype,
    read_num_heads,
    read_rope,
)
from engine.models.encoder.spec import EncoderSpec, HeadSpec
from engine.models.output_head import read_head
from engine.models.rope_spec import RopeSpec

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Besides ``WITHOUT_EFFECT``: of training and of the masked language model. Published configs have
# BERT's names for the norms' epsilon and the kind of positions, too, which nothing reads.
_MODERN_WITHOUT_EFFECT = (
    *("cls_token_id", "decoder_bias", "deterministic_flash_attn", "embedding_dropout"),
    *("initializer_cutoff_factor", "layer_norm_eps", "mask_token_id", "mlp_dropout"),
    *("position_embedding_type", "reference_compile", "repad_logits_with_grad"),
    *("sparse_pred_ignore_index", "sparse_prediction"),
)


def modernbert(reader: ConfigReader) -> EncoderSpec:
    """ModernBERT (Warner et al. 2024): rotary positions, windows in two layers of three."""
    reader.require("is_decoder", False)
    for key in (*WITHOUT_EFFECT, *_MODERN_WITHOUT_EFFECT):
        reader.ignore(key)
    count = reader.count("num_hidden_layers", 22, limit=MAX_LAYERS)
    hidden_size = reader.count("hidden_size", 768)
    kinds = _layer_types(reader, count)
    rope, local_rope = _ropes_by_layer(reader)
    attention_bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    head = read_head(reader)
    return EncoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 50_368),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size", 1152),
        num_heads=read_num_heads(reader, "num_attention_heads", hidden_size, rotary=True),
        num_layers=count,
        max_position_embeddings=reader.count("max_position_embeddings", 8192),
        rope=rope,
        local_rope=local_rope,
        local_layers=frozenset(i for i, kind in enumerate(kinds) if kind == _LOCAL),
        window=reader.count("local_attention", 128) // 2,
        pre_norm=True,
        norm_eps=reader.number("norm_eps", 1e-5),
        norm_bias=reader.flag("norm_bias"),
        attention_bias=attention_bias,
        activation=read_activation(reader, "hidden_activation"),
        gated=True,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
        num_labels=head.num_labels,
        head=_modern_head(reader),
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=read_dtype(reader),
    )


def _layer_types(reader: ConfigReader, count: int) -> list[Any]:
    """Return the attention of each layer: by default, local but in every third from the first."""
    period = reader.count("global_attn_every_n_layers", 3)
    kinds = reader.list_of_length("layer_types", count)
    for kind in kinds or ():
        if kind not in (_LOCAL, _GLOBAL):
            raise reader.error("layer_types", f"has {kind!r:.80}, which is not supported")
    return kinds or [_LOCAL if i % period else _GLOBAL for i in range(count)]


def _ropes_by_layer(reader: ConfigReader) -> tuple[RopeSpec, RopeSpec]:
    """Return the ropes of global and of local layers, in either spelling."""
    reader.refuse("rope_scaling", "is set, which is not supported in encoders")
    thetas = (
        reader.number("global_rope_theta", 160_000.0, above=1.0),
        reader.number("local_rope_theta", 10_000.0, above=1.0),
    )
    both = reader.section("rope_parameters")
    if both is None:
        return RopeSpec(thetas[0]), RopeSpec(thetas[1])
    ropes = [
        read_rope(both.section(name), theta)
        for name, theta in zip((_GLOBAL, _LOCAL), thetas, strict=True)
    ]
    both.finish()
    return ropes[0], ropes[1]


def _modern_head(reader: ConfigReader) -> HeadSpec:
    pooling = reader.text("classifier_pooling", "cls")
    if pooling not in ("cls", "mean"):
        raise reader.error("classifier_pooling", f"is {pooling[:80]!r}; known: cls, mean")
    return HeadSpec(
        pooling="cls" if pooling == "cls" else "mean",
        activation=read_activation(reader, "classifier_activation"),
        bias=reader.flag("classifier_bias"),
        has_norm=True,
    )
