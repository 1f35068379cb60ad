"""Checkpoints' names for a decoder's parameters: one table per family."""

from __future__ import annotations

import re

from engine.models.falcon_names import BLOOM, FALCON, FALCON_TWO_NORMS, GPT_NEOX, MPT
from engine.models.gpt_names import CODEGEN, GPT_NEO, GPTJ, PHI
from engine.models.hybrid_names import LFM2, LFM3, LFM3_UNGATED, OLMO_HYBRID, QWEN3_5, QWEN3_NEXT
from engine.models.kimi_names import KIMI_LINEAR, LING3
from engine.models.layouts import (
    Layout,
    NormedRows,
    OneOfRows,
    QkvByKvHead,
    RowOffset,
    StackedExperts,
    Transposed,
)
from engine.models.mamba_names import BAMBA, FALCON_H1, GRANITE_HYBRID, JAMBA, MAMBA, NEMOTRON_H
from engine.models.mixture_names import (
    AFMOE,
    AXK1,
    AXK2,
    DBRX,
    DEEPSEEK_PLAIN,
    DEEPSEEK_RANKED,
    DEEPSEEK_SPARSE,
    ERNIE_MOE,
    EXAONE_MOE,
    FLINT,
    GLM4_MOE,
    GPT_OSS,
    GRANITE_MOE_SWA,
    HUNYUAN,
    HY3,
    KOLIBRI,
    LAGUNA,
    LLAMA4,
    LONGCAT_FLASH,
    MIMO_V2,
    MINIMAX_M2,
    MIXTRAL,
    QWEN3_VL_MOE,
    SINKS,
    STEP3,
    gated_attention,
)
from engine.models.rules import (
    ATTENTION,
    FLEX_OLMO,
    GRANITE_MOE,
    LAYER,
    LLAMA,
    MLP,
    MODEL,
    OLMO2,
    PRE_NORMS,
    QWEN_MOE,
    Rule,
    expert_rules,
    stacked_rules,
)
from engine.models.whisper_names import WHISPER


def rules_of(architecture: str) -> tuple[Rule, ...]:
    """Return the rules of a Hugging Face model_type or ``DecoderSpec.naming``; default: Llama's.

    ``outer/x`` and ``whole/x`` are x's, nested in a model that reads images.
    """
    outer, _, inner = architecture.rpartition("/")
    if outer:
        return _NESTED[outer](rules_of(inner))
    return _TABLES.get(architecture, LLAMA)


_GEMMA2 = (
    *(*MODEL, *ATTENTION, *MLP),
    Rule(LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(LAYER + "pre_feedforward_layernorm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "post_feedforward_layernorm.weight", "{i}.mlp_after"),
)
_GEMMA4 = (
    *_GEMMA2,
    Rule(LAYER + "layer_scalar", "{i}.scale"),
    Rule("model.embed_tokens_per_layer.weight", "per_layer.embedding"),
    Rule("model.per_layer_model_projection.weight", "per_layer.projection.weight"),
    Rule("model.per_layer_projection_norm.weight", "per_layer.norm"),
    Rule(LAYER + "per_layer_input_gate.weight", "{i}.per_layer.gate.weight"),
    Rule(LAYER + "per_layer_projection.weight", "{i}.per_layer.output.weight"),
    Rule(LAYER + "post_per_layer_input_norm.weight", "{i}.per_layer.after"),
    Rule(LAYER + "router.proj.weight", "{i}.router"),
    Rule(LAYER + "router.scale", "{i}.router.norm"),
    Rule(LAYER + "router.per_expert_scale", "{i}.experts.scale"),
    *stacked_rules(LAYER + "experts.", StackedExperts(outputs_first=True), outputs_first=True),
    # As tools that quantise matrices alone save them.
    *expert_rules(LAYER + "experts.{e}.", "gate_proj", "up_proj", "down_proj"),
    Rule(LAYER + "post_feedforward_layernorm_1.weight", "{i}.mlp_own_after"),
    Rule(LAYER + "pre_feedforward_layernorm_2.weight", "{i}.experts_norm"),
    Rule(LAYER + "post_feedforward_layernorm_2.weight", "{i}.experts_after"),
)
_GEMMA3N = (
    *_GEMMA2,
    *(rule for rule in _GEMMA4 if "per_layer" in rule.parameter),
    *(
        Rule(f"model.altup_projections.{stream}.weight", "altup.enter.weight", stream)
        for stream in range(8)
    ),
    *(
        Rule(f"model.altup_unembed_projections.{stream}.weight", f"altup.leave.{stream + 1}.weight")
        for stream in range(8)
    ),
    Rule(LAYER + "altup.modality_router.weight", "{i}.altup.router.weight"),
    Rule(LAYER + "altup.router_norm.weight", "{i}.altup.norm"),
    Rule(LAYER + "altup.prediction_coefs.weight", "{i}.altup.prediction.weight"),
    Rule(LAYER + "altup.correction_coefs.weight", "{i}.altup.correction.weight"),
    Rule(LAYER + "altup.correct_output_scale", "{i}.altup.scale"),
    Rule(LAYER + "laurel.linear_left.weight", "{i}.laurel.down.weight"),
    Rule(LAYER + "laurel.linear_right.weight", "{i}.laurel.up.weight"),
    Rule(LAYER + "laurel.post_laurel_norm.weight", "{i}.laurel.norm"),
)
_MUSE = (
    *(rule for rule in _GEMMA2 if ".qkv." not in rule.parameter and rule.parameter != "embedding"),
    *gated_attention("gate_proj"),
    Rule("model.embed_tokens.weight", "embedding", 0, NormedRows()),
)
_GLM = (
    *(*MODEL, *ATTENTION, *PRE_NORMS),
    Rule(LAYER + "mlp.gate_up_proj.weight", "{i}.gate_up.weight", None),
    Rule(LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
)
_GLM4 = (
    *(*MODEL, *ATTENTION, *_GLM[-2:]),
    Rule(LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "post_self_attn_layernorm.weight", "{i}.attention_after"),
    Rule(LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "post_mlp_layernorm.weight", "{i}.mlp_after"),
)
_HYPERCLOVAX = (
    *LLAMA,
    Rule(LAYER + "post_norm1.weight", "{i}.attention_after"),
    Rule(LAYER + "post_norm2.weight", "{i}.mlp_after"),
)


def _ungated(up: str, down: str) -> tuple[Rule, ...]:
    return (
        *(*MODEL, *ATTENTION, *PRE_NORMS),
        Rule(f"{LAYER}mlp.{up}.weight", "{i}.gate_up.weight"),
        Rule(f"{LAYER}mlp.{up}.bias", "{i}.gate_up.bias"),
        Rule(f"{LAYER}mlp.{down}.weight", "{i}.down.weight"),
        Rule(f"{LAYER}mlp.{down}.bias", "{i}.down.bias"),
    )


_UNGATED = _ungated("up_proj", "down_proj")
_STARCODER2 = _ungated("c_fc", "c_proj")
_NANOCHAT = (
    *(rule for rule in _ungated("fc1", "fc2") if rule.parameter != "embedding"),
    Rule("model.embed_tokens.weight", "embedding", 0, NormedRows()),
)
_APERTUS = (
    *(*MODEL, *ATTENTION),
    Rule(LAYER + "attention_layernorm.weight", "{i}.attention_norm"),
    Rule(LAYER + "feedforward_layernorm.weight", "{i}.mlp_norm"),
    Rule(LAYER + "mlp.up_proj.weight", "{i}.gate_up.weight"),
    Rule(LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
    Rule(LAYER + "mlp.act_fn.alpha_p", "{i}.xielu", 0),
    Rule(LAYER + "mlp.act_fn.alpha_n", "{i}.xielu", 1),
    Rule(LAYER + "mlp.act_fn.beta", "{i}.xielu", 2),
    Rule(LAYER + "mlp.act_fn.eps", "{i}.xielu", 3),
)
_PHI3 = (
    *(*MODEL, *PRE_NORMS),
    Rule(LAYER + "self_attn.qkv_proj.weight", "{i}.qkv.weight", None),
    Rule(LAYER + "self_attn.o_proj.weight", "{i}.output.weight"),
    Rule(LAYER + "mlp.gate_up_proj.weight", "{i}.gate_up.weight", None),
    Rule(LAYER + "mlp.down_proj.weight", "{i}.down.weight"),
)

_STABLELM = (
    *LLAMA,
    Rule(LAYER + "self_attn.q_layernorm.norms.{h}.weight", "{i}.query_norm", 0, OneOfRows()),
    Rule(LAYER + "self_attn.k_layernorm.norms.{h}.weight", "{i}.key_norm", 0, OneOfRows()),
)
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


def _gpt_bigcode(qkv: Layout | None) -> tuple[Rule, ...]:
    """GPT-2's names with [outputs, inputs] weights; queries, keys and values are fused."""
    return tuple(
        rule._replace(layout=qkv if rule.parameter.startswith("{i}.qkv.") else None)
        for rule in _GPT2
    )


_OPT_LAYER = "model.decoder.layers.{i}."
_OPT = (
    Rule("model.decoder.embed_tokens.weight", "embedding"),
    Rule("model.decoder.embed_positions.weight", "positions", 0, RowOffset(2)),
    Rule("model.decoder.final_layer_norm.weight", "norm"),
    Rule("model.decoder.final_layer_norm.bias", "norm.bias"),
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
    Rule(_OPT_LAYER + "self_attn_layer_norm.weight", "{i}.attention_norm"),
    Rule(_OPT_LAYER + "self_attn_layer_norm.bias", "{i}.attention_norm.bias"),
    Rule(_OPT_LAYER + "final_layer_norm.weight", "{i}.mlp_norm"),
    Rule(_OPT_LAYER + "final_layer_norm.bias", "{i}.mlp_norm.bias"),
    *(
        Rule(f"{_OPT_LAYER}{name}.{kind}", f"{{i}}.{parameter}.{kind}", part)
        for name, parameter, part in (
            ("self_attn.q_proj", "qkv", 0),
            ("self_attn.k_proj", "qkv", 1),
            ("self_attn.v_proj", "qkv", 2),
            ("self_attn.out_proj", "output", 0),
            ("fc1", "gate_up", 0),
            ("fc2", "down", 0),
        )
        for kind in ("weight", "bias")
    ),
)


def _in_language_model(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """A whole text model nested in one that sees or hears."""
    return tuple(rule._replace(pattern="language_model." + rule.pattern) for rule in rules)


def _in_multimodal_model(rules: tuple[Rule, ...], part: str = "language_model") -> tuple[Rule, ...]:
    """The same, but the head belongs to the outer model."""
    return tuple(
        rule._replace(pattern=re.sub(r"^model\.", f"model.{part}.", rule.pattern)) for rule in rules
    )


def _thinking(rules: tuple[Rule, ...]) -> tuple[Rule, ...]:
    """The part that makes text of a model that speaks, too."""
    return tuple(rule._replace(pattern="thinker." + rule.pattern) for rule in rules)


_NESTED = {"outer": _in_multimodal_model, "whole": _in_language_model}
_TABLES = {
    "afmoe": AFMOE,
    "apertus": _APERTUS,
    "arcee": _UNGATED,
    "axk1": AXK1,
    "axk2": AXK2,
    "bailing_hybrid": LING3,
    "bamba": BAMBA,
    "bloom": BLOOM,
    "codegen": CODEGEN,
    "cohere2_moe": GLM4_MOE,
    "dbrx": DBRX,
    "deepseek": DEEPSEEK_PLAIN,
    "deepseek_ranked": DEEPSEEK_RANKED,
    "deepseek_sparse": DEEPSEEK_SPARSE,
    "dots1": GLM4_MOE,
    "ernie4_5_moe": ERNIE_MOE,
    "exaone4": OLMO2,
    "exaone_moe": EXAONE_MOE,
    "falcon": FALCON,
    "falcon_h1": FALCON_H1,
    "falcon_mamba": MAMBA,
    "falcon_two_norms": FALCON_TWO_NORMS,
    "flex_olmo": FLEX_OLMO,
    "flint": FLINT,
    "gemma2": _GEMMA2,
    "gemma3": _in_language_model(_GEMMA2),
    "gemma3_text": _GEMMA2,
    "gemma3n": _in_multimodal_model(_GEMMA3N),
    "gemma3n_text": _GEMMA3N,
    "gemma4": _in_multimodal_model(_GEMMA4),
    "gemma4_text": _GEMMA4,
    "gemma4_unified": _in_multimodal_model(_GEMMA4),
    "gemma4_unified_text": _GEMMA4,
    "glm": _GLM,
    "glm4": _GLM4,
    "glm4_moe": GLM4_MOE,
    "gpt2": _GPT2,
    "gpt_bigcode": _gpt_bigcode(None),
    "gpt_bigcode_by_head": _gpt_bigcode(QkvByKvHead()),
    "gpt_neo": GPT_NEO,
    "gpt_neox": GPT_NEOX,
    "gpt_oss": GPT_OSS,
    "gptj": GPTJ,
    "granite_swa": (*LLAMA, SINKS),
    "granitemoe": GRANITE_MOE,
    "granitemoe_swa": GRANITE_MOE_SWA,
    "granitemoehybrid": GRANITE_HYBRID,
    "granitemoeshared": GRANITE_MOE,
    "hunyuan_v1_dense": HUNYUAN,
    "hunyuan_v1_moe": HUNYUAN,
    "hy_v3": HY3,
    "hyperclovax": _HYPERCLOVAX,
    "idefics3": _in_multimodal_model(LLAMA, "text_model"),
    "internvl": _in_language_model(LLAMA),
    "internvl_moe": _in_language_model(QWEN_MOE),
    "jais2": _UNGATED,
    "jamba": JAMBA,
    "kimi_linear": KIMI_LINEAR,
    "kolibri1": KOLIBRI,
    "laguna": LAGUNA,
    "lfm2": LFM2,
    "lfm2_moe": LFM2,
    "lfm3": LFM3,
    "lfm3_ungated": LFM3_UNGATED,
    "llama4": _in_language_model(LLAMA4),
    "llama4_text": LLAMA4,
    "llava": _in_language_model(LLAMA),
    "longcat_flash": LONGCAT_FLASH,
    "mamba": MAMBA,
    "mamba2": NEMOTRON_H,
    "mellum": QWEN_MOE,
    "mimo_v2_flash": MIMO_V2,
    "minimax_m2": MINIMAX_M2,
    "mistral3": _in_language_model(LLAMA),
    "mistral3_deepseek": _in_language_model(DEEPSEEK_PLAIN),
    "mistral3_deepseek_ranked": _in_language_model(DEEPSEEK_RANKED),
    "mixtral": MIXTRAL,
    "mpt": MPT,
    "muse_glimmer_text": _MUSE,
    "nanochat": _NANOCHAT,
    "nemotron": _UNGATED,
    "nemotron_h": NEMOTRON_H,
    "olmo2": OLMO2,
    "olmo3": OLMO2,
    "olmo_hybrid": OLMO_HYBRID,
    "olmoe": QWEN_MOE,
    "opt": _OPT,
    "phi": PHI,
    "phi3": _PHI3,
    "phimoe": MIXTRAL,
    "qwen2_5_omni": _thinking(LLAMA),
    "qwen2_audio": _in_language_model(LLAMA),
    "qwen2_moe": QWEN_MOE,
    "qwen3_asr": _in_multimodal_model(LLAMA),
    "qwen3_5": _in_multimodal_model(QWEN3_5),
    "qwen3_5_moe": _in_multimodal_model(QWEN3_5),
    "qwen3_5_moe_text": QWEN3_5,
    "qwen3_5_text": QWEN3_5,
    "qwen3_moe": QWEN_MOE,
    "qwen3_next": QWEN3_NEXT,
    "qwen3_omni_moe": _thinking(QWEN_MOE),
    "qwen3_omni_moe_thinker": QWEN_MOE,
    "qwen3_vl": _in_multimodal_model(LLAMA),
    "qwen3_vl_moe": _in_multimodal_model(QWEN3_VL_MOE),
    "smolvlm": _in_multimodal_model(LLAMA, "text_model"),
    "solar_open": GLM4_MOE,
    "stablelm": _STABLELM,
    "starcoder2": _STARCODER2,
    "step3p5": STEP3,
    "vaultgemma": _GEMMA2,
    "voxtral": _in_language_model(LLAMA),
    "whisper": WHISPER,
}
