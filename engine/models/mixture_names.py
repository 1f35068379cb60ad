"""Checkpoints' names for the parameters of models with experts: one table per family."""

from __future__ import annotations

from engine.models.layouts import (
    SingleRow,
    StackedExperts,
    StackedExpertsByShape,
    Transposed,
)
from engine.models.rules import (
    ATTENTION,
    GRANITE_MOE,
    LAYER,
    LLAMA,
    MLP,
    MODEL,
    PRE_NORMS,
    QWEN_MOE,
    Rule,
    expert_rules,
    stacked_rules,
)

MIXTRAL = (
    *(*MODEL, *ATTENTION, *PRE_NORMS),
    Rule(LAYER + "block_sparse_moe.gate.weight", "{i}.router"),
    *expert_rules(LAYER + "block_sparse_moe.experts.{e}.", "w1", "w3", "w2"),
)


def _shared_rules(prefix: str) -> tuple[Rule, ...]:
    """A shared expert, which all tokens use."""
    return (
        Rule(f"{prefix}gate_proj.weight", "{i}.shared.gate_up.weight", 0),
        Rule(f"{prefix}up_proj.weight", "{i}.shared.gate_up.weight", 1),
        Rule(f"{prefix}down_proj.weight", "{i}.shared.down.weight"),
    )


CORRECTED = (
    Rule(LAYER + "mlp.gate.weight", "{i}.router"),
    Rule(LAYER + "mlp.gate.e_score_correction_bias", "{i}.router.correction"),
    *expert_rules(LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    *_shared_rules(LAYER + "mlp.shared_experts."),
)
GLM4_MOE = (*LLAMA, *CORRECTED)
ERNIE_MOE = (
    *(rule for rule in GLM4_MOE if not rule.parameter.endswith(".correction")),
    Rule(
        *(LAYER + "mlp.moe_statics.e_score_correction_bias", "{i}.router.correction", 0),
        SingleRow(),
    ),
)
# The routing correction bias is beside the router.
EXAONE_MOE = (
    *GLM4_MOE,
    Rule(LAYER + "mlp.e_score_correction_bias", "{i}.router.correction"),
)
HY3 = (
    *LLAMA,
    Rule(LAYER + "mlp.router.gate.weight", "{i}.router"),
    Rule(LAYER + "mlp.expert_bias", "{i}.router.correction"),
    *expert_rules(LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    *_shared_rules(LAYER + "mlp.shared_mlp."),
)


def gated_attention(gate: str) -> tuple[Rule, ...]:
    """Attention whose output is gated; ``gate`` is the gates' projection."""
    rules = (
        rule._replace(part=(rule.part or 0) + 1) if ".qkv." in rule.parameter else rule
        for rule in ATTENTION
    )
    return Rule(f"{LAYER}self_attn.{gate}.weight", "{i}.qkv.weight", 0), *rules


AFMOE = (
    *(*MODEL, *MLP, *CORRECTED, *gated_attention("gate_proj")),
    Rule(LAYER + "mlp.router.gate.weight", "{i}.router"),
    Rule(LAYER + "mlp.expert_bias", "{i}.router.correction"),
    Rule(LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(LAYER + "pre_mlp_layernorm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "post_mlp_layernorm.weight", "{i}.mlp_after"),
)
KOLIBRI = (
    *(*MODEL, *ATTENTION, *CORRECTED),
    Rule(LAYER + "moe.router.expert_bias", "{i}.router.correction"),  # as published
    Rule(LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "post_attn_norm.weight", "{i}.attention_after"),
    Rule(LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "post_ffn_norm.weight", "{i}.mlp_after"),
)
LAGUNA = (
    *(*MODEL, *MLP, *PRE_NORMS, *CORRECTED, *gated_attention("g_proj")),
    # As published.
    Rule(LAYER + "mlp.experts.e_score_correction_bias", "{i}.router.correction"),
    *_shared_rules(LAYER + "mlp.shared_expert."),
)
MINIMAX_M2 = (
    *MIXTRAL,
    Rule(LAYER + "block_sparse_moe.e_score_correction_bias", "{i}.router.correction"),
)
HUNYUAN = (
    *(rule for rule in LLAMA if not rule.parameter.endswith(("query_norm", "key_norm"))),
    Rule(LAYER + "self_attn.query_layernorm.weight", "{i}.query_norm"),
    Rule(LAYER + "self_attn.key_layernorm.weight", "{i}.key_norm"),
    Rule(LAYER + "mlp.gate.wg.weight", "{i}.router"),
    *expert_rules(LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    *_shared_rules(LAYER + "mlp.shared_mlp."),
)
_DEEPSEEK = (
    *(*MODEL, *MLP, *PRE_NORMS, *CORRECTED),
    # As in Mistral Small 4.
    *stacked_rules(LAYER + "mlp.experts.", StackedExperts(outputs_first=True), outputs_first=True),
    Rule(LAYER + "self_attn.kv_a_proj_with_mqa.weight", "{i}.qkv.weight", 1),
    Rule(LAYER + "self_attn.kv_a_proj_with_mqa.bias", "{i}.qkv.bias", 1),
    Rule(LAYER + "self_attn.kv_a_layernorm.weight", "{i}.latent_norm"),
    Rule(LAYER + "self_attn.kv_b_proj.weight", "{i}.latent_up"),
    Rule(LAYER + "self_attn.o_proj.weight", "{i}.output.weight"),
    Rule(LAYER + "self_attn.o_proj.bias", "{i}.output.bias"),
)
_DBRX = "transformer.blocks.{i}."
_DBRX_EXPERTS = _DBRX + "ffn.experts.mlp.{e}."  # in one tensor of all (``expert_rows.py``)
DBRX = (
    Rule("transformer.wte.weight", "embedding"),
    Rule("transformer.norm_f.weight", "norm"),
    Rule("lm_head.weight", "head"),
    Rule(_DBRX + "norm_attn_norm.norm_1.weight", "{i}.attention_norm"),
    Rule(_DBRX + "norm_attn_norm.attn.Wqkv.weight", "{i}.qkv.weight", None),
    Rule(_DBRX + "norm_attn_norm.attn.out_proj.weight", "{i}.output.weight"),
    Rule(_DBRX + "norm_attn_norm.norm_2.weight", "{i}.mlp_norm"),
    Rule(_DBRX + "ffn.router.layer.weight", "{i}.router"),
    Rule(_DBRX_EXPERTS + "w1", "{i}.experts.gate_up", 0, None, 2),
    Rule(_DBRX_EXPERTS + "v1", "{i}.experts.gate_up", 1, None, 2),
    Rule(_DBRX_EXPERTS + "w2", "{i}.experts.down", 0, Transposed()),
)
STEP3 = (
    *(*MODEL, *MLP, *PRE_NORMS, *gated_attention("g_proj")),
    Rule(LAYER + "moe.gate.weight", "{i}.router"),
    Rule(LAYER + "moe.router_bias", "{i}.router.correction"),
    # In the files all experts of a layer are one tensor (``expert_rows.py``).
    *expert_rules(LAYER + "moe.", "gate_proj.{e}", "up_proj.{e}", "down_proj.{e}"),
    *_shared_rules(LAYER + "share_expert."),
)
DEEPSEEK_PLAIN = (
    *_DEEPSEEK,
    Rule(LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
)
DEEPSEEK_RANKED = (
    *_DEEPSEEK,
    Rule(LAYER + "self_attn.q_a_proj.weight", "{i}.qkv.weight", 0),
    Rule(LAYER + "self_attn.q_a_proj.bias", "{i}.qkv.bias", 0),
    Rule(LAYER + "self_attn.q_a_layernorm.weight", "{i}.query_norm"),
    Rule(LAYER + "self_attn.q_b_proj.weight", "{i}.query_up.weight"),
)
# Layers without experts have the norm in the files alone.
AXK1 = (*DEEPSEEK_RANKED, Rule(LAYER + "post_mlp_layernorm.weight", "{i}.mlp_after"))
_INDEXER = LAYER + "self_attn.indexer."
DEEPSEEK_SPARSE = (
    *DEEPSEEK_RANKED,
    Rule(_INDEXER + "wq_b.weight", "{i}.index.query.weight"),
    Rule(_INDEXER + "wk.weight", "{i}.index.key.weight"),
    Rule(_INDEXER + "k_norm.weight", "{i}.index.key_norm"),
    Rule(_INDEXER + "k_norm.bias", "{i}.index.key_norm.bias"),
    Rule(_INDEXER + "weights_proj.weight", "{i}.index.weights"),
)


def _gated_norm(name: str, parameter: str) -> tuple[Rule, ...]:
    """A norm whose output a low-rank MLP gates, as published and as transformers names it."""
    prefix, gate = f"{LAYER}{name}.", f"{{i}}.{parameter}.gate_"
    return (
        Rule(f"{prefix}norm.weight", f"{{i}}.{parameter}"),
        Rule(f"{prefix}W_down.weight", f"{gate}down.weight"),
        Rule(f"{prefix}W_up.weight", f"{gate}up.weight"),
        Rule(f"{prefix}mlp.fc1.weight", f"{gate}down.weight"),
        Rule(f"{prefix}mlp.fc2.weight", f"{gate}up.weight"),
    )


# Without experts, the norm before the MLP has no gate.
AXK2 = (
    *(rule for rule in DEEPSEEK_SPARSE if rule.parameter != "{i}.attention_norm"),
    *_gated_norm("input_layernorm", "attention_norm"),
    *_gated_norm("post_attention_layernorm", "mlp_norm"),
    Rule(LAYER + "self_attn.q_gate_proj.weight", "{i}.query_up.weight"),
)
# A layer has two of everything but experts.
_LONGCAT_HALVES = {
    "self_attn.": "self_attn.{m}.",
    "input_layernorm.": "input_layernorm.{m}.",
    "post_attention_layernorm.": "post_attention_layernorm.{m}.",
    **{f"mlp.{name}_proj.": f"mlps.{{m}}.{name}_proj." for name in ("gate", "up", "down")},
    "mlp.gate.weight": "mlp.router.classifier.weight",
    "mlp.gate.e_score": "mlp.router.e_score",
}


def _in_half(rule: Rule) -> Rule:
    own = rule.pattern.removeprefix(LAYER)
    for name, placed in _LONGCAT_HALVES.items():
        if own.startswith(name):
            return rule._replace(pattern=LAYER + placed + own.removeprefix(name))
    return rule


LONGCAT_FLASH = tuple(map(_in_half, DEEPSEEK_RANKED))
_LLAMA4_MLP = LAYER + "feed_forward."
LLAMA4 = (
    *(*MODEL, *ATTENTION, *PRE_NORMS),
    Rule(_LLAMA4_MLP + "gate_proj.weight", "{i}.gate_up.weight", 0),
    Rule(_LLAMA4_MLP + "up_proj.weight", "{i}.gate_up.weight", 1),
    Rule(_LLAMA4_MLP + "down_proj.weight", "{i}.down.weight"),
    Rule(_LLAMA4_MLP + "router.weight", "{i}.router"),
    *stacked_rules(_LLAMA4_MLP + "experts.", StackedExperts()),
    # As tools that quantise matrices alone save them.
    *expert_rules(_LLAMA4_MLP + "experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    *_shared_rules(_LLAMA4_MLP + "shared_expert."),
)
SINKS = Rule(LAYER + "self_attn.sinks", "{i}.sinks")
GPT_OSS = (
    *(*MODEL, *ATTENTION, *PRE_NORMS),
    SINKS,
    Rule(LAYER + "mlp.router.weight", "{i}.router"),
    Rule(LAYER + "mlp.router.bias", "{i}.router.bias"),
    *stacked_rules(LAYER + "mlp.experts.", StackedExperts(interleaved=True)),
)

# As published, and as transformers names it.
FLINT = (*QWEN_MOE, SINKS, Rule(LAYER + "self_attn.softmax_offset", "{i}.sinks"))
MIMO_V2 = (
    *(*GLM4_MOE, SINKS),
    Rule(LAYER + "self_attn.attention_sink_bias", "{i}.sinks"),  # as published
)
GRANITE_MOE_SWA = (
    *(*GRANITE_MOE, SINKS),
    Rule(LAYER + "block_sparse_moe.router.weight", "{i}.router"),
    *stacked_rules(
        LAYER + "block_sparse_moe.experts.",
        StackedExperts(outputs_first=True),
        outputs_first=True,
    ),
)

QWEN3_VL_MOE = (
    *QWEN_MOE,
    Rule(LAYER + "mlp.experts.gate_up_proj", "{i}.experts.gate_up", None, StackedExpertsByShape()),
    Rule(LAYER + "mlp.experts.down_proj", "{i}.experts.down", None, StackedExpertsByShape()),
)
