"""The entries of checkpoint name tables, and entries shared by many families."""

from __future__ import annotations

from typing import NamedTuple

from engine.models.layouts import Layout, StackedExperts


class Rule(NamedTuple):
    """Checkpoint tensors whose names match ``pattern`` fill a part of a parameter.

    ``{i}`` is the layer's number, in the pattern and in the parameter. ``{m}`` is the number of its
    MLP, in checkpoints that count it as a layer, or of a half of the checkpoint's layer. ``{e}`` is
    an expert's number; an expert's parts come ``parts_per_expert`` after the previous one's.
    ``{h}`` is a head's number, and its part's. Rules for the same part are alternative names, of
    which a checkpoint has one.
    """

    pattern: str
    parameter: str
    part: int | None = 0  # None: it fills all parts
    layout: Layout | None = None
    parts_per_expert: int = 1


def expert_rules(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    """The experts of a layer one by one."""
    return (
        Rule(f"{prefix}{gate}.weight", "{i}.experts.gate_up", 0, None, 2),
        Rule(f"{prefix}{up}.weight", "{i}.experts.gate_up", 1, None, 2),
        Rule(f"{prefix}{down}.weight", "{i}.experts.down"),
    )


def stacked_rules(prefix: str, gate_up: Layout, *, outputs_first: bool = False) -> tuple[Rule, ...]:
    """The experts of a layer in one tensor."""
    down = StackedExperts(outputs_first=outputs_first)
    return (
        Rule(f"{prefix}gate_up_proj", "{i}.experts.gate_up", None, gate_up),
        Rule(f"{prefix}gate_up_proj_bias", "{i}.experts.gate_up.bias", None, gate_up),
        Rule(f"{prefix}down_proj", "{i}.experts.down", None, down),
        Rule(f"{prefix}down_proj_bias", "{i}.experts.down.bias", None, down),
    )


LAYER = "model.layers.{i}."
MODEL = (
    Rule("model.embed_tokens.weight", "embedding"),
    Rule("model.norm.weight", "norm"),
    Rule("model.norm.bias", "norm.bias"),
    Rule("lm_head.weight", "head"),
    Rule("lm_head.bias", "head.bias"),
    Rule("score.weight", "score"),
)
ATTENTION = (
    Rule(LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(LAYER + "self_attn.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(LAYER + "self_attn.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(LAYER + "self_attn.q_proj.bias", "{i}.qkv.bias", 0),
    Rule(LAYER + "self_attn.k_proj.bias", "{i}.qkv.bias", 1),
    Rule(LAYER + "self_attn.v_proj.bias", "{i}.qkv.bias", 2),
    Rule(LAYER + "self_attn.q_norm.weight", "{i}.query_norm"),
    Rule(LAYER + "self_attn.k_norm.weight", "{i}.key_norm"),
    Rule(LAYER + "self_attn.o_proj.weight", "{i}.output.weight"),
    Rule(LAYER + "self_attn.o_proj.bias", "{i}.output.bias"),
)
MLP = (
    Rule(LAYER + "mlp.gate_proj.weight", "{i}.gate_up.weight", 0),
    Rule(LAYER + "mlp.up_proj.weight", "{i}.gate_up.weight", 1),
    Rule(LAYER + "mlp.gate_proj.bias", "{i}.gate_up.bias", 0),
    Rule(LAYER + "mlp.up_proj.bias", "{i}.gate_up.bias", 1),
    Rule(LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
    Rule(LAYER + "mlp.down_proj.bias", "{i}.down.bias"),
)
PRE_NORMS = (
    Rule(LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "input_layernorm.bias", "{i}.attention_norm.bias"),
    Rule(LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "post_attention_layernorm.bias", "{i}.mlp_norm.bias"),
)
LLAMA = (*MODEL, *ATTENTION, *MLP, *PRE_NORMS)

OLMO2 = (
    *(*MODEL, *ATTENTION, *MLP),
    Rule(LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(LAYER + "post_feedforward_layernorm.weight", "{i}.mlp_after"),
)
QWEN_MOE = (
    *LLAMA,
    Rule(LAYER + "mlp.gate.weight", "{i}.router"),
    *expert_rules(LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    Rule(LAYER + "mlp.shared_expert.gate_proj.weight", "{i}.shared.gate_up.weight", 0),
    Rule(LAYER + "mlp.shared_expert.up_proj.weight", "{i}.shared.gate_up.weight", 1),
    Rule(LAYER + "mlp.shared_expert.down_proj.weight", "{i}.shared.down.weight"),
    Rule(LAYER + "mlp.shared_expert_gate.weight", "{i}.shared.gate"),
)
FLEX_OLMO = (
    *OLMO2,
    Rule(LAYER + "mlp.gate.weight", "{i}.router"),
    *expert_rules(LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
)
_GRANITE_EXPERTS = LAYER + "block_sparse_moe."
GRANITE_MOE = (
    *(*MODEL, *ATTENTION, *PRE_NORMS),
    Rule(_GRANITE_EXPERTS + "router.layer.weight", "{i}.router"),
    Rule(
        *(_GRANITE_EXPERTS + "input_linear.weight", "{i}.experts.gate_up", None),
        StackedExperts(outputs_first=True),
    ),
    Rule(
        *(_GRANITE_EXPERTS + "output_linear.weight", "{i}.experts.down", None),
        StackedExperts(outputs_first=True),
    ),
    Rule(LAYER + "shared_mlp.input_linear.weight", "{i}.shared.gate_up.weight", None),
    Rule(LAYER + "shared_mlp.output_linear.weight", "{i}.shared.down.weight"),
)
