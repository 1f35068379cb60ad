"""Tiny random vision-language models in Hugging Face format, one for each kind of encoder.

    model = tiny_vision.save("qwen2_vl", tmp_path)

They have no tokenizer. The tokens below stand for images, in a vocabulary of 160.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests import tiny_models

IMAGE, ROW_END, IMAGE_END, START, END, VIDEO = range(150, 156)
_QWEN_TOKENS = {
    **{"image_token_id": IMAGE, "video_token_id": VIDEO},
    **{"vision_start_token_id": START, "vision_end_token_id": END},
}
_MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
_QWEN2_VISION = {"depth": 3, "num_heads": 2, "embed_dim": 32, "hidden_size": 48, "patch_size": 14}
_QWEN2_5_VISION = {
    **{"depth": 4, "num_heads": 2, "hidden_size": 32, "intermediate_size": 40},
    **{"out_hidden_size": 48, "fullatt_block_indexes": [1, 3], "patch_size": 14},
}
_QWEN3_VISION = {
    **{"depth": 4, "num_heads": 2, "hidden_size": 32, "intermediate_size": 40},
    **{"out_hidden_size": 48, "num_position_embeddings": 25},
}
# Of audio, which is not read.
HEARING = {
    **{"encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16, "d_model": 16},
    **{"output_dim": 48, "downsample_hidden_size": 8, "num_mel_bins": 16},
}
# A token before each image, by which Hugging Face's code finds them.
VISION_START = 5
_OMNI = {"audio_config": HEARING, "vision_start_token_id": VISION_START}
_PIXTRAL = {
    **{"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 32, "head_dim": 16},
    **{"intermediate_size": 40, "patch_size": 14, "image_size": 140},
}
_CLIP = {
    **{"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 32},
    **{"intermediate_size": 40, "patch_size": 14, "image_size": 28},
}
_TILE = {**_CLIP, "patch_size": 7}
_IDEFICS3 = {"image_token_id": IMAGE, "scale_factor": 2}
_INTERNVL = {"image_token_id": IMAGE, "image_seq_length": 4}
_GEMMA4_VISION = {
    **{"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16},
    **{"hidden_size": 32, "intermediate_size": 40, "patch_size": 8, "pooling_kernel_size": 2},
    **{"position_embedding_size": 640, "standardize": True, "use_clipped_linears": True},
}
_BOUNDS = {"input_min": -1.0, "input_max": 1.5, "output_min": -0.9, "output_max": 1.2}
_GEMMA4_TOKENS = {"image_token_id": IMAGE, "boi_token_id": START, "eoi_token_id": END}

_GLM_VISION = {
    **{"depth": 3, "num_heads": 2, "hidden_size": 32, "intermediate_size": 40},
    **{"out_hidden_size": 48, "image_size": 70},
}
_GLM_TOKENS = {
    **{"image_token_id": IMAGE, "video_token_id": VIDEO},
    **{"image_start_token_id": START, "image_end_token_id": END},
}
_GLM_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}


def pinpoints(side: int) -> list[list[int]]:
    """Canvases of LLaVA-NeXT's kind, in pixels."""
    grids = (1, 2), (2, 1), (2, 2), (3, 1), (1, 3)
    return [[rows * side, columns * side] for rows, columns in grids]


# kind -> (Hugging Face class, text model's kind, changes to it, vision config, whole config)
KINDS: dict[str, tuple[str, str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": ("Qwen2VL", "qwen2", {"rope_parameters": _MROPE}, _QWEN2_VISION, _QWEN_TOKENS),
    "qwen2_5_vl": (
        *("Qwen2_5_VL", "qwen2", {"rope_parameters": _MROPE}),
        *(_QWEN2_5_VISION, _QWEN_TOKENS),
    ),
    "qwen2_5_omni_thinker": (
        *("Qwen2_5OmniThinker", "qwen2", {"rope_parameters": _MROPE}, _QWEN2_5_VISION),
        {**_OMNI, "image_token_index": IMAGE, "video_token_index": VIDEO},
    ),
    "exaone4_5": (
        *("Exaone4_5_", "exaone4", {}),
        {**_QWEN2_5_VISION, "num_heads": 4, "num_key_value_heads": 2},
        {"image_token_id": IMAGE, "video_token_id": VIDEO},
    ),
    "qwen3_vl": (
        *("Qwen3VL", "qwen3"),
        {"rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}},
        *({**_QWEN3_VISION, "deepstack_visual_indexes": [0, 2]}, _QWEN_TOKENS),
    ),
    "qwen3_vl_moe": (
        *("Qwen3VLMoe", "qwen3_moe"),
        {
            "moe_intermediate_size": 20,
            "rope_parameters": {**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
        },
        *({**_QWEN3_VISION, "deepstack_visual_indexes": [1]}, _QWEN_TOKENS),
    ),
    "qwen3_omni_moe_thinker": (
        *("Qwen3OmniMoeThinker", "qwen3_moe"),
        {
            "moe_intermediate_size": 20,
            "rope_parameters": {
                **{**_MROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
                "interleaved": True,
            },
        },
        {**_QWEN3_VISION, "deepstack_visual_indexes": [0, 2]},
        {**_OMNI, "image_token_id": IMAGE, "video_token_id": VIDEO},
    ),
    "qwen3_5": ("Qwen3_5", "qwen3_5_text", {}, _QWEN3_VISION, _QWEN_TOKENS),
    "qwen3_5_moe": ("Qwen3_5Moe", "qwen3_5_moe_text", {}, _QWEN3_VISION, _QWEN_TOKENS),
    "mistral3": ("Mistral3", "mistral", {"head_dim": 16}, _PIXTRAL, {"image_token_index": IMAGE}),
    "llava_pixtral": (
        *("Llava", "mistral", {"head_dim": 16, "sliding_window": None}),
        {**_PIXTRAL, "model_type": "pixtral", "patch_size": 16},
        {
            **{"image_token_index": IMAGE, "vision_feature_layer": -1},
            **{"vision_feature_select_strategy": "full"},
        },
    ),
    "llava_clip": (
        *("Llava", "llama", {}),
        *({**_CLIP, "model_type": "clip_vision_model"}, {"image_token_index": IMAGE}),
    ),
    "llava_siglip": (
        *("Llava", "qwen2", {}),
        {**_CLIP, "model_type": "siglip_vision_model", "image_size": 44},
        {
            **{"image_token_index": IMAGE, "vision_feature_layer": -1},
            **{"vision_feature_select_strategy": "full"},
        },
    ),
    "llama4": (
        *("Llama4", "llama4", {}),
        {
            **{**_CLIP, "patch_size": 7, "intermediate_size": 128, "vision_output_dim": 40},
            **{"projector_input_dim": 40, "projector_output_dim": 40},
        },
        {"image_token_index": IMAGE},
    ),
    "llava_next": (
        *("LlavaNext", "mistral", {"head_dim": 16, "sliding_window": None}),
        {**_CLIP, "model_type": "clip_vision_model"},
        {"image_token_index": IMAGE, "image_grid_pinpoints": pinpoints(28)},
    ),
    # Granite Vision. Of each tile, two rows and columns of pixels are in no patch. Hugging Face's
    # class does not scale logits, so there is nothing to scale here.
    "llava_next_granite": (
        *("LlavaNext", "granite", {"logits_scaling": 1.0}),
        {**_CLIP, "model_type": "siglip_vision_model", "image_size": 30},
        {
            **{"image_token_index": IMAGE, "image_grid_pinpoints": pinpoints(30)},
            **{"vision_feature_layer": [-3, 2, -1], "vision_feature_select_strategy": "full"},
        },
    ),
    "llava_onevision": (
        *("LlavaOnevision", "qwen2", {}),
        {**_CLIP, "model_type": "siglip_vision_model", "image_size": 30},
        {
            **{"image_token_index": IMAGE, "image_grid_pinpoints": pinpoints(30)},
            **{"video_token_index": VIDEO, "vision_aspect_ratio": "anyres_max_1"},
        },
    ),
    "gemma3": (
        *("Gemma3", "gemma3", {}, {**_CLIP, "image_size": 84}),
        {
            **{"mm_tokens_per_image": 9, "image_token_index": IMAGE},
            **{"boi_token_index": START, "eoi_token_index": END},
        },
    ),
    "gemma4": (
        *("Gemma4", "gemma4", {"use_bidirectional_attention": "vision"}),
        *(_GEMMA4_VISION, _GEMMA4_TOKENS),
    ),
    "gemma4_plain": (
        *("Gemma4", "gemma4_shared", {}),
        {**_GEMMA4_VISION, "standardize": False, "use_clipped_linears": False},
        _GEMMA4_TOKENS,
    ),
    "gemma4_unified": (
        *("Gemma4Unified", "gemma4_unified", {"use_bidirectional_attention": "vision"}),
        {
            **{"patch_size": 4, "pooling_kernel_size": 2, "mm_embed_dim": 32},
            **{"output_proj_dims": 32, "mm_posemb_size": 320},
        },
        _GEMMA4_TOKENS,
    ),
    "idefics3": ("Idefics3", "llama", {}, _TILE, _IDEFICS3),
    # Of each tile, two rows and columns of pixels are in no patch.
    "smolvlm": ("SmolVLM", "llama", {}, {**_TILE, "image_size": 30}, _IDEFICS3),
    "internvl": ("InternVL", "qwen3", {}, {**_TILE, "attention_bias": True}, _INTERNVL),
    "internvl_rms": (
        *("InternVL", "qwen2", {}),
        *({**_TILE, "norm_type": "rms_norm", "use_qk_norm": True}, _INTERNVL),
    ),
    "glm4v": (
        *("Glm4v", "glm4"),
        {
            **{"head_dim": 8, "rope_parameters": {**_GLM_ROPE, "mrope_section": [1, 1, 0]}},
            "attention_bias": True,
        },
        *(_GLM_VISION, _GLM_TOKENS),
    ),
    "glm4v_moe": (
        *("Glm4vMoe", "glm4_moe"),
        {
            **{"use_qk_norm": False, "head_dim": 16},
            "rope_parameters": {**_GLM_ROPE, "mrope_section": [1, 2, 1]},
        },
        *(_GLM_VISION, _GLM_TOKENS),
    ),
    "glm46v": (
        *("Glm46V", "glm4"),
        {
            **{"head_dim": 8, "rope_parameters": {**_GLM_ROPE, "mrope_section": [0, 1, 1]}},
            "attention_bias": True,
        },
        *(_GLM_VISION, _GLM_TOKENS),
    ),
    "glm_ocr": (
        *("GlmOcr", "glm4"),
        {
            "rope_parameters": {
                **_GLM_ROPE,
                "partial_rotary_factor": 1.0,
                "mrope_section": [2, 3, 3],
            }
        },
        *(_GLM_VISION, _GLM_TOKENS),
    ),
    "kimi_k25": (
        *("Kimi_K25", "deepseek_v3", {}),
        {
            **{"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 32},
            **{"intermediate_size": 40, "pos_emb_height": 5, "pos_emb_width": 5},
        },
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "projection_hidden_size": 32},
    ),
    "aya_vision": (
        *(
            "AyaVision",
            "cohere2",
            {"logit_scale": 1.0},
            {**_TILE, "model_type": "siglip_vision_model"},
        ),
        {"image_token_index": IMAGE, "alignment_intermediate_size": 40},
    ),
    # As many tokens along a side of a tile as a patch has pixels. Hugging Face's classes for
    # Cohere's models with images do not scale logits, so there is nothing to scale here.
    "cohere2_vision": (
        *("Cohere2Vision", "cohere2", {"logit_scale": 1.0}),
        {**_CLIP, "model_type": "siglip_vision_model", "patch_size": 3, "image_size": 18},
        {"image_token_id": IMAGE, "alignment_intermediate_size": 40},
    ),
    "lfm2_vl": (
        *("Lfm2Vl", "lfm2", {}),
        {
            **{"num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 32},
            **{"intermediate_size": 40, "patch_size": 4, "num_patches": 25},
            **{"model_type": "siglip2_vision_model", "vision_use_head": False},
        },
        {"image_token_id": IMAGE, "projector_hidden_size": 40},
    ),
    "lfm3_vl": (
        *("Lfm3Vl", "lfm3", {}),
        {
            **{"num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
            **{"hidden_size": 32, "intermediate_size": 40, "patch_size": 14},
        },
        {
            **{"image_token_id": IMAGE, "video_token_id": VIDEO, "projector_hidden_size": 40},
            **{"vision_start_token_id": START, "vision_end_token_id": END},
        },
    ),
    "minicpmv4_6": (
        *("MiniCPMV4_6", "qwen3_5_text", {}),
        {**_CLIP, "num_hidden_layers": 4, "patch_size": 4, "image_size": 20},
        {"image_token_id": IMAGE, "video_token_id": VIDEO, "insert_layer_id": 1},
    ),
    "lighton_ocr": (
        *("LightOnOcr", "qwen3", {"tie_word_embeddings": True}),
        *({**_PIXTRAL, "model_type": "pixtral"}, {"image_token_id": IMAGE}),
    ),
    "paddleocr_vl": (
        *("PaddleOCRVL", "ernie4_5"),
        {
            "rope_parameters": {**_MROPE, "mrope_section": [2, 3, 3]},
            **{"use_bias": False, "tie_word_embeddings": False},
        },
        {**_CLIP, "image_size": 70},
        {
            **{"image_token_id": IMAGE, "video_token_id": VIDEO},
            **{"vision_start_token_id": START, "vision_end_token_id": END},
        },
    ),
    "mistral3_biased": (
        *("Mistral3", "ministral3", {}, {**_PIXTRAL, "hidden_act": "silu"}),
        {
            **{"image_token_index": IMAGE, "multimodal_projector_bias": True},
            **{"projector_hidden_act": "silu", "spatial_merge_size": 3},
        },
    ),
}


def build(kind: str, *, seed: int = 0, text: dict[str, Any] | None = None, **vision: Any) -> Any:
    """A Hugging Face model with random weights, large enough for each of its parts to matter.

    ``vision`` changes its vision config, ``text`` its text config.
    """
    import torch
    import transformers

    name, text_kind, changes, shape, whole = KINDS[kind]
    part = tiny_models.build(text_kind, **{**changes, **(text or {})}).config.to_dict()
    if kind.startswith(("qwen", "glm", "paddle")):
        part.pop("model_type")
    if "omni" in kind and "num_local_experts" in part:
        part["num_experts"] = part.pop("num_local_experts")
    config = getattr(transformers, f"{name}Config")(
        text_config=part,
        vision_config={**shape, **vision},
        tie_word_embeddings=part["tie_word_embeddings"],
        **whole,
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).eval()
        for parameter_name, parameter in model.named_parameters():
            is_norm = any(name in parameter_name for name in ("norm", "ln_", "_ln"))
            is_norm &= parameter_name.endswith("weight")
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
            if "vision_tower" in parameter_name and "q_norm" in parameter_name:
                parameter.data *= 0.25  # scores are scaled only here
        for buffer_name, buffer in model.named_buffers():
            part = buffer_name.rpartition(".")[2]
            if part in _BOUNDS:
                buffer.fill_(_BOUNDS[part] * (1 + 0.2 * torch.rand(())))
            elif part in ("std_bias", "std_scale"):
                buffer.normal_(float(part == "std_scale"), 0.2)
        if kind.startswith("gemma"):
            # As tied heads they would otherwise repeat the last token forever.
            model.get_input_embeddings().weight.data *= 0.1
        never_generated = [IMAGE, VISION_START] if "omni" in kind else [IMAGE]
        model.get_output_embeddings().weight.data[never_generated] = 0.0
    return model


def save(kind: str, directory: Path, **options: Any) -> Any:
    """Save ``build(kind)`` as a checkpoint; returns the model."""
    model = build(kind, **options)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    if kind == "kimi_k25":
        _publish_kimi(model, directory)
    if kind == "gemma4_unified":
        _mask_as_documented(model)
    if kind.startswith("gemma4"):  # its images must fit into windows
        preparing = {"max_soft_tokens": 9, "do_normalize": False}
        (directory / "preprocessor_config.json").write_text(json.dumps(preparing))
    return model


def _publish_kimi(model: Any, directory: Path) -> None:
    """Give the tensors their published names and layouts; saving gives neither."""
    import torch
    from safetensors.torch import load_file, save_file

    path = directory / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(path).items():
        name = name.replace("language_model.model.blocks", "language_model.model.layers")
        name = name.replace("vision_tower.encoder.patch_embed", "vision_tower.patch_embed")
        tensors[name.replace("model.mm_projector", "mm_projector")] = tensor
    for i, layer in enumerate(model.model.vision_tower.layers):
        attention = layer.attn
        for part in ("weight", "bias"):
            rows = [getattr(attention, f"{kind}_proj").get_parameter(part).data for kind in "qkv"]
            for at in (0, 1):  # from halves to pairs
                halves = rows[at].unflatten(0, (attention.num_heads, 2, -1))
                rows[at] = halves.transpose(1, 2).flatten(0, 2)
            tensors[f"vision_tower.encoder.blocks.{i}.wqkv.{part}"] = torch.cat(rows)
    save_file(tensors, path, {"format": "pt"})


def _mask_as_documented(model: Any) -> None:
    """Give Gemma 4 Unified the masks that its class makes for ``generate``.

    Its forward pass alone lets images see both ways in full attention too, against the docstring
    of these masks and against the model that its authors published.
    """
    import torch

    def prepare(module: Any, _: Any, given: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        kinds = given.get("mm_token_type_ids")
        if kinds is None or isinstance(given.get("attention_mask"), dict):
            return (), given
        past = given.get("past_key_values")
        states = torch.zeros(*kinds.shape, module.config.get_text_config().hidden_size)
        mask = torch.ones_like(kinds)
        made = module.create_masks_for_generate(module.config, states, mask, past, None, kinds)
        return (), {**given, "attention_mask": made}

    model.register_forward_pre_hook(prepare, with_kwargs=True)
