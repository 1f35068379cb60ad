"""Checkpoints' parameter names for Whisper's decoder."""

from __future__ import annotations

from engine.models.rules import Rule

_LAYER = "model.decoder.layers.{i}."


def _both(pattern: str, parameter: str, part: int = 0) -> tuple[Rule, ...]:
    """A weight and a bias."""
    return tuple(
        Rule(f"{pattern}.{kind}", f"{parameter}.{kind}", part) for kind in ("weight", "bias")
    )


def _norm(pattern: str, parameter: str) -> tuple[Rule, ...]:
    return (Rule(f"{pattern}.weight", parameter), Rule(f"{pattern}.bias", f"{parameter}.bias"))


WHISPER = (
    Rule("model.decoder.embed_tokens.weight", "embedding"),
    Rule("model.decoder.embed_positions.weight", "positions"),
    Rule("proj_out.weight", "head"),
    *_norm("model.decoder.layer_norm", "norm"),
    *_norm(_LAYER + "self_attn_layer_norm", "{i}.attention_norm"),
    Rule(_LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_LAYER + "self_attn.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(_LAYER + "self_attn.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(_LAYER + "self_attn.q_proj.bias", "{i}.query.bias"),
    Rule(_LAYER + "self_attn.v_proj.bias", "{i}.value.bias"),
    *_both(_LAYER + "self_attn.out_proj", "{i}.output"),
    *_norm(_LAYER + "encoder_attn_layer_norm", "{i}.cross_norm"),
    *_both(_LAYER + "encoder_attn.q_proj", "{i}.cross.query"),
    Rule(_LAYER + "encoder_attn.k_proj.weight", "{i}.cross.key_value.weight", 0),
    Rule(_LAYER + "encoder_attn.v_proj.weight", "{i}.cross.key_value.weight", 1),
    Rule(_LAYER + "encoder_attn.v_proj.bias", "{i}.cross.value.bias"),
    *_both(_LAYER + "encoder_attn.out_proj", "{i}.cross.output"),
    *_norm(_LAYER + "final_layer_norm", "{i}.mlp_norm"),
    *_both(_LAYER + "fc1", "{i}.gate_up"),
    *_both(_LAYER + "fc2", "{i}.down"),
)
