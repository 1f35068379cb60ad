"""Checkpoints' names for a vision encoder's parameters: one table per family."""

from __future__ import annotations

from engine.models.rules import Rule


def linear_rules(pattern: str, parameter: str, part: int = 0) -> tuple[Rule, ...]:
    """Return the rules of a projection and its bias."""
    return tuple(
        Rule(f"{pattern}.{kind}", f"{parameter}.{kind}", part) for kind in ("weight", "bias")
    )


def norm_rules(pattern: str, parameter: str) -> tuple[Rule, ...]:
    """Return the rules of a layer norm."""
    return Rule(f"{pattern}.weight", parameter), Rule(f"{pattern}.bias", f"{parameter}.bias")


def _clipped(pattern: str, parameter: str, part: int = 0) -> tuple[Rule, ...]:
    """A projection and, if it has them, the bounds of its inputs and outputs."""
    bounds = ("input_min", "input_max", "output_min", "output_max")
    return (
        Rule(f"{pattern}.linear.weight", f"{parameter}.weight", part),
        *(
            Rule(f"{pattern}.{bound}", f"{parameter}.bounds", len(bounds) * part + i)
            for i, bound in enumerate(bounds)
        ),
    )


_QWEN_BLOCK = "visual.blocks.{i}."
_QWEN = (
    *linear_rules("visual.patch_embed.proj", "patch"),
    *norm_rules(_QWEN_BLOCK + "norm1", "{i}.attention_norm"),
    Rule(_QWEN_BLOCK + "attn.qkv.weight", "{i}.qkv.weight", None),
    Rule(_QWEN_BLOCK + "attn.qkv.bias", "{i}.qkv.bias", None),
    *linear_rules(_QWEN_BLOCK + "attn.proj", "{i}.output"),
    *norm_rules(_QWEN_BLOCK + "norm2", "{i}.mlp_norm"),
)
_QWEN2_MERGER = (
    *norm_rules("visual.merger.ln_q", "merger.norm"),
    *linear_rules("visual.merger.mlp.0", "merger.up"),
    *linear_rules("visual.merger.mlp.2", "merger.down"),
)
_QWEN2 = (
    *(*_QWEN, *_QWEN2_MERGER),
    *linear_rules(_QWEN_BLOCK + "mlp.fc1", "{i}.up"),
    *linear_rules(_QWEN_BLOCK + "mlp.fc2", "{i}.down"),
)
_QWEN2_5 = (
    *(*_QWEN, *_QWEN2_MERGER),
    *linear_rules(_QWEN_BLOCK + "mlp.gate_proj", "{i}.up", 0),
    *linear_rules(_QWEN_BLOCK + "mlp.up_proj", "{i}.up", 1),
    *linear_rules(_QWEN_BLOCK + "mlp.down_proj", "{i}.down"),
)
# Queries, keys and values are not fused.
_QWEN2_5_OMNI = (
    *(rule for rule in _QWEN2_5 if ".attn.qkv." not in rule.pattern),
    *linear_rules(_QWEN_BLOCK + "attn.q", "{i}.qkv", 0),
    *linear_rules(_QWEN_BLOCK + "attn.k", "{i}.qkv", 1),
    *linear_rules(_QWEN_BLOCK + "attn.v", "{i}.qkv", 2),
)
_QWEN3_LAYERS = (
    *_QWEN,
    Rule("visual.pos_embed.weight", "positions"),
    *linear_rules(_QWEN_BLOCK + "mlp.linear_fc1", "{i}.up"),
    *linear_rules(_QWEN_BLOCK + "mlp.linear_fc2", "{i}.down"),
)
_DEEP = "visual.deepstack_merger_list.{i}."
_QWEN3 = (
    *_QWEN3_LAYERS,
    *norm_rules("visual.merger.norm", "merger.norm"),
    *linear_rules("visual.merger.linear_fc1", "merger.up"),
    *linear_rules("visual.merger.linear_fc2", "merger.down"),
    *norm_rules(_DEEP + "norm", "deep.{i}.norm"),
    *linear_rules(_DEEP + "linear_fc1", "deep.{i}.up"),
    *linear_rules(_DEEP + "linear_fc2", "deep.{i}.down"),
)
_OMNI_DEEP = "visual.merger_list.{i}."
_QWEN3_OMNI = (
    *(*_QWEN3_LAYERS, *_QWEN2_MERGER),
    *norm_rules(_OMNI_DEEP + "ln_q", "deep.{i}.norm"),
    *linear_rules(_OMNI_DEEP + "mlp.0", "deep.{i}.up"),
    *linear_rules(_OMNI_DEEP + "mlp.2", "deep.{i}.down"),
)
_GLM_OCR = (
    *linear_rules("visual.patch_embed.proj", "patch"),
    Rule(_QWEN_BLOCK + "norm1.weight", "{i}.attention_norm"),
    Rule(_QWEN_BLOCK + "attn.qkv.weight", "{i}.qkv.weight", None),
    Rule(_QWEN_BLOCK + "attn.qkv.bias", "{i}.qkv.bias", None),
    Rule(_QWEN_BLOCK + "attn.q_norm.weight", "{i}.query_norm"),
    Rule(_QWEN_BLOCK + "attn.k_norm.weight", "{i}.key_norm"),
    *linear_rules(_QWEN_BLOCK + "attn.proj", "{i}.output"),
    Rule(_QWEN_BLOCK + "norm2.weight", "{i}.mlp_norm"),
    *linear_rules(_QWEN_BLOCK + "mlp.gate_proj", "{i}.up", 0),
    *linear_rules(_QWEN_BLOCK + "mlp.up_proj", "{i}.up", 1),
    *linear_rules(_QWEN_BLOCK + "mlp.down_proj", "{i}.down"),
    Rule("visual.post_layernorm.weight", "final_norm"),
    *linear_rules("visual.downsample", "merger.join"),
    Rule("visual.merger.proj.weight", "merger.projection.weight"),
    *norm_rules("visual.merger.post_projection_norm", "merger.norm"),
    Rule("visual.merger.gate_proj.weight", "merger.up.weight", 0),
    Rule("visual.merger.up_proj.weight", "merger.up.weight", 1),
    Rule("visual.merger.down_proj.weight", "merger.down.weight"),
)
_GLM4V = (
    *_GLM_OCR,
    Rule("visual.embeddings.position_embedding.weight", "positions"),
    Rule("visual.post_conv_layernorm.weight", "patch_norm"),
)
_PIXTRAL_LAYER = "vision_tower.transformer.layers.{i}."
_MISTRAL3 = (
    Rule("vision_tower.patch_conv.weight", "patch.weight"),
    Rule("vision_tower.ln_pre.weight", "patch_norm"),
    Rule(_PIXTRAL_LAYER + "attention_norm.weight", "{i}.attention_norm"),
    Rule(_PIXTRAL_LAYER + "attention.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_PIXTRAL_LAYER + "attention.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(_PIXTRAL_LAYER + "attention.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(_PIXTRAL_LAYER + "attention.o_proj.weight", "{i}.output.weight"),
    Rule(_PIXTRAL_LAYER + "ffn_norm.weight", "{i}.mlp_norm"),
    Rule(_PIXTRAL_LAYER + "feed_forward.gate_proj.weight", "{i}.up.weight", 0),
    Rule(_PIXTRAL_LAYER + "feed_forward.up_proj.weight", "{i}.up.weight", 1),
    Rule(_PIXTRAL_LAYER + "feed_forward.down_proj.weight", "{i}.down.weight"),
    Rule("multi_modal_projector.norm.weight", "merger.norm"),
    Rule("multi_modal_projector.patch_merger.merging_layer.weight", "merger.join.weight"),
    *linear_rules("multi_modal_projector.linear_1", "merger.up"),
    *linear_rules("multi_modal_projector.linear_2", "merger.down"),
)
_TOWER_LAYER = "vision_tower.encoder.layers.{i}."
_CLIP = (  # and SigLIP
    Rule("vision_tower.embeddings.class_embedding", "class_token"),
    *linear_rules("vision_tower.embeddings.patch_embedding", "patch"),
    Rule("vision_tower.embeddings.position_embedding.weight", "positions"),
    *norm_rules("vision_tower.pre_layrnorm", "patch_norm"),
    *norm_rules(_TOWER_LAYER + "layer_norm1", "{i}.attention_norm"),
    *linear_rules(_TOWER_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *linear_rules(_TOWER_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *linear_rules(_TOWER_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    *linear_rules(_TOWER_LAYER + "self_attn.out_proj", "{i}.output"),
    *norm_rules(_TOWER_LAYER + "layer_norm2", "{i}.mlp_norm"),
    *linear_rules(_TOWER_LAYER + "mlp.fc1", "{i}.up"),
    *linear_rules(_TOWER_LAYER + "mlp.fc2", "{i}.down"),
    *norm_rules("vision_tower.post_layernorm", "final_norm"),
)
_LLAVA = (*_MISTRAL3, *_CLIP, Rule("image_newline", "newline"))
_GEMMA3 = (
    *_CLIP,
    Rule("multi_modal_projector.mm_soft_emb_norm.weight", "merger.norm"),
    Rule("multi_modal_projector.mm_input_projection_weight", "merger.projection.weight"),
)
_GEMMA4 = (
    Rule("vision_tower.patch_embedder.input_proj.weight", "patch.weight"),
    Rule("vision_tower.patch_embedder.position_embedding_table", "positions", None),
    Rule(_TOWER_LAYER + "input_layernorm.weight", "{i}.attention_norm"),
    *_clipped(_TOWER_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *_clipped(_TOWER_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *_clipped(_TOWER_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    Rule(_TOWER_LAYER + "self_attn.q_norm.weight", "{i}.query_norm"),
    Rule(_TOWER_LAYER + "self_attn.k_norm.weight", "{i}.key_norm"),
    *_clipped(_TOWER_LAYER + "self_attn.o_proj", "{i}.output"),
    Rule(_TOWER_LAYER + "post_attention_layernorm.weight", "{i}.attention_after"),
    Rule(_TOWER_LAYER + "pre_feedforward_layernorm.weight", "{i}.mlp_norm"),
    *_clipped(_TOWER_LAYER + "mlp.gate_proj", "{i}.up", 0),
    *_clipped(_TOWER_LAYER + "mlp.up_proj", "{i}.up", 1),
    *_clipped(_TOWER_LAYER + "mlp.down_proj", "{i}.down"),
    Rule(_TOWER_LAYER + "post_feedforward_layernorm.weight", "{i}.mlp_after"),
    Rule("vision_tower.std_bias", "merger.mean"),
    Rule("vision_tower.std_scale", "merger.scale"),
    Rule("embed_vision.embedding_projection.weight", "merger.projection.weight"),
)


def _gemma4_unified(embedder: str, projection: str) -> tuple[Rule, ...]:
    return (
        *norm_rules(f"{embedder}.patch_ln1", "pixel_norm"),
        *linear_rules(f"{embedder}.patch_dense", "patch"),
        *norm_rules(f"{embedder}.patch_ln2", "patch_norm"),
        Rule(f"{embedder}.pos_embedding", "positions", None),
        *norm_rules(f"{embedder}.pos_norm", "final_norm"),
        Rule(f"{projection}.weight", "merger.projection.weight"),
    )


# As published, and as the modules of Hugging Face's implementation are called.
_GEMMA4_UNIFIED = (
    *_gemma4_unified("vision_embedder", "embed_vision.embedding_projection"),
    *_gemma4_unified("embed_vision", "embed_vision.multimodal_embedder.embedding_projection"),
)
_IDEFICS3 = (
    *(
        rule._replace(pattern=rule.pattern.replace("vision_tower.", "vision_model.", 1))
        for rule in _CLIP
    ),
    Rule("connector.modality_projection.proj.weight", "merger.up.weight"),
)
_INTERN_LAYER = "vision_tower.encoder.layer.{i}."
_INTERNVL = (
    Rule("vision_tower.embeddings.cls_token", "class_token", None),
    *linear_rules("vision_tower.embeddings.patch_embeddings.projection", "patch"),
    Rule("vision_tower.embeddings.position_embeddings", "positions", None),
    *norm_rules(_INTERN_LAYER + "layernorm_before", "{i}.attention_norm"),
    *linear_rules(_INTERN_LAYER + "attention.q_proj", "{i}.qkv", 0),
    *linear_rules(_INTERN_LAYER + "attention.k_proj", "{i}.qkv", 1),
    *linear_rules(_INTERN_LAYER + "attention.v_proj", "{i}.qkv", 2),
    Rule(_INTERN_LAYER + "attention.q_norm.weight", "{i}.query_norm"),
    Rule(_INTERN_LAYER + "attention.k_norm.weight", "{i}.key_norm"),
    *linear_rules(_INTERN_LAYER + "attention.projection_layer", "{i}.output"),
    Rule(_INTERN_LAYER + "lambda_1", "{i}.attention_scale"),
    *norm_rules(_INTERN_LAYER + "layernorm_after", "{i}.mlp_norm"),
    *linear_rules(_INTERN_LAYER + "mlp.fc1", "{i}.up"),
    *linear_rules(_INTERN_LAYER + "mlp.fc2", "{i}.down"),
    Rule(_INTERN_LAYER + "lambda_2", "{i}.mlp_scale"),
    *norm_rules("multi_modal_projector.layer_norm", "merger.norm"),
    *linear_rules("multi_modal_projector.linear_1", "merger.up"),
    *linear_rules("multi_modal_projector.linear_2", "merger.down"),
)
_MOON_LAYER = "vision_tower.encoder.blocks.{i}."
_KIMI_K25 = (
    *linear_rules("vision_tower.patch_embed.proj", "patch"),
    Rule("vision_tower.patch_embed.pos_emb.weight", "positions", None),
    *norm_rules(_MOON_LAYER + "norm0", "{i}.attention_norm"),
    Rule(_MOON_LAYER + "wqkv.weight", "{i}.qkv.weight", None),
    Rule(_MOON_LAYER + "wqkv.bias", "{i}.qkv.bias", None),
    *linear_rules(_MOON_LAYER + "wo", "{i}.output"),
    *norm_rules(_MOON_LAYER + "norm1", "{i}.mlp_norm"),
    *linear_rules(_MOON_LAYER + "mlp.fc0", "{i}.up"),
    *linear_rules(_MOON_LAYER + "mlp.fc1", "{i}.down"),
    *norm_rules("vision_tower.encoder.final_layernorm", "final_norm"),
    *norm_rules("mm_projector.pre_norm", "merger.norm"),
    *linear_rules("mm_projector.proj.0", "merger.up"),
    *linear_rules("mm_projector.proj.2", "merger.down"),
)
_LLAMA4_LAYER = "vision_model.model.layers.{i}."
_LLAMA4 = (
    Rule("vision_model.class_embedding", "class_token"),
    Rule("vision_model.patch_embedding.linear.weight", "patch.weight"),
    Rule("vision_model.positional_embedding_vlm", "positions"),
    *norm_rules("vision_model.layernorm_pre", "patch_norm"),
    *norm_rules(_LLAMA4_LAYER + "input_layernorm", "{i}.attention_norm"),
    *linear_rules(_LLAMA4_LAYER + "self_attn.q_proj", "{i}.qkv", 0),
    *linear_rules(_LLAMA4_LAYER + "self_attn.k_proj", "{i}.qkv", 1),
    *linear_rules(_LLAMA4_LAYER + "self_attn.v_proj", "{i}.qkv", 2),
    *linear_rules(_LLAMA4_LAYER + "self_attn.o_proj", "{i}.output"),
    *norm_rules(_LLAMA4_LAYER + "post_attention_layernorm", "{i}.mlp_norm"),
    *linear_rules(_LLAMA4_LAYER + "mlp.fc1", "{i}.up"),
    *linear_rules(_LLAMA4_LAYER + "mlp.fc2", "{i}.down"),
    *norm_rules("vision_model.layernorm_post", "final_norm"),
    Rule("vision_model.vision_adapter.mlp.fc1.weight", "merger.up.weight"),
    Rule("vision_model.vision_adapter.mlp.fc2.weight", "merger.down.weight"),
    Rule("multi_modal_projector.linear_1.weight", "merger.projection.weight"),
)
_COHERE = (*_CLIP, *norm_rules("multi_modal_projector.layernorm", "merger.norm"), *_INTERNVL[-4:])
_LFM2 = (*_CLIP, *_INTERNVL[-6:])
_LFM3_LAYER = "vision_tower.layers.{i}."
_LFM3 = (
    Rule("vision_tower.patchifier.weight", "patch.weight"),
    Rule("vision_tower.embedding_norm.weight", "patch_norm"),
    Rule(_LFM3_LAYER + "operator_norm.weight", "{i}.attention_norm"),
    Rule(_LFM3_LAYER + "conv.in_proj.weight", "{i}.conv_in.weight", None),
    Rule(_LFM3_LAYER + "conv.spatial_conv.weight", "{i}.conv.weight"),
    Rule(_LFM3_LAYER + "conv.out_proj.weight", "{i}.output.weight"),
    Rule(_LFM3_LAYER + "self_attn.q_proj.weight", "{i}.qkv.weight", 0),
    Rule(_LFM3_LAYER + "self_attn.k_proj.weight", "{i}.qkv.weight", 1),
    Rule(_LFM3_LAYER + "self_attn.v_proj.weight", "{i}.qkv.weight", 2),
    Rule(_LFM3_LAYER + "self_attn.q_layernorm.weight", "{i}.query_norm"),
    Rule(_LFM3_LAYER + "self_attn.k_layernorm.weight", "{i}.key_norm"),
    Rule(_LFM3_LAYER + "self_attn.out_proj.weight", "{i}.output.weight"),
    Rule(_LFM3_LAYER + "ffn_norm.weight", "{i}.mlp_norm"),
    Rule(_LFM3_LAYER + "feed_forward.w1.weight", "{i}.up.weight", 0),
    Rule(_LFM3_LAYER + "feed_forward.w3.weight", "{i}.up.weight", 1),
    Rule(_LFM3_LAYER + "feed_forward.w2.weight", "{i}.down.weight"),
    *_INTERNVL[-6:],
    # As the modules of Hugging Face's implementation are called.
    Rule("vision_tower.patch_embed.weight", "patch.weight"),
    Rule(_LFM3_LAYER + "self_attn.q_norm.weight", "{i}.query_norm"),
    Rule(_LFM3_LAYER + "self_attn.k_norm.weight", "{i}.key_norm"),
)
_LIGHTON = tuple(
    rule._replace(
        pattern=rule.pattern.replace("vision_tower.", "vision_encoder.", 1).replace(
            "multi_modal_projector.", "vision_projection.", 1
        )
    )
    for rule in _MISTRAL3
)
_INNER = "vision_tower.vit_merger."
_MINICPM = (
    *_CLIP,
    *norm_rules(_INNER + "layer_norm1", "inner.attention_norm"),
    *linear_rules(_INNER + "self_attn.q_proj", "inner.qkv", 0),
    *linear_rules(_INNER + "self_attn.k_proj", "inner.qkv", 1),
    *linear_rules(_INNER + "self_attn.v_proj", "inner.qkv", 2),
    *linear_rules(_INNER + "self_attn.out_proj", "inner.output"),
    *norm_rules(_INNER + "pre_norm", "inner.norm"),
    *linear_rules(_INNER + "linear_1", "inner.up"),
    *linear_rules(_INNER + "linear_2", "inner.down"),
    *norm_rules("merger.mlp.0.pre_norm", "merger.norm"),
    *linear_rules("merger.mlp.0.linear_1", "merger.up"),
    *linear_rules("merger.mlp.0.linear_2", "merger.down"),
)
_PADDLE = (
    *(rule._replace(pattern=rule.pattern.replace("vision_tower.", "visual.", 1)) for rule in _CLIP),
    *norm_rules("mlp_AR.pre_norm", "merger.norm"),
    *linear_rules("mlp_AR.linear_1", "merger.up"),
    *linear_rules("mlp_AR.linear_2", "merger.down"),
)
TABLES = {
    "aya_vision": _COHERE,
    "cohere2_vision": _COHERE,
    "exaone4_5": _QWEN2_5,
    "gemma3": _GEMMA3,
    "gemma4": _GEMMA4,
    "gemma4_unified": _GEMMA4_UNIFIED,
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe"), _GLM4V),
    "glm_ocr": _GLM_OCR,
    "idefics3": _IDEFICS3,
    "internvl": _INTERNVL,
    "kimi_k25": _KIMI_K25,
    "lfm2_vl": _LFM2,
    "lfm3_vl": _LFM3,
    "lighton_ocr": _LIGHTON,
    "llama4": _LLAMA4,
    **dict.fromkeys(("llava", "llava_next", "llava_onevision"), _LLAVA),
    "minicpmv4_6": _MINICPM,
    "mistral3": _MISTRAL3,
    "paddleocr_vl": _PADDLE,
    **dict.fromkeys(("qwen2_5_omni", "qwen2_5_omni_thinker"), _QWEN2_5_OMNI),
    "qwen2_5_vl": _QWEN2_5,
    "qwen2_vl": _QWEN2,
    "qwen3_5": _QWEN3,
    "qwen3_5_moe": _QWEN3,
    **dict.fromkeys(("qwen3_omni_moe", "qwen3_omni_moe_thinker"), _QWEN3_OMNI),
    "qwen3_vl": _QWEN3,
    "qwen3_vl_moe": _QWEN3,
    "smolvlm": _IDEFICS3,
}
