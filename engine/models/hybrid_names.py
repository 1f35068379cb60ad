"""Checkpoints' parameter names for models with recurrent layers."""

from __future__ import annotations

from engine.models.layouts import (
    ByKeyHead,
    DepthwiseConv,
    HeadGates,
    QueriesAndGates,
    StackedExperts,
)
from engine.models.rules import (
    ATTENTION,
    LAYER,
    MODEL,
    OLMO2,
    QWEN_MOE,
    Rule,
    expert_rules,
    stacked_rules,
)

_DELTA = LAYER + "linear_attn."
_DELTA_PARTS = (
    Rule(_DELTA + "conv1d.weight", "{i}.recurrent.conv.weight", 0, DepthwiseConv()),
    Rule(_DELTA + "A_log", "{i}.recurrent.log_a"),
    Rule(_DELTA + "dt_bias", "{i}.recurrent.dt_bias"),
    Rule(_DELTA + "norm.weight", "{i}.recurrent.norm"),
    Rule(_DELTA + "out_proj.weight", "{i}.recurrent.output.weight"),
)
# Queries and their gates in one tensor.
_GATED_QWEN = tuple(
    rule._replace(layout=QueriesAndGates()) if ".q_proj." in rule.pattern else rule
    for rule in QWEN_MOE
)
QWEN3_NEXT = (
    *(*_GATED_QWEN, *_DELTA_PARTS),
    Rule(_DELTA + "in_proj_qkvz.weight", "{i}.recurrent.input.weight", None, ByKeyHead()),
    Rule(_DELTA + "in_proj_ba.weight", "{i}.recurrent.gates.weight", None, ByKeyHead(gates=True)),
)
QWEN3_5 = (
    *(*_GATED_QWEN, *_DELTA_PARTS),
    *stacked_rules(LAYER + "mlp.experts.", StackedExperts(outputs_first=True), outputs_first=True),
    Rule(_DELTA + "in_proj_qkv.weight", "{i}.recurrent.input.weight", 0),
    Rule(_DELTA + "in_proj_z.weight", "{i}.recurrent.input.weight", 1),
    Rule(_DELTA + "in_proj_b.weight", "{i}.recurrent.gates.weight", 0),
    Rule(_DELTA + "in_proj_a.weight", "{i}.recurrent.gates.weight", 1),
)
OLMO_HYBRID = (
    *OLMO2,
    # The name in files that Hugging Face saved.
    Rule(LAYER + "feedforward_layer_norm.weight", "{i}.attention_after"),
    Rule(LAYER + "attention_layer_norm.weight", "{i}.attention_norm"),
    Rule(LAYER + "feedforward_layer_norm.weight", "{i}.mlp_norm"),
    *(
        Rule(f"{_DELTA}{name}_proj.weight", "{i}.recurrent.input.weight", part)
        for part, name in enumerate("qkvg")
    ),
    *(
        Rule(f"{_DELTA}{name}_conv1d.weight", "{i}.recurrent.conv.weight", part, DepthwiseConv())
        for part, name in enumerate("qkv")
    ),
    *(
        Rule(f"{_DELTA}{name}_proj.weight", "{i}.recurrent.gates.weight", part)
        for part, name in enumerate("ba")
    ),
    Rule(_DELTA + "A_log", "{i}.recurrent.log_a"),
    Rule(_DELTA + "dt_bias", "{i}.recurrent.dt_bias"),
    Rule(_DELTA + "o_norm.weight", "{i}.recurrent.norm"),
    Rule(_DELTA + "o_proj.weight", "{i}.recurrent.output.weight"),
)
_LFM2_MLP = LAYER + "feed_forward."
_LFM = (
    *(rule for rule in MODEL if rule.parameter != "norm"),
    Rule("model.embedding_norm.weight", "norm"),
    Rule(LAYER + "operator_norm.weight", "{i}.attention_norm"),
    Rule(LAYER + "ffn_norm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "conv.in_proj.weight", "{i}.recurrent.input.weight"),
    Rule(LAYER + "conv.in_proj.bias", "{i}.recurrent.input.bias"),
    Rule(LAYER + "conv.conv.weight", "{i}.recurrent.conv.weight", 0, DepthwiseConv()),
    Rule(LAYER + "conv.conv.bias", "{i}.recurrent.conv.bias"),
    Rule(LAYER + "conv.out_proj.weight", "{i}.recurrent.output.weight"),
    Rule(LAYER + "conv.out_proj.bias", "{i}.recurrent.output.bias"),
    Rule(_LFM2_MLP + "w1.weight", "{i}.gate_up.weight", 0),
    Rule(_LFM2_MLP + "w3.weight", "{i}.gate_up.weight", 1),
    Rule(_LFM2_MLP + "w2.weight", "{i}.down.weight"),
)
LFM2 = (
    *_LFM,
    *(rule for rule in ATTENTION if "norm" not in rule.parameter),
    Rule(LAYER + "self_attn.out_proj.weight", "{i}.output.weight"),
    Rule(LAYER + "self_attn.q_layernorm.weight", "{i}.query_norm"),
    Rule(LAYER + "self_attn.k_layernorm.weight", "{i}.key_norm"),
    Rule(_LFM2_MLP + "gate.weight", "{i}.router"),
    Rule(_LFM2_MLP + "expert_bias", "{i}.router.correction"),
    *expert_rules(_LFM2_MLP + "experts.{e}.", "w1", "w3", "w2"),
)
_LFM3_POST_NORMS = (
    Rule(LAYER + "post_operator_norm.weight", "{i}.attention_after"),
    Rule(LAYER + "post_ffn_norm.weight", "{i}.mlp_after"),
)
LFM3_UNGATED = (*_LFM, *_LFM3_POST_NORMS, *ATTENTION)
LFM3 = (
    *(*_LFM, *_LFM3_POST_NORMS),
    Rule(LAYER + "self_attn.gate_proj.weight", "{i}.qkv.weight", 0, HeadGates()),
    Rule(LAYER + "self_attn.g_proj.weight", "{i}.qkv.weight", 0, HeadGates()),
    *(
        rule._replace(part=rule.part + 1)
        for rule in ATTENTION
        if rule.parameter == "{i}.qkv.weight" and rule.part is not None
    ),
    *(rule for rule in ATTENTION if not rule.parameter.startswith("{i}.qkv.")),
)
