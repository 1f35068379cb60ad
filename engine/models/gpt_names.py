"""Checkpoints' parameter names for GPT-J, CodeGen, GPT-Neo and Phi."""

from __future__ import annotations

from engine.models.layouts import QkvByQuarter
from engine.models.rules import LAYER, MODEL, PRE_NORMS, Rule

_BLOCK = "transformer.h.{i}."


def _projections(prefix: str, names: dict[str, tuple[str, int]]) -> tuple[Rule, ...]:
    """Weights and biases: name -> parameter and part."""
    return tuple(
        Rule(f"{prefix}{name}.{kind}", f"{{i}}.{parameter}.{kind}", part)
        for name, (parameter, part) in names.items()
        for kind in ("weight", "bias")
    )


_ENDS = (
    Rule("transformer.wte.weight", "embedding"),
    Rule("transformer.wpe.weight", "positions"),
    Rule("transformer.ln_f.weight", "norm"),
    Rule("transformer.ln_f.bias", "norm.bias"),
    Rule("lm_head.weight", "head"),
    Rule("lm_head.bias", "head.bias"),
    Rule("score.weight", "score"),
    Rule(_BLOCK + "ln_1.weight", "{i}.attention_norm"),
    Rule(_BLOCK + "ln_1.bias", "{i}.attention_norm.bias"),
    Rule(_BLOCK + "ln_2.weight", "{i}.mlp_norm"),
    Rule(_BLOCK + "ln_2.bias", "{i}.mlp_norm.bias"),
)
_QKVO = {
    "q_proj": ("qkv", 0),
    "k_proj": ("qkv", 1),
    "v_proj": ("qkv", 2),
    "out_proj": ("output", 0),
}
_FC = {"fc_in": ("gate_up", 0), "fc_out": ("down", 0)}
GPTJ = (
    *(*_ENDS, *_projections(_BLOCK + "attn.", _QKVO)),
    *_projections(_BLOCK + "mlp.", _FC),
)
CODEGEN = (
    *(*_ENDS, *_projections(_BLOCK + "mlp.", _FC)),
    Rule(_BLOCK + "attn.qkv_proj.weight", "{i}.qkv.weight", None, QkvByQuarter()),
    Rule(_BLOCK + "attn.out_proj.weight", "{i}.output.weight"),
)
GPT_NEO = (
    *(*_ENDS, *_projections(_BLOCK + "attn.attention.", _QKVO)),
    *_projections(_BLOCK + "mlp.", {"c_fc": ("gate_up", 0), "c_proj": ("down", 0)}),
)
PHI = (
    *(rule for rule in MODEL if not rule.parameter.startswith("norm")),
    Rule("model.final_layernorm.weight", "norm"),
    Rule("model.final_layernorm.bias", "norm.bias"),
    *PRE_NORMS,
    *_projections(LAYER + "self_attn.", {**_QKVO, "dense": ("output", 0)}),
    *_projections(LAYER + "mlp.", {"fc1": ("gate_up", 0), "fc2": ("down", 0)}),
)
