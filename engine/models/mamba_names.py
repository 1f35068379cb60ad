"""What checkpoints call the parameters of models with selective state spaces (Mamba-2)."""

from __future__ import annotations

from engine.models.layouts import OneChannel
from engine.models.rules import ATTENTION, GRANITE_MOE, LAYER, MODEL, Rule

_MAMBA = LAYER + "mamba."
_MAMBA_PARTS = (
    Rule(_MAMBA + "in_proj.weight", "{i}.recurrent.input.weight"),
    Rule(_MAMBA + "in_proj.bias", "{i}.recurrent.input.bias"),
    Rule(_MAMBA + "conv1d.weight", "{i}.recurrent.conv.weight", 0, OneChannel()),
    Rule(_MAMBA + "conv1d.bias", "{i}.recurrent.conv.bias"),
    Rule(_MAMBA + "A_log", "{i}.recurrent.log_a"),
    Rule(_MAMBA + "dt_bias", "{i}.recurrent.dt_bias"),
    Rule(_MAMBA + "D", "{i}.recurrent.skip"),
    Rule(_MAMBA + "norm.weight", "{i}.recurrent.norm"),
    Rule(_MAMBA + "out_proj.weight", "{i}.recurrent.output.weight"),
    Rule(_MAMBA + "out_proj.bias", "{i}.recurrent.output.bias"),
)
GRANITE_HYBRID = (
    *(*GRANITE_MOE, *_MAMBA_PARTS),
    # Of models without experts, whose MLP is what others have beside them.
    Rule(LAYER + "shared_mlp.input_linear.weight", "{i}.gate_up.weight", None),
    Rule(LAYER + "shared_mlp.output_linear.weight", "{i}.down.weight"),
)
_BAMBA_MLP = LAYER + "feed_forward."
BAMBA = (
    *(rule for rule in MODEL if rule.parameter != "norm"),
    Rule("model.final_layernorm.weight", "norm"),
    *(*ATTENTION, *_MAMBA_PARTS),
    Rule(LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "pre_ff_layernorm.weight", "{i}.mlp_norm"),
    *(
        Rule(f"{_BAMBA_MLP}{name}_proj.{kind}", f"{{i}}.gate_up.{kind}", part)
        for part, name in enumerate(("gate", "up"))
        for kind in ("weight", "bias")
    ),
    Rule(_BAMBA_MLP + "down_proj.weight", "{i}.down.weight"),
    Rule(_BAMBA_MLP + "down_proj.bias", "{i}.down.bias"),
)
