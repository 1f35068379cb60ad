"""Checkpoints' parameter names for GPT-NeoX, Falcon, BLOOM and MPT."""

from __future__ import annotations

from engine.models.layouts import QkvByKvHead
from engine.models.rules import Rule

_NEOX_LAYER = "gpt_neox.layers.{i}."
GPT_NEOX = (
    Rule("gpt_neox.embed_in.weight", "embedding"),
    Rule("gpt_neox.final_layer_norm.weight", "norm"),
    Rule("gpt_neox.final_layer_norm.bias", "norm.bias"),
    Rule("embed_out.weight", "head"),
    Rule("score.weight", "score"),
    Rule(_NEOX_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    Rule(_NEOX_LAYER + "input_layernorm.bias", "{i}.attention_norm.bias"),
    Rule(_NEOX_LAYER + "post_attention_layernorm.weight", "{i}.mlp_norm"),
    Rule(_NEOX_LAYER + "post_attention_layernorm.bias", "{i}.mlp_norm.bias"),
    Rule(_NEOX_LAYER + "attention.query_key_value.weight", "{i}.qkv.weight", None, QkvByKvHead()),
    Rule(_NEOX_LAYER + "attention.query_key_value.bias", "{i}.qkv.bias", None, QkvByKvHead()),
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
        QkvByKvHead(),
    ),
    Rule(
        *(_FALCON_LAYER + "self_attention.query_key_value.bias", "{i}.qkv.bias", None),
        QkvByKvHead(),
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


FALCON = (*_FALCON_BODY, *_falcon_norms("input_layernorm", "post_attention_layernorm"))
FALCON_TWO_NORMS = (*_FALCON_BODY, *_falcon_norms("ln_attn", "ln_mlp"))
BLOOM = (
    *FALCON,
    Rule("transformer.word_embeddings_layernorm.weight", "embedding_norm"),
    Rule("transformer.word_embeddings_layernorm.bias", "embedding_norm.bias"),
)

_MPT_LAYER = "transformer.blocks.{i}."
MPT = (
    Rule("transformer.wte.weight", "embedding"),
    Rule("transformer.norm_f.weight", "norm"),
    Rule("lm_head.weight", "head"),
    Rule("score.weight", "score"),
    Rule(_MPT_LAYER + "norm_1.weight", "{i}.attention_norm"),
    Rule(_MPT_LAYER + "attn.Wqkv.weight", "{i}.qkv.weight", None),
    Rule(_MPT_LAYER + "attn.out_proj.weight", "{i}.output.weight"),
    Rule(_MPT_LAYER + "norm_2.weight", "{i}.mlp_norm"),
    Rule(_MPT_LAYER + "ffn.up_proj.weight", "{i}.gate_up.weight"),
    Rule(_MPT_LAYER + "ffn.down_proj.weight", "{i}.down.weight"),
)
