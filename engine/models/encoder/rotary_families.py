"""Family readers of encoders with rotary positions."""

from __future__ import annotations

from dataclasses import replace
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
from engine.models.rope_spec import LinearScaling, RopeSpec

_LOCAL, _GLOBAL = "sliding_attention", "full_attention"
# Besides ``WITHOUT_EFFECT``: of training and of the masked language model. Published configs have
# BERT's names for the norms' epsilon and the kind of positions, too, which nothing reads.
_MODERN_WITHOUT_EFFECT = (
    *("cls_token_id", "decoder_bias", "deterministic_flash_attn", "embedding_dropout"),
    *("initializer_cutoff_factor", "layer_norm_eps", "mask_token_id", "mlp_dropout"),
    *("position_embedding_type", "reference_compile", "repad_logits_with_grad"),
    *("sparse_pred_ignore_index", "sparse_prediction"),
)

# Names of the keys in the code that Nomic published its models with (contrastors).
_NOMIC_ALIASES = {
    **{"n_embd": "hidden_size", "n_head": "num_attention_heads", "n_layer": "num_hidden_layers"},
    **{"n_inner": "intermediate_size", "layer_norm_epsilon": "layer_norm_eps"},
}
# What the configs of GTE's own code say of all published models, and the switches of its kernels.
_GTE_FIXED: dict[str, Any] = {
    **{"is_decoder": False, "layer_norm_type": "layer_norm", "position_embedding_type": "rope"},
    **{"logn_attention_scale": False, "logn_attention_clip1": False, "pack_qkv": True},
}
_GTE_WITHOUT_EFFECT = ("unpad_inputs", "use_memory_efficient_attention")
_NOMIC_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
# Of training, of that code's kernels, and of GPT-2, whose config it extends.
_NOMIC_WITHOUT_EFFECT = (
    *("attn_pdrop", "dense_seq_output", "embd_pdrop", "fused_bias_fc", "fused_dropout_add_ln"),
    *("reorder_and_upcast_attn", "resid_pdrop", "summary_activation", "summary_first_dropout"),
    *("summary_proj_to_labels", "summary_type", "summary_use_proj", "use_flash_attn"),
    "use_xentropy",
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
        placement="pre",
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


def eurobert(reader: ConfigReader) -> EncoderSpec:
    """EuroBERT (Boizard et al. 2025): Llama's layers, whose tokens attend to both sides."""
    reader.require("is_decoder", False)
    reader.refuse("rope_scaling", "is set, which is not supported in encoders")
    for key in (*WITHOUT_EFFECT, "mask_token_id", "use_cache"):
        reader.ignore(key)
    hidden_size = reader.count("hidden_size", 768)
    num_heads = read_num_heads(reader, "num_attention_heads", hidden_size, rotary=True)
    num_kv_heads = reader.count("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise reader.error("num_key_value_heads", f"must divide the {num_heads} attention heads")
    reader.require("head_dim", hidden_size // num_heads)
    theta = reader.number("rope_theta", 10_000.0, above=1.0)
    attention_bias, mlp_bias = reader.flag("attention_bias"), reader.flag("mlp_bias")
    head = read_head(reader)
    pooling = reader.text("classifier_pooling", reader.text("clf_pooling", "late"))
    if head.num_labels and pooling not in ("bos", "mean"):
        raise reader.error("classifier_pooling", f"is {pooling[:80]!r}; known: bos, mean")
    return EncoderSpec(
        architecture=reader.text("model_type"),
        vocab_size=reader.count("vocab_size", 128_256),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size", 3072),
        num_heads=num_heads,
        num_layers=reader.count("num_hidden_layers", 12, limit=MAX_LAYERS),
        max_position_embeddings=reader.count("max_position_embeddings", 8192),
        rope=read_rope(reader.section("rope_parameters"), theta),
        num_kv_heads=num_kv_heads,
        embedding_norm=False,
        placement="pre",
        rms_offset=0.0,
        norm_eps=reader.number("rms_norm_eps", 1e-5),
        norm_bias=False,
        attention_bias=attention_bias,
        activation=read_activation(reader, "hidden_act", "silu"),
        gated=True,
        up_bias=mlp_bias,
        down_bias=mlp_bias,
        num_labels=head.num_labels,
        head=HeadSpec(pooling="mean" if pooling == "mean" else "cls", activation="gelu"),
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=read_dtype(reader),
    )


def nomic_bert(reader: ConfigReader) -> EncoderSpec:
    """Nomic BERT (Nussbaum et al. 2024): BERT with rotary positions, SwiGLU and no biases.

    Published configs have the keys of Nomic's own code, or these beside Hugging Face's.
    """
    reader.require("is_decoder", False)
    for key in (*WITHOUT_EFFECT, *_NOMIC_WITHOUT_EFFECT):
        reader.ignore(key)
    is_own = "n_embd" in reader
    if is_own:
        _require_nomic(reader)
    hidden_size = reader.count("hidden_size", 768)
    num_heads = read_num_heads(reader, "num_attention_heads", hidden_size, rotary=True)
    reader.require("head_dim", hidden_size // num_heads)
    theta = _nomic_theta(reader)
    rope = read_rope(reader.section("rope_parameters"), theta)
    if "rotary_emb_base" in reader and rope.theta != theta:
        raise reader.error("rotary_emb_base", f"is {theta:g}, but 'rope_parameters' differ")
    # Of the own code's padding, the checkpoint has the rows.
    multiple = reader.count("pad_vocab_size_multiple", 1) if is_own else 1
    return _rotary_bert(
        reader,
        hidden_size,
        num_heads,
        vocab_size=-(-reader.count("vocab_size", 30_528) // multiple) * multiple,
        max_position_embeddings=_nomic_positions(reader),
        rope=rope,
        num_token_types=reader.count("type_vocab_size", 2),
        attention_bias=False,
        activation=read_activation(reader, "hidden_act", "silu"),
        down_bias=False,
    )


def gte(reader: ConfigReader) -> EncoderSpec:
    """GTE (Zhang et al. 2024): BERT with rotary positions and a gated MLP.

    Published configs have the keys of its own code, under the type ``new`` (Alibaba) or ``gte``
    (Snowflake).
    """
    for key, value in _GTE_FIXED.items():
        reader.require(key, value)
    for key in (*WITHOUT_EFFECT, *_GTE_WITHOUT_EFFECT):
        reader.ignore(key)
    hidden_size = reader.count("hidden_size", 768)
    num_heads = read_num_heads(reader, "num_attention_heads", hidden_size, rotary=True)
    spec = _rotary_bert(
        reader,
        hidden_size,
        num_heads,
        vocab_size=reader.count("vocab_size", 250_048),
        max_position_embeddings=reader.count("max_position_embeddings", 8192),
        rope=_gte_rope(reader, hidden_size // num_heads),
        num_token_types=reader.non_negative("type_vocab_size", 1),
        activation=read_activation(reader, "hidden_act"),
        gate_last=True,
    )
    return replace(spec, architecture="gte")


def _gte_rope(reader: ConfigReader, head_dim: int) -> RopeSpec:
    """Read the rope, in either spelling.

    NTK scaling of its own code multiplies the base by the factor ``f`` and divides frequencies by
    ``f ^ (2 / d)``. Hugging Face's conversions have both numbers instead.
    """
    theta = reader.number("rope_theta", 160_000.0, above=1.0)
    own = reader.section("rope_scaling")
    if own is None:
        return read_rope(reader.section("rope_parameters"), theta, scalable=True)
    own.require("type", "ntk")
    own.refuse("mixed_b", "is set, which is not supported")
    factor = own.number("factor")
    own.finish()
    return RopeSpec(theta * factor, LinearScaling(factor ** (2 / head_dim)))


def _rotary_bert(
    reader: ConfigReader, hidden_size: int, num_heads: int, **fields: Any
) -> EncoderSpec:
    """Read what Nomic BERT and GTE have in common: BERT's norms, and a gated MLP."""
    head = read_head(reader)
    return EncoderSpec(
        architecture=reader.text("model_type"),
        hidden_size=hidden_size,
        intermediate_size=reader.count("intermediate_size", 3072),
        num_heads=num_heads,
        num_layers=reader.count("num_hidden_layers", 12, limit=MAX_LAYERS),
        norm_eps=reader.number("layer_norm_eps", 1e-12),
        gated=True,
        up_bias=False,
        num_labels=head.num_labels,
        score_sigmoid=head.sigmoid,
        checkpoint_dtype=read_dtype(reader),
        **fields,
    )


def _require_nomic(reader: ConfigReader) -> None:
    """Check the keys of Nomic's own code, and give Hugging Face's their values.

    Raises:
        ModelLoadError: two keys for one thing differ, or a key has an unsupported value. Absent
            keys have the defaults of that code, which differ from what was published.
    """
    for alias, own in _NOMIC_ALIASES.items():
        if alias in reader:
            reader.set_defaults({own: reader.value(alias)})
            reader.require(own, reader.value(alias))
    activation = reader.text("activation_function", "gelu")
    if activation not in _NOMIC_ACTIVATIONS:
        known = ", ".join(sorted(_NOMIC_ACTIVATIONS))
        raise reader.error("activation_function", f"is {activation[:80]!r}; known: {known}")
    reader.set_defaults({"hidden_act": _NOMIC_ACTIVATIONS[activation]})
    reader.require("hidden_act", _NOMIC_ACTIVATIONS[activation])
    for key in ("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"):
        if reader.flag(key, True):
            raise reader.error(key, "is true, which is not supported")
    if reader.non_negative_number("rotary_emb_fraction", 0.0) != 1.0:
        raise reader.error("rotary_emb_fraction", "is not 1: other positions are not supported")
    reader.refuse("rotary_emb_scale_base", "is set, which is not supported")
    for key in ("num_experts", "moe_every_n_layers"):
        reader.refuse(key, "is set: experts are not supported in encoders")
    for key in ("causal", "parallel_block", "parallel_block_tied_norm", "prenorm"):
        reader.require(key, False)
    for key in ("rotary_emb_interleaved", "scale_attn_by_inverse_layer_idx", "use_rms_norm"):
        reader.require(key, False)
    reader.require("scale_attn_weights", True)


def _nomic_theta(reader: ConfigReader) -> float:
    """Return the rotary base where there is no section of it."""
    return reader.number("rotary_emb_base", 10_000.0 if "n_embd" in reader else 1000.0, above=1.0)


def _nomic_positions(reader: ConfigReader) -> int:
    """Return the longest text in tokens. Frequencies that would change in longer texts
    (``rotary_scaling_factor``) are not supported, but up to the trained length they do not."""
    trained = reader.count("max_trained_positions", 2048)
    longest = reader.count("max_position_embeddings", 2048)
    longest = max(longest, reader.count("n_positions", longest))
    return longest if reader.optional_number("rotary_scaling_factor") is None else trained
