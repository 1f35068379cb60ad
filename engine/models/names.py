"""What checkpoints call the parameters of a decoder: a table for each family."""

from __future__ import annotations

import re
from typing import NamedTuple

from engine.models.layouts import HeadByHead, Layout, OneRow, StackedExperts, Transposed


class Rule(NamedTuple):
    """Checkpoint tensors whose names match ``pattern`` fill a part of a parameter.

    ``{i}`` in the pattern stands for the layer's number, and in the parameter is replaced by it.
    ``{e}`` stands for an expert's, whose parts lie ``parts_an_expert`` after the one's before.
    """

    pattern: str
    parameter: str
    part: int | None = 0  # None: it fills all parts
    layout: Layout | None = None
    parts_an_expert: int = 1


def rules_of(architecture: str) -> tuple[Rule, ...]:
    """The names of a Hugging Face model_type (or of a ``DecoderSpec.naming``); Llama's where it
    has none of its own."""
    return _TABLES.get(architecture, _LLAMA)


def _experts(prefix: str, gate: str, up: str, down: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{prefix}{gate}.weight", "{i}.experts.gate_up", 0, None, 2),
        Rule(f"{prefix}{up}.weight", "{i}.experts.gate_up", 1, None, 2),
        Rule(f"{prefix}{down}.weight", "{i}.experts.down"),
    )


def _stacked(prefix: str, gate_up: Layout) -> tuple[Rule, ...]:
    """Experts of a layer in one tensor."""
    return (
        Rule(f"{prefix}gate_up_proj", "{i}.experts.gate_up", None, gate_up),
        Rule(f"{prefix}gate_up_proj_bias", "{i}.experts.gate_up.bias", None, gate_up),
        Rule(f"{prefix}down_proj", "{i}.experts.down", None, StackedExperts()),
        Rule(f"{prefix}down_proj_bias", "{i}.experts.down.bias", None, StackedExperts()),
    )


_LAYER = "model.layers.{i}."
_MODEL = (
    Rule("model.embed_tokens.weight", "embedding"),
    Rule("model.norm.weight", "norm"),
    Rule("model.norm.bias", "norm.bias"),
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
)
_ATTENTION = (
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
)
_MLP = (
    Rule(_LAYER + "mlp.gate_proj.weight", "{i}.gate_up.weight", 0),
    Rule(_LAYER + "mlp.up_proj.weight", "{i}.gate_up.weight", 1),
    Rule(_LAYER + "mlp.gate_proj.bias", "{i}.gate_up.bias", 0),
    Rule(_LAYER + "mlp.up_proj.bias", "{i}.gate_up.bias", 1),
    Rule(_LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
    Rule(_LAYER + "mlp.down_proj.bias", "{i}.down.bias"),
)
_PRE_NORMS = (
    Rule(_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(_LAYER + "input_layernorm.bias", "{i}.attention_norm.bias"),
    Rule(_LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(_LAYER + "post_attention_layernorm.bias", "{i}.mlp_norm.bias"),
)
_LLAMA = (*_MODEL, *_ATTENTION, *_MLP, *_PRE_NORMS)

_GEMMA2 = (
    *(*_MODEL, *_ATTENTION, *_MLP),
    Rule(_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(_LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(_LAYER + "pre_feedforward_layernorm.weight", "{i}.mlp_norm"),
    Rule(_LAYER + "post_feedforward_layernorm.weight", "{i}.mlp_after"),
)
_OLMO2 = (
    *(*_MODEL, *_ATTENTION, *_MLP),
    Rule(_LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(_LAYER + "post_feedforward_layernorm.weight", "{i}.mlp_after"),
)
_GLM = (
    *(*_MODEL, *_ATTENTION, *_PRE_NORMS),
    Rule(_LAYER + "mlp.gate_up_proj.weight", "{i}.gate_up.weight", None),
    Rule(_LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
)
_GLM4 = (
    *(*_MODEL, *_ATTENTION, *_GLM[-2:]),
    Rule(_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(_LAYER + "post_self_attn_layernorm.weight", "{i}.attention_after"),
    Rule(_LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(_LAYER + "post_mlp_layernorm.weight", "{i}.mlp_after"),
)
_HYPERCLOVAX = (
    *_LLAMA,
    Rule(_LAYER + "post_norm1.weight", "{i}.attention_after"),
    Rule(_LAYER + "post_norm2.weight", "{i}.mlp_after"),
)


def _ungated(up: str, down: str) -> tuple[Rule, ...]:
    return (
        *(*_MODEL, *_ATTENTION, *_PRE_NORMS),
        Rule(f"{_LAYER}mlp.{up}.weight", "{i}.gate_up.weight"),
        Rule(f"{_LAYER}mlp.{up}.bias", "{i}.gate_up.bias"),
        Rule(f"{_LAYER}mlp.{down}.weight", "{i}.down.weight"),
        Rule(f"{_LAYER}mlp.{down}.bias", "{i}.down.bias"),
    )


_UNGATED = _ungated("up_proj", "down_proj")
_STARCODER2 = _ungated("c_fc", "c_proj")
_PHI3 = (
    *(*_MODEL, *_PRE_NORMS),
    Rule(_LAYER + "self_attn.qkv_proj.weight", "{i}.qkv.weight", None),
    Rule(_LAYER + "self_attn.o_proj.weight", "{i}.output.weight"),
    Rule(_LAYER + "mlp.gate_up_proj.weight", "{i}.gate_up.weight", None),
    Rule(_LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
)

_NEOX_LAYER = "gpt_neox.layers.{i}."
_GPT_NEOX = (
    Rule("gpt_neox.embed_in.weight", "embedding"),
    Rule("gpt_neox.final_layer_norm.weight", "norm"),
    Rule("gpt_neox.final_layer_norm.bias", "norm.bias"),
    Rule("embed_out.weight", "head"),
    Rule("score.weight", "score"),
    Rule(_NEOX_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(_NEOX_LAYER + "input_layernorm.bias", "{i}.attention_norm.bias"),
    Rule(_NEOX_LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(_NEOX_LAYER + "post_attention_layernorm.bias", "{i}.mlp_norm.bias"),
    Rule(_NEOX_LAYER + "attention.query_key_value.weight", "{i}.qkv.weight", None, HeadByHead()),
    Rule(_NEOX_LAYER + "attention.query_key_value.bias", "{i}.qkv.bias", None, HeadByHead()),
    Rule(_NEOX_LAYER + "attention.dense.weight", "{i}.output.weight"),
    Rule(_NEOX_LAYER + "attention.dense.bias", "{i}.output.bias"),
    Rule(_NEOX_LAYER + "mlp.dense_h_to_4h.weight", "{i}.gate_up.weight"),
    Rule(_NEOX_LAYER + "mlp.dense_h_to_4h.bias", "{i}.gate_up.bias"),
    Rule(_NEOX_LAYER + "mlp.dense_4h_to_h.weight", "{i}.down.weight"),
    Rule(_NEOX_LAYER + "mlp.dense_4h_to_h.bias", "{i}.down.bias"),
)

_FALCON_LAYER = "transformer.h.{i}."
_FALCON_BODY = (
    Rule("transformer.word_embeddings.weight", "embedding"),
    Rule("transformer.ln_f.weight", "norm"),
    Rule("transformer.ln_f.bias", "norm.bias"),
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
    Rule(
        *(_FALCON_LAYER + "self_attention.query_key_value.weight", "{i}.qkv.weight", None),
        HeadByHead(),
    ),
    Rule(
        *(_FALCON_LAYER + "self_attention.query_key_value.bias", "{i}.qkv.bias", None),
        HeadByHead(),
    ),
    Rule(_FALCON_LAYER + "self_attention.dense.weight", "{i}.output.weight"),
    Rule(_FALCON_LAYER + "self_attention.dense.bias", "{i}.output.bias"),
    Rule(_FALCON_LAYER + "mlp.dense_h_to_4h.weight", "{i}.gate_up.weight"),
    Rule(_FALCON_LAYER + "mlp.dense_h_to_4h.bias", "{i}.gate_up.bias"),
    Rule(_FALCON_LAYER + "mlp.dense_4h_to_h.weight", "{i}.down.weight"),
    Rule(_FALCON_LAYER + "mlp.dense_4h_to_h.bias", "{i}.down.bias"),
)


def _falcon_norms(attention: str, mlp: str) -> tuple[Rule, ...]:
    return (
        Rule(f"{_FALCON_LAYER}{attention}.weight", "{i}.attention_norm"),
        Rule(f"{_FALCON_LAYER}{attention}.bias", "{i}.attention_norm.bias"),
        Rule(f"{_FALCON_LAYER}{mlp}.weight", "{i}.mlp_norm"),
        Rule(f"{_FALCON_LAYER}{mlp}.bias", "{i}.mlp_norm.bias"),
    )


_FALCON = (*_FALCON_BODY, *_falcon_norms("input_layernorm", "post_attention_layernorm"))
_FALCON_TWO_NORMS = (*_FALCON_BODY, *_falcon_norms("ln_attn", "ln_mlp"))

_GPT2 = (
    Rule("transformer.wte.weight", "embedding"),
    Rule("transformer.wpe.weight", "positions"),
    Rule("transformer.ln_f.weight", "norm"),
    Rule("transformer.ln_f.bias", "norm.bias"),
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
    Rule("transformer.h.{i}.ln_1.weight", "{i}.attention_norm"),
    Rule("transformer.h.{i}.ln_1.bias", "{i}.attention_norm.bias"),
    Rule("transformer.h.{i}.attn.c_attn.weight", "{i}.qkv.weight", None, Transposed()),
    Rule("transformer.h.{i}.attn.c_attn.bias", "{i}.qkv.bias", None),
    Rule("transformer.h.{i}.attn.c_proj.weight", "{i}.output.weight", 0, Transposed()),
    Rule("transformer.h.{i}.attn.c_proj.bias", "{i}.output.bias"),
    Rule("transformer.h.{i}.ln_2.weight", "{i}.mlp_norm"),
    Rule("transformer.h.{i}.ln_2.bias", "{i}.mlp_norm.bias"),
    Rule("transformer.h.{i}.mlp.c_fc.weight", "{i}.gate_up.weight", 0, Transposed()),
    Rule("transformer.h.{i}.mlp.c_fc.bias", "{i}.gate_up.bias"),
    Rule("transformer.h.{i}.mlp.c_proj.weight", "{i}.down.weight", 0, Transposed()),
    Rule("transformer.h.{i}.mlp.c_proj.bias", "{i}.down.bias"),
)

_MIXTRAL = (
    *(*_MODEL, *_ATTENTION, *_PRE_NORMS),
    Rule(_LAYER + "block_sparse_moe.gate.weight", "{i}.router"),
    *_experts(_LAYER + "block_sparse_moe.experts.{e}.", "w1", "w3", "w2"),
)
_QWEN_MOE = (
    *_LLAMA,
    Rule(_LAYER + "mlp.gate.weight", "{i}.router"),
    *_experts(_LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    Rule(_LAYER + "mlp.shared_expert.gate_proj.weight", "{i}.shared.gate_up.weight", 0),
    Rule(_LAYER + "mlp.shared_expert.up_proj.weight", "{i}.shared.gate_up.weight", 1),
    Rule(_LAYER + "mlp.shared_expert.down_proj.weight", "{i}.shared.down.weight"),
    Rule(_LAYER + "mlp.shared_expert_gate.weight", "{i}.shared.gate"),
)

_CORRECTED = (
    Rule(_LAYER + "mlp.gate.weight", "{i}.router"),
    Rule(_LAYER + "mlp.gate.e_score_correction_bias", "{i}.router.correction"),
    *_experts(_LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    Rule(_LAYER + "mlp.shared_experts.gate_proj.weight", "{i}.shared.gate_up.weight", 0),
    Rule(_LAYER + "mlp.shared_experts.up_proj.weight", "{i}.shared.gate_up.weight", 1),
    Rule(_LAYER + "mlp.shared_experts.down_proj.weight", "{i}.shared.down.weight"),
)
_GLM4_MOE = (*_LLAMA, *_CORRECTED)
_ERNIE_MOE = (
    *(rule for rule in _GLM4_MOE if not rule.parameter.endswith(".correction")),
    Rule(
        *(_LAYER + "mlp.moe_statics.e_score_correction_bias", "{i}.router.correction", 0),
        OneRow(),
    ),
)
_MINIMAX_M2 = (
    *_MIXTRAL,
    Rule(_LAYER + "block_sparse_moe.e_score_correction_bias", "{i}.router.correction"),
)
_HUNYUAN = (
    *(rule for rule in _LLAMA if not rule.parameter.endswith(("query_norm", "key_norm"))),
    Rule(_LAYER + "self_attn.query_layernorm.weight", "{i}.query_norm"),
    Rule(_LAYER + "self_attn.key_layernorm.weight", "{i}.key_norm"),
    Rule(_LAYER + "mlp.gate.wg.weight", "{i}.router"),
    *_experts(_LAYER + "mlp.experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    Rule(_LAYER + "mlp.shared_mlp.gate_proj.weight", "{i}.shared.gate_up.weight", 0),
    Rule(_LAYER + "mlp.shared_mlp.up_proj.weight", "{i}.shared.gate_up.weight", 1),
    Rule(_LAYER + "mlp.shared_mlp.down_proj.weight", "{i}.shared.down.weight"),
)
_GRANITE_MOE_LAYER = _LAYER + "block_sparse_moe."
_GRANITE_MOE = (
    *(*_MODEL, *_ATTENTION, *_PRE_NORMS),
    Rule(_GRANITE_MOE_LAYER + "router.layer.weight", "{i}.router"),
    Rule(
        *(_GRANITE_MOE_LAYER + "input_linear.weight", "{i}.experts.gate_up", None),
        StackedExperts(outputs_first=True),
    ),
    Rule(
        *(_GRANITE_MOE_LAYER + "output_linear.weight", "{i}.experts.down", None),
        StackedExperts(outputs_first=True),
    ),
    Rule(_LAYER + "shared_mlp.input_linear.weight", "{i}.shared.gate_up.weight", None),
    Rule(_LAYER + "shared_mlp.output_linear.weight", "{i}.shared.down.weight"),
)
_DEEPSEEK = (
    *(*_MODEL, *_MLP, *_PRE_NORMS, *_CORRECTED),
    Rule(_LAYER + "self_attn.kv_a_proj_with_mqa.weight", "{i}.qkv.weight", 1),
    Rule(_LAYER + "self_attn.kv_a_proj_with_mqa.bias", "{i}.qkv.bias", 1),
    Rule(_LAYER + "self_attn.kv_a_layernorm.weight", "{i}.latent_norm"),
    Rule(_LAYER + "self_attn.kv_b_proj.weight", "{i}.latent_up"),
    Rule(_LAYER + "self_attn.o_proj.weight", "{i}.output.weight"),
    Rule(_LAYER + "self_attn.o_proj.bias", "{i}.output.bias"),
)
_DEEPSEEK_PLAIN = (
    *_DEEPSEEK,
    Rule(_LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
)
_DEEPSEEK_RANKED = (
    *_DEEPSEEK,
    Rule(_LAYER + "self_attn.q_a_proj.weight", "{i}.qkv.weight", 0),
    Rule(_LAYER + "self_attn.q_a_proj.bias", "{i}.qkv.bias", 0),
    Rule(_LAYER + "self_attn.q_a_layernorm.weight", "{i}.query_norm"),
    Rule(_LAYER + "self_attn.q_b_proj.weight", "{i}.query_up.weight"),
)
_LLAMA4_MLP = _LAYER + "feed_forward."
_LLAMA4 = (
    *(*_MODEL, *_ATTENTION, *_PRE_NORMS),
    Rule(_LLAMA4_MLP + "gate_proj.weight", "{i}.gate_up.weight", 0),
    Rule(_LLAMA4_MLP + "up_proj.weight", "{i}.gate_up.weight", 1),
    Rule(_LLAMA4_MLP + "down_proj.weight", "{i}.down.weight"),
    Rule(_LLAMA4_MLP + "router.weight", "{i}.router"),
    *_stacked(_LLAMA4_MLP + "experts.", StackedExperts()),
    Rule(_LLAMA4_MLP + "shared_expert.gate_proj.weight", "{i}.shared.gate_up.weight", 0),
    Rule(_LLAMA4_MLP + "shared_expert.up_proj.weight", "{i}.shared.gate_up.weight", 1),
    Rule(_LLAMA4_MLP + "shared_expert.down_proj.weight", "{i}.shared.down.weight"),
)
_GPT_OSS = (
    *(*_MODEL, *_ATTENTION, *_PRE_NORMS),
    Rule(_LAYER + "self_attn.sinks", "{i}.sinks"),
    Rule(_LAYER + "mlp.router.weight", "{i}.router"),
    Rule(_LAYER + "mlp.router.bias", "{i}.router.bias"),
    *_stacked(_LAYER + "mlp.experts.", StackedExperts(in_turn=True)),
)


def _in_language_model(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A whole text model within one that reads images."""
    return tuple(rule._replace(pattern="language_model." + rule.pattern) for rule in rules)


# Here the head is the whole model's own.
_QWEN3_VL = tuple(
    rule._replace(pattern=re.sub(r"^model\.", "model.language_model.", rule.pattern))
    for rule in _LLAMA
)

_TABLES = {
    "arcee": _UNGATED,
    "deepseek": _DEEPSEEK_PLAIN,
    "deepseek_ranked": _DEEPSEEK_RANKED,
    "dots1": _GLM4_MOE,
    "ernie4_5_moe": _ERNIE_MOE,
    "exaone4": _OLMO2,
    "falcon": _FALCON,
    "falcon_two_norms": _FALCON_TWO_NORMS,
    "gemma2": _GEMMA2,
    "gemma3": _in_language_model(_GEMMA2),
    "gemma3_text": _GEMMA2,
    "glm": _GLM,
    "glm4": _GLM4,
    "glm4_moe": _GLM4_MOE,
    "gpt2": _GPT2,
    "gpt_neox": _GPT_NEOX,
    "gpt_oss": _GPT_OSS,
    "granitemoe": _GRANITE_MOE,
    "granitemoeshared": _GRANITE_MOE,
    "hunyuan_v1_dense": _HUNYUAN,
    "hunyuan_v1_moe": _HUNYUAN,
    "hyperclovax": _HYPERCLOVAX,
    "jais2": _UNGATED,
    "llama4": _in_language_model(_LLAMA4),
    "llama4_text": _LLAMA4,
    "minimax_m2": _MINIMAX_M2,
    "mistral3": _in_language_model(_LLAMA),
    "mixtral": _MIXTRAL,
    "nemotron": _UNGATED,
    "olmo2": _OLMO2,
    "olmo3": _OLMO2,
    "olmoe": _QWEN_MOE,
    "phi3": _PHI3,
    "qwen2_moe": _QWEN_MOE,
    "qwen3_moe": _QWEN_MOE,
    "qwen3_vl": _QWEN3_VL,
    "solar_open": _GLM4_MOE,
    "starcoder2": _STARCODER2,
}
