"""The parameters of an encoder, and checkpoints' names for them: one table per family."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.models.encoder.spec import EncoderSpec
from engine.models.rules import Rule
from engine.models.weights import Parameter, Target

_NORM = (("weight", ""), ("bias", ".bias"))


def _linear(pattern: str, parameter: str, part: int | None = 0) -> tuple[Rule, ...]:
    return tuple(
        Rule(f"{pattern}.{kind}", f"{parameter}.{kind}", part) for kind in ("weight", "bias")
    )


def _norm(pattern: str, parameter: str) -> tuple[Rule, ...]:
    return tuple(Rule(f"{pattern}.{kind}", parameter + suffix) for kind, suffix in _NORM)


_EMBEDDINGS = (
    Rule("embeddings.word_embeddings.weight", "embedding"),
    Rule("embeddings.position_embeddings.weight", "positions"),
    Rule("embeddings.token_type_embeddings.weight", "token_types"),
    *_norm("embeddings.LayerNorm", "embedding_norm"),
)
_LAYER = "encoder.layer.{i}."
_BERT_LAYERS = (
    *_linear(_LAYER + "attention.self.query", "{i}.qkv", 0),
    *_linear(_LAYER + "attention.self.key", "{i}.qkv", 1),
    *_linear(_LAYER + "attention.self.value", "{i}.qkv", 2),
    *_linear(_LAYER + "attention.output.dense", "{i}.output"),
    *_norm(_LAYER + "attention.output.LayerNorm", "{i}.attention_norm"),
    *_linear(_LAYER + "intermediate.dense", "{i}.up"),
    *_linear(_LAYER + "output.dense", "{i}.down"),
    *_norm(_LAYER + "output.LayerNorm", "{i}.mlp_norm"),
)
_BERT = (
    *(*_EMBEDDINGS, *_BERT_LAYERS),
    *_linear("pooler.dense", "pooler"),
    *_linear("classifier", "classifier"),
)
_ROBERTA = (
    *(*_EMBEDDINGS, *_BERT_LAYERS),
    *_linear("classifier.dense", "pooler"),
    *_linear("classifier.out_proj", "classifier"),
)
_DISTIL_LAYER = "transformer.layer.{i}."
_DISTILBERT = (
    *_EMBEDDINGS,
    *_linear(_DISTIL_LAYER + "attention.q_lin", "{i}.qkv", 0),
    *_linear(_DISTIL_LAYER + "attention.k_lin", "{i}.qkv", 1),
    *_linear(_DISTIL_LAYER + "attention.v_lin", "{i}.qkv", 2),
    *_linear(_DISTIL_LAYER + "attention.out_lin", "{i}.output"),
    *_norm(_DISTIL_LAYER + "sa_layer_norm", "{i}.attention_norm"),
    *_linear(_DISTIL_LAYER + "ffn.lin1", "{i}.up"),
    *_linear(_DISTIL_LAYER + "ffn.lin2", "{i}.down"),
    *_norm(_DISTIL_LAYER + "output_layer_norm", "{i}.mlp_norm"),
    *_linear("pre_classifier", "pooler"),
    *_linear("classifier", "classifier"),
)
_MPNET = (
    *_EMBEDDINGS,
    Rule("encoder.relative_attention_bias.weight", "relative_bias"),
    *_linear(_LAYER + "attention.attn.q", "{i}.qkv", 0),
    *_linear(_LAYER + "attention.attn.k", "{i}.qkv", 1),
    *_linear(_LAYER + "attention.attn.v", "{i}.qkv", 2),
    *_linear(_LAYER + "attention.attn.o", "{i}.output"),
    *_norm(_LAYER + "attention.LayerNorm", "{i}.attention_norm"),
    *_linear(_LAYER + "intermediate.dense", "{i}.up"),
    *_linear(_LAYER + "output.dense", "{i}.down"),
    *_norm(_LAYER + "output.LayerNorm", "{i}.mlp_norm"),
    *_linear("classifier.dense", "pooler"),
    *_linear("classifier.out_proj", "classifier"),
)
_MODERN_LAYER = "layers.{i}."
_MODERNBERT = (
    Rule("embeddings.tok_embeddings.weight", "embedding"),
    *_norm("embeddings.norm", "embedding_norm"),
    *_norm(_MODERN_LAYER + "attn_norm", "{i}.attention_norm"),
    *_linear(_MODERN_LAYER + "attn.Wqkv", "{i}.qkv", None),
    *_linear(_MODERN_LAYER + "attn.Wo", "{i}.output"),
    *_norm(_MODERN_LAYER + "mlp_norm", "{i}.mlp_norm"),
    *_linear(_MODERN_LAYER + "mlp.Wi", "{i}.up", None),
    *_linear(_MODERN_LAYER + "mlp.Wo", "{i}.down"),
    *_norm("final_norm", "norm"),
    *_linear("head.dense", "pooler"),
    *_norm("head.norm", "head_norm"),
    *_linear("classifier", "classifier"),
)
_ROTARY_LAYER = "layers.{i}."
_ROTARY = (  # but for the MLPs' first projections
    *(rule for rule in _EMBEDDINGS if rule.parameter != "positions"),
    *_linear(_ROTARY_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *_linear(_ROTARY_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *_linear(_ROTARY_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    *_linear(_ROTARY_LAYER + "self_attn.o_proj", "{i}.output"),
    *_norm(_ROTARY_LAYER + "post_attention_layernorm", "{i}.attention_norm"),
    *_linear(_ROTARY_LAYER + "mlp.down_proj", "{i}.down"),
    *_norm(_ROTARY_LAYER + "post_mlp_layernorm", "{i}.mlp_norm"),
    *_linear("pooler.dense", "pooler"),
    *_linear("classifier", "classifier"),
)
# Each has the names of transformers, and those of the code that it was published with.
_OWN_LAYER = "encoder.layers.{i}."
_NOMIC = (
    *_ROTARY,
    *_linear(_ROTARY_LAYER + "mlp.gate_proj", "{i}.up", 0),
    *_linear(_ROTARY_LAYER + "mlp.up_proj", "{i}.up", 1),
    *_norm("emb_ln", "embedding_norm"),
    *_linear(_OWN_LAYER + "attn.Wqkv", "{i}.qkv", None),
    *_linear(_OWN_LAYER + "attn.out_proj", "{i}.output"),
    *_norm(_OWN_LAYER + "norm1", "{i}.attention_norm"),
    *_linear(_OWN_LAYER + "mlp.fc12", "{i}.up", 0),
    *_linear(_OWN_LAYER + "mlp.fc11", "{i}.up", 1),
    *_linear(_OWN_LAYER + "mlp.fc2", "{i}.down"),
    *_norm(_OWN_LAYER + "norm2", "{i}.mlp_norm"),
)
_GTE = (
    *_ROTARY,
    *_linear(_ROTARY_LAYER + "mlp.up_proj", "{i}.up", 0),
    *_linear(_ROTARY_LAYER + "mlp.gate_proj", "{i}.up", 1),
    *_linear(_LAYER + "attention.qkv_proj", "{i}.qkv", None),
    *_linear(_LAYER + "attention.o_proj", "{i}.output"),
    *_norm(_LAYER + "attn_ln", "{i}.attention_norm"),
    *_linear(_LAYER + "mlp.up_gate_proj", "{i}.up", None),
    *_linear(_LAYER + "mlp.down_proj", "{i}.down"),
    *_norm(_LAYER + "mlp_ln", "{i}.mlp_norm"),
)
_GEMMA3 = (
    Rule("embed_tokens.weight", "embedding"),
    *_linear(_ROTARY_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *_linear(_ROTARY_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *_linear(_ROTARY_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    *_linear(_ROTARY_LAYER + "self_attn.o_proj", "{i}.output"),
    Rule(_ROTARY_LAYER + "self_attn.q_norm.weight", "{i}.query_norm"),
    Rule(_ROTARY_LAYER + "self_attn.k_norm.weight", "{i}.key_norm"),
    *_linear(_ROTARY_LAYER + "mlp.gate_proj", "{i}.up", 0),
    *_linear(_ROTARY_LAYER + "mlp.up_proj", "{i}.up", 1),
    *_linear(_ROTARY_LAYER + "mlp.down_proj", "{i}.down"),
    *_norm(_ROTARY_LAYER + "input_layernorm", "{i}.attention_norm"),
    *_norm(_ROTARY_LAYER + "post_attention_layernorm", "{i}.attention_after"),
    *_norm(_ROTARY_LAYER + "pre_feedforward_layernorm", "{i}.mlp_norm"),
    *_norm(_ROTARY_LAYER + "post_feedforward_layernorm", "{i}.mlp_after"),
    *_norm("norm", "norm"),
)
_EUROBERT = (
    *(rule for rule in _GEMMA3 if "feedforward" not in rule.pattern),
    *_norm(_ROTARY_LAYER + "post_attention_layernorm", "{i}.mlp_norm"),
    *_linear("dense", "pooler"),
    *_linear("classifier", "classifier"),
)
_OWN = _ROTARY_LAYER + "ple_block."
_EMBEDDING_GEMMA2 = (
    *_GEMMA3,
    Rule("ple.per_layer_model_projection.weight", "per_layer.weight"),
    Rule("ple.per_layer_projection_norm.weight", "per_layer_norm"),
    Rule(_OWN + "per_layer_input_gate.weight", "{i}.per_layer_gate.weight"),
    Rule(_OWN + "per_layer_projection.weight", "{i}.per_layer_output.weight"),
    Rule(_OWN + "post_per_layer_input_norm.weight", "{i}.per_layer_after"),
    Rule(_ROTARY_LAYER + "layer_scalar", "{i}.scale"),
    Rule("embedding_projection.weight", "projection.weight"),
)
_TABLES = {
    "bert": _BERT,
    "camembert": _ROBERTA,
    "embedding_gemma2_text": _EMBEDDING_GEMMA2,
    "eurobert": _EUROBERT,
    "gemma3_text": _GEMMA3,
    "gte": _GTE,
    "modernbert": _MODERNBERT,
    "mpnet": _MPNET,
    "nomic_bert": _NOMIC,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": _DISTILBERT,
}
# Whole models prefix their encoder's names; the oldest checkpoints name norms as TensorFlow did.
_PREFIX = re.compile(
    r"(bert|roberta|distilbert|mpnet|nomic_bert|gte|new|(model\.)?language_model|model)\."
)
_OLD_NORMS = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
# Buffers, and training heads that do not affect embeddings.
_UNUSED = re.compile(
    r"embeddings\.(position_ids|token_type_ids)|pooler\..*|cls\..*|lm_head\..*"
    r"|vocab_(transform|layer_norm|projector)\..*|(.*\.)?rotary_emb\.inv_freq"
)
# ModernBERT's head for masked words has the names of its classification head.
_UNUSED_WITHOUT_LABELS = re.compile(r"head\.(dense|norm)\..*|decoder\.(weight|bias)")


# What embeds images and sound, which are not taken.
_MEDIA = re.compile(r"(model\.)?(vision_tower|embed_vision|audio_tower|embed_audio)\..*")


def encoder_targets(spec: EncoderSpec, wanted: Mapping[str, Parameter]) -> dict[str, Target]:
    """Return checkpoint name -> place, for every part of every parameter."""
    places: dict[str, Target] = {}
    for rule in _TABLES[spec.architecture]:
        for i in range(spec.num_layers if "{i}" in rule.pattern else 1):
            parameter = rule.parameter.replace("{i}", str(i))
            if parameter in wanted:
                places[rule.pattern.replace("{i}", str(i))] = Target(parameter, rule.part)
    return places


def canonical_name(name: str) -> str:
    """Return a tensor's name in a bare encoder, in the newer spelling."""
    name = _PREFIX.sub("", name, count=1) if _PREFIX.match(name) else name
    for old, new in _OLD_NORMS:
        name = name.replace(old, new)
    return name


def is_skippable(spec: EncoderSpec, name: str) -> bool:
    """Return whether a tensor without a place may be skipped: no embedding depends on it."""
    if spec.architecture == "embedding_gemma2_text":
        return _MEDIA.fullmatch(name) is not None
    if spec.architecture == "modernbert":
        return not spec.num_labels and _UNUSED_WITHOUT_LABELS.fullmatch(name) is not None
    if spec.architecture == "gte" and not spec.num_labels and name.startswith("classifier."):
        return True  # weights of tokens, for sparse vectors
    return _UNUSED.fullmatch(name) is not None


def has_attention_norm(spec: EncoderSpec, i: int) -> bool:
    """Return whether layer ``i`` has a norm beside its attention: with norms before it, the first
    layer's would follow that of the embeddings, if there is one."""
    return i > 0 or spec.placement != "pre" or not spec.embedding_norm


def encoder_parameters(spec: EncoderSpec) -> dict[str, Parameter]:
    """Return all parameters of an encoder, by name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    up = (inner, inner) if spec.gated else (inner,)

    def linear(
        name: str, parts: tuple[int, ...], inputs: int, *, has_bias: bool
    ) -> dict[str, Parameter]:
        weight = {f"{name}.weight": Parameter(parts, (inputs,))}
        return weight | ({f"{name}.bias": Parameter(parts)} if has_bias else {})

    def norm(name: str, size: int = hidden) -> dict[str, Parameter]:
        bias = {f"{name}.bias": Parameter((size,))} if spec.norm_bias else {}
        is_float32 = spec.rms_offset is not None  # what is added to them is not rounded
        return {name: Parameter((size,), is_norm=True, is_float32=is_float32)} | bias

    found = {"embedding": Parameter((spec.vocab_size,), (hidden,))}
    if spec.embedding_norm:
        found |= norm("embedding_norm")
    if spec.rope is None:
        found["positions"] = Parameter((spec.max_position_embeddings,), (hidden,))
    if spec.relative_buckets:
        found["relative_bias"] = Parameter((spec.relative_buckets,), (spec.num_heads,))
    if spec.num_token_types:
        found["token_types"] = Parameter((spec.num_token_types,), (hidden,))
    for i in range(spec.num_layers):
        heads, head_dim = spec.qkv_sizes(i), spec.kv_heads(i)[1]
        found |= {
            **linear(f"{i}.qkv", heads, hidden, has_bias=spec.attention_bias),
            **linear(f"{i}.output", (hidden,), heads[0], has_bias=spec.attention_bias),
            **(norm(f"{i}.attention_norm") if has_attention_norm(spec, i) else {}),
            **linear(f"{i}.up", up, hidden, has_bias=spec.up_bias),
            **linear(f"{i}.down", (hidden,), inner, has_bias=spec.down_bias),
            **norm(f"{i}.mlp_norm"),
        }
        if spec.qk_norm:
            found |= norm(f"{i}.query_norm", head_dim) | norm(f"{i}.key_norm", head_dim)
        if spec.placement == "sandwich":
            found |= norm(f"{i}.attention_after") | norm(f"{i}.mlp_after")
        if own := spec.per_layer_size:
            found |= linear(f"{i}.per_layer_gate", (own,), hidden, has_bias=False)
            found |= linear(f"{i}.per_layer_output", (hidden,), own, has_bias=False)
            found |= norm(f"{i}.per_layer_after")
        if spec.layer_scales:
            found[f"{i}.scale"] = Parameter((1,), is_norm=True, is_float32=True)
    if spec.placement != "post":
        found |= norm("norm")
    if own := spec.per_layer_size:
        found |= linear("per_layer", (spec.num_layers * own,), hidden, has_bias=False)
        found |= norm("per_layer_norm", own)
    if spec.projected_size:
        found |= linear("projection", (spec.projected_size,), hidden, has_bias=False)
    if spec.num_labels:
        found |= linear("pooler", (hidden,), hidden, has_bias=spec.head.bias)
        found |= norm("head_norm") if spec.head.has_norm else {}
        found |= linear("classifier", (spec.num_labels,), hidden, has_bias=True)
    return found
