"""Checkpoints' parameter names for models with selective state spaces (Mamba-1 and 2)."""

from __future__ import annotations

from engine.models.layouts import DepthwiseConv, ScaledOutputs
from engine.models.rules import ATTENTION, GRANITE_MOE, LAYER, MODEL, Rule, expert_rules


def _state_space(prefix: str) -> tuple[Rule, ...]:
    """The parts of a layer, whose names all begin with ``prefix``."""
    return (
        Rule(prefix + "in_proj.weight", "{i}.recurrent.input.weight"),
        Rule(prefix + "in_proj.bias", "{i}.recurrent.input.bias"),
        Rule(prefix + "conv1d.weight", "{i}.recurrent.conv.weight", 0, DepthwiseConv()),
        Rule(prefix + "conv1d.bias", "{i}.recurrent.conv.bias"),
        Rule(prefix + "A_log", "{i}.recurrent.log_a"),
        Rule(prefix + "dt_bias", "{i}.recurrent.dt_bias"),
        Rule(prefix + "D", "{i}.recurrent.skip"),
        Rule(prefix + "norm.weight", "{i}.recurrent.norm"),
        Rule(prefix + "out_proj.weight", "{i}.recurrent.output.weight"),
        Rule(prefix + "out_proj.bias", "{i}.recurrent.output.bias"),
    )


_MAMBA_PARTS = _state_space(LAYER + "mamba.")
GRANITE_HYBRID = (
    *(*GRANITE_MOE, *_MAMBA_PARTS),
    # In models without experts, the MLP has the name of the others' shared expert.
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


# The multipliers of Falcon-H1's config that apply to each of its tensors.
_FALCON_H1_FACTORS = {
    "self_attn.q_proj.weight": "attention_in",
    "self_attn.k_proj.weight": "key",
    "self_attn.k_proj.bias": "key_bias",
    "self_attn.v_proj.weight": "attention_in",
    "self_attn.o_proj.weight": "attention_out",
    "self_attn.o_proj.bias": "attention_out",
    "mamba.in_proj.weight": "ssm_in",
    "mamba.in_proj.bias": "ssm_bias",
    "mamba.out_proj.weight": "ssm_out",
    "mamba.out_proj.bias": "ssm_out",
    "feed_forward.gate_proj.weight": "gate",
    "feed_forward.gate_proj.bias": "gate",
    "feed_forward.down_proj.weight": "down",
    "feed_forward.down_proj.bias": "down",
}


def _scaled(rule: Rule) -> Rule:
    factor = _FALCON_H1_FACTORS.get(rule.pattern.removeprefix(LAYER))
    return rule if factor is None else rule._replace(layout=ScaledOutputs(factor))


FALCON_H1 = tuple(map(_scaled, BAMBA))


def _nemotron_h(base: str) -> tuple[Rule, ...]:
    """Each layer has a norm and a single mixer of any kind after it."""
    mixer, mlp = f"{base}.layers.{{i}}.mixer.", f"{base}.layers.{{m}}.mixer."
    return (
        Rule(f"{base}.embeddings.weight", "embedding"),
        Rule(f"{base}.norm_f.weight", "norm"),
        Rule(f"{base}.layers.{{i}}.norm.weight", "{i}.attention_norm"),
        Rule(f"{base}.layers.{{m}}.norm.weight", "{i}.mlp_norm"),
        *_state_space(mixer),
        *(
            Rule(f"{mixer}{name}_proj.weight", "{i}.qkv.weight", part)
            for part, name in enumerate("qkv")
        ),
        Rule(mixer + "o_proj.weight", "{i}.output.weight"),
        Rule(mlp + "up_proj.weight", "{i}.gate_up.weight"),
        Rule(mlp + "up_proj.bias", "{i}.gate_up.bias"),
        Rule(mlp + "down_proj.weight", "{i}.down.weight"),
        Rule(mlp + "down_proj.bias", "{i}.down.bias"),
        Rule(mlp + "gate.weight", "{i}.router"),
        Rule(mlp + "gate.e_score_correction_bias", "{i}.router.correction"),
        Rule(mlp + "experts.{e}.up_proj.weight", "{i}.experts.gate_up"),
        Rule(mlp + "experts.{e}.down_proj.weight", "{i}.experts.down"),
        Rule(mlp + "fc1_latent_proj.weight", "{i}.latent.enter.weight"),
        Rule(mlp + "fc2_latent_proj.weight", "{i}.latent.leave.weight"),
        Rule(mlp + "shared_experts.up_proj.weight", "{i}.shared.gate_up.weight"),
        Rule(mlp + "shared_experts.down_proj.weight", "{i}.shared.down.weight"),
    )


def _channel_scan(prefix: str) -> tuple[Rule, ...]:
    """The parts of a layer of Mamba-1, whose names all begin with ``prefix``."""
    return (
        *(
            rule
            for rule in _state_space(prefix)
            if not rule.parameter.endswith(("dt_bias", "recurrent.norm"))
        ),
        Rule(prefix + "x_proj.weight", "{i}.recurrent.shared.weight"),
        Rule(prefix + "dt_proj.weight", "{i}.recurrent.steps.weight"),
        Rule(prefix + "dt_proj.bias", "{i}.recurrent.steps.bias"),
        Rule(prefix + "dt_layernorm.weight", "{i}.recurrent.step_norm"),
        Rule(prefix + "b_layernorm.weight", "{i}.recurrent.write_norm"),
        Rule(prefix + "c_layernorm.weight", "{i}.recurrent.read_norm"),
    )


MAMBA = (
    Rule("backbone.embeddings.weight", "embedding"),
    Rule("backbone.embedding.weight", "embedding"),  # in older exports
    Rule("backbone.norm_f.weight", "norm"),
    Rule("backbone.layers.{i}.norm.weight", "{i}.attention_norm"),
    *_channel_scan("backbone.layers.{i}.mixer."),
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
)
JAMBA = (
    *(rule for rule in BAMBA if rule not in _MAMBA_PARTS),
    *_channel_scan(LAYER + "mamba."),
    Rule(LAYER + "feed_forward.router.weight", "{i}.router"),
    *expert_rules(LAYER + "feed_forward.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
)


# As NVIDIA publishes them, and as Hugging Face's own code names them.
NEMOTRON_H = (
    *(*_nemotron_h("backbone"), *_nemotron_h("model")),
    Rule("backbone.embedding.weight", "embedding"),  # in older exports of Mamba-2
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
)
