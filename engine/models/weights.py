"""Where every tensor of a checkpoint goes: tables, not code.

A *parameter* is a tensor of the decoder, named here; a *part* is the slice of its first
dimension that one checkpoint tensor fills. Fused projections have several parts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from engine.models.spec import DecoderSpec


class Rule(NamedTuple):
    """Checkpoint tensors whose names match ``pattern`` fill a part of a parameter.

    ``{i}`` in the pattern stands for the layer's number, and in the parameter is replaced by it.
    """

    pattern: str
    parameter: str
    part: int = 0


_LAYER = "model.layers.{i}."

# Llama's names, which all families read here share.
RULES: tuple[Rule, ...] = (
    Rule("model.embed_tokens.weight", "embedding"),
    Rule("model.norm.weight", "norm"),
    Rule("lm_head.weight", "head"),
    Rule(_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(_LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_LAYER + "self_attn.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(_LAYER + "self_attn.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(_LAYER + "self_attn.q_proj.bias", "{i}.qkv.bias", 0),
    Rule(_LAYER + "self_attn.k_proj.bias", "{i}.qkv.bias", 1),
    Rule(_LAYER + "self_attn.v_proj.bias", "{i}.qkv.bias", 2),
    Rule(_LAYER + "self_attn.q_norm.weight", "{i}.query_norm"),
    Rule(_LAYER + "self_attn.k_norm.weight", "{i}.key_norm"),
    Rule(_LAYER + "self_attn.o_proj.weight", "{i}.output.weight"),
    Rule(_LAYER + "self_attn.o_proj.bias", "{i}.output.bias"),
    Rule(_LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(_LAYER + "mlp.gate_proj.weight", "{i}.gate_up.weight", 0),
    Rule(_LAYER + "mlp.up_proj.weight", "{i}.gate_up.weight", 1),
    Rule(_LAYER + "mlp.gate_proj.bias", "{i}.gate_up.bias", 0),
    Rule(_LAYER + "mlp.up_proj.bias", "{i}.gate_up.bias", 1),
    Rule(_LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
    Rule(_LAYER + "mlp.down_proj.bias", "{i}.down.bias"),
)

# Buffers that older checkpoints carry; they are computed here.
_COMPUTED = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True, slots=True)
class Parameter:
    """A tensor of the decoder: ``parts`` are the lengths along its first dimension."""

    parts: tuple[int, ...]
    trailing: tuple[int, ...] = ()  # the other dimensions
    is_norm: bool = False  # near one, rather than near zero

    @property
    def shape(self) -> tuple[int, ...]:
        """The whole parameter's."""
        return (sum(self.parts), *self.trailing)

    def part_shape(self, part: int) -> tuple[int, ...]:
        """Of the checkpoint tensor that fills a part."""
        return (self.parts[part], *self.trailing)


class Target(NamedTuple):
    """Where a checkpoint tensor goes."""

    parameter: str
    part: int


def parameters(spec: DecoderSpec) -> dict[str, Parameter]:
    """All parameters of a decoder, by name."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    qkv = (spec.query_size, spec.kv_size, spec.kv_size)
    found = {
        "embedding": Parameter((spec.vocab_size,), (hidden,)),
        "norm": Parameter((hidden,), is_norm=True),
    }
    if not spec.tie_word_embeddings:
        found["head"] = Parameter((spec.vocab_size,), (hidden,))
    for i in range(spec.num_layers):
        layer = {
            "attention_norm": Parameter((hidden,), is_norm=True),
            "qkv.weight": Parameter(qkv, (hidden,)),
            "output.weight": Parameter((hidden,), (spec.query_size,)),
            "mlp_norm": Parameter((hidden,), is_norm=True),
            "gate_up.weight": Parameter((inner, inner), (hidden,)),
            "down.weight": Parameter((hidden,), (inner,)),
        }
        if spec.qkv_bias:
            layer["qkv.bias"] = Parameter(qkv)
        if spec.output_bias:
            layer["output.bias"] = Parameter((hidden,))
        if spec.mlp_bias:
            layer["gate_up.bias"] = Parameter((inner, inner))
            layer["down.bias"] = Parameter((hidden,))
        if spec.qk_norm:
            layer["query_norm"] = Parameter((spec.head_dim,), is_norm=True)
            layer["key_norm"] = Parameter((spec.head_dim,), is_norm=True)
        found |= {f"{i}.{name}": parameter for name, parameter in layer.items()}
    return found


def targets(spec: DecoderSpec, wanted: Mapping[str, Parameter]) -> dict[str, Target]:
    """Checkpoint name -> place, for every part of every parameter."""
    places: dict[str, Target] = {}
    for rule in RULES:
        per_layer = "{i}" in rule.pattern
        for i in range(spec.num_layers if per_layer else 1):
            parameter = rule.parameter.replace("{i}", str(i))
            if parameter in wanted:
                places[rule.pattern.replace("{i}", str(i))] = Target(parameter, rule.part)
    return places


def is_redundant(spec: DecoderSpec, name: str) -> bool:
    """Whether a tensor without a place may be passed over: computed here, or a tied copy."""
    tied_copy = spec.tie_word_embeddings and name == "lm_head.weight"
    return tied_copy or _COMPUTED.fullmatch(name) is not None
