"""The parameters of an encoder, and checkpoints' names for them: one table per family."""

from __future__ import annotations

import re
from collections.abc import Mapping

from engine.models.encoder.spec import EncoderSpec
from engine.models.rules import Rule
from engine.models.weights import Parameter, Target

_NORM = (("weight", ""), ("bias", ".bias"))


def _linear(pattern: str, parameter: str, part: int = 0) -> tuple[Rule, ...]:
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
_TABLES = {
    "bert": _BERT,
    "mpnet": _MPNET,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "distilbert": _DISTILBERT,
}
# Whole models prefix their encoder's names; the oldest checkpoints name norms as TensorFlow did.
_PREFIX = re.compile(r"(bert|roberta|distilbert|mpnet)\.")
_OLD_NORMS = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))
# Buffers, and training heads that do not affect embeddings.
_UNUSED = re.compile(
    r"embeddings\.(position_ids|token_type_ids)|pooler\..*|cls\..*|lm_head\..*"
    r"|vocab_(transform|layer_norm|projector)\..*"
)


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


def is_skippable(name: str) -> bool:
    """Return whether a tensor without a place may be skipped: no embedding depends on it."""
    return _UNUSED.fullmatch(name) is not None


def encoder_parameters(spec: EncoderSpec) -> dict[str, Parameter]:
    """Return all parameters of an encoder, by name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    found = {
        "embedding": Parameter((spec.vocab_size,), (hidden,)),
        "positions": Parameter((spec.max_position_embeddings,), (hidden,)),
        **_norm_parameters("embedding_norm", hidden),
    }
    if spec.relative_buckets:
        found["relative_bias"] = Parameter((spec.relative_buckets,), (spec.num_heads,))
    if spec.num_token_types:
        found["token_types"] = Parameter((spec.num_token_types,), (hidden,))
    for i in range(spec.num_layers):
        found |= {
            **_linear_parameters(f"{i}.qkv", (hidden, hidden, hidden), hidden),
            **_linear_parameters(f"{i}.output", (hidden,), hidden),
            **_norm_parameters(f"{i}.attention_norm", hidden),
            **_linear_parameters(f"{i}.up", (inner,), hidden),
            **_linear_parameters(f"{i}.down", (hidden,), inner),
            **_norm_parameters(f"{i}.mlp_norm", hidden),
        }
    if spec.num_labels:
        found |= _linear_parameters("pooler", (hidden,), hidden)
        found |= _linear_parameters("classifier", (spec.num_labels,), hidden)
    return found


def _linear_parameters(name: str, parts: tuple[int, ...], inputs: int) -> dict[str, Parameter]:
    return {f"{name}.weight": Parameter(parts, (inputs,)), f"{name}.bias": Parameter(parts)}


def _norm_parameters(name: str, size: int) -> dict[str, Parameter]:
    return {name: Parameter((size,), is_norm=True), f"{name}.bias": Parameter((size,))}
