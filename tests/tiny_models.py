"""Tiny random models in Hugging Face format, one for each family and rope kind.

    directory = tiny_models.save("qwen3", tmp_path)

They have no tokenizer. ``tests/engine/models`` holds them against Hugging Face's own code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SHAPE = {
    "vocab_size": 160,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


_ABSENT = object()  # a key of the shape that a family does not have
_LAYER_NORM = {"rms_norm_eps": _ABSENT, "layer_norm_eps": 1e-4}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_FALCON = {
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps"), _ABSENT),
    **{"layer_norm_epsilon": 1e-4, "alibi": False},
}
_DEEPSEEK = {
    **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "pad_token_id": 0},
    **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "n_shared_experts": 2,
}


# name -> (Hugging Face config class, what differs from the shape above)
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 6}),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_linear": ("LlamaConfig", _rope("linear", factor=2.0)),
    "llama_dynamic": ("LlamaConfig", _rope("dynamic", factor=2.0)),
    "llama_llama3": (
        "LlamaConfig",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama_yarn": (
        "LlamaConfig",
        _rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_longrope": (
        "LlamaConfig",
        _rope(
            "longrope",
            factor=4.0,
            original_max_position_embeddings=32,
            short_factor=[1.0, 1.1, 1.2, 1.3],
            long_factor=[1.0, 2.0, 3.0, 4.0],
        ),
    ),
    "smollm": (
        "LlamaConfig",
        {"tie_word_embeddings": True, "num_attention_heads": 3, "num_key_value_heads": 1},
    ),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "mistral_full": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2_window": (
        "Qwen2Config",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {"head_dim": 16}),
    "smollm3": (
        "SmolLM3Config",
        {"no_rope_layer_interval": 2, "pad_token_id": 0},
    ),
    "gemma": ("GemmaConfig", {"head_dim": 16, "pad_token_id": 0}),
    "gemma2": (
        "Gemma2Config",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": 12,
            "attn_logit_softcapping": 5.0,
            "final_logit_softcapping": 4.0,
            "pad_token_id": 0,
        },
    ),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 9,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "linear",
                    "factor": 4.0,
                    "rope_theta": 100000.0,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
            "pad_token_id": 0,
        },
    ),
    "granite": (
        "GraniteConfig",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "phi3": ("Phi3Config", {"sliding_window": 12, "pad_token_id": 0}),
    "phi4_mini": (
        "Phi3Config",
        {
            "head_dim": 8,
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.1, 1.2],
                "long_factor": [1.0, 2.0, 3.0],
            },
            "pad_token_id": 0,
        },
    ),
    "olmo2": ("Olmo2Config", {"pad_token_id": 0}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, **_LAYER_NORM}),
    "stablelm_parallel": (
        "StableLmConfig",
        {
            "use_parallel_residual": True,
            **_LAYER_NORM,
            **_rope("default", partial_rotary_factor=0.5),
        },
    ),
    "mixtral": ("MixtralConfig", {"num_local_experts": 5, "num_experts_per_tok": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"shared_expert_intermediate_size": 40, "mlp_only_layers": [1]},
        },
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"norm_topk_prob": True, "head_dim": 16},
        },
    ),
    "gpt2": (
        "GPT2Config",
        {
            **dict.fromkeys(_SHAPE, _ABSENT),
            **{"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 128, "n_inner": 80},
            **{"vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            **_LAYER_NORM,
            "num_key_value_heads": _ABSENT,
            **_rope("default", partial_rotary_factor=0.25),
        },
    ),
    "gpt_neox_serial": (
        "GPTNeoXConfig",
        {
            **_LAYER_NORM,
            "num_key_value_heads": _ABSENT,
            "use_parallel_residual": False,
            **_rope("default", partial_rotary_factor=0.5),
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
            **{"sliding_window": 12, "swiglu_limit": 1.5, "pad_token_id": 0},
            **_rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
        },
    ),
    "deepseek_v2_lite": (
        "DeepseekV2Config",
        {**_DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
    ),
    "deepseek_v2": (
        "DeepseekV2Config",
        {
            **{**_DEEPSEEK, "attention_bias": True, "routed_scaling_factor": 1.7},
            **{"topk_method": "group_limited_greedy", "n_group": 3, "topk_group": 2},
        },
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        {
            **{**_DEEPSEEK, "first_k_dense_replace": 1, "n_group": 3, "topk_group": 2},
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=32,
                mscale=1.5,
                mscale_all_dim=1.2,
            ),
        },
    ),
    "deepseek_v3_halves": (
        "DeepseekV3Config",
        {
            **{**_DEEPSEEK, "rope_interleave": False, "norm_topk_prob": False},
            **{"q_lora_rank": None, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0},
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        {
            **{"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 40},
            **{"num_local_experts": 4, "interleave_moe_layer_step": 2, "pad_token_id": 0},
            **{"no_rope_layer_interval": 3, "attention_chunk_size": 16, "floor_scale": 8},
            **{"num_hidden_layers": 4, "attn_scale": 0.5},
        },
    ),
    "llama4_plain": (
        "Llama4TextConfig",
        {
            **{"head_dim": 16, "intermediate_size": 24, "intermediate_size_mlp": 40},
            **{"num_local_experts": 4, "num_experts_per_tok": 2, "moe_layers": [1, 2]},
            **{"attn_temperature_tuning": False, "use_qk_norm": False, "pad_token_id": 0},
            **{"no_rope_layers": [1, 0, 1], "attention_chunk_size": 32},
        },
    ),
    "falcon": ("FalconConfig", {**_FALCON, "bias": True}),
    "falcon_groups": (
        "FalconConfig",
        {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 80},
    ),
    "falcon_one_norm": (
        "FalconConfig",
        {
            **{**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 3},
            **{"num_ln_in_parallel_attn": 1, "tie_word_embeddings": False},
        },
    ),
    "falcon_serial": ("FalconConfig", {**_FALCON, "parallel_attn": False, "multi_query": False}),
    "cohere": ("CohereConfig", {**_LAYER_NORM, "logit_scale": 0.3, "pad_token_id": 0}),
    "cohere2": (
        "Cohere2Config",
        {
            **_LAYER_NORM,
            "head_dim": 16,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "pad_token_id": 0,
        },
    ),
}


def build(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A Hugging Face model with random weights of a size that makes its parts matter."""
    import torch
    import transformers

    config_class, differences = KINDS[kind]
    keys = {**_SHAPE, **differences, **changes}
    config = getattr(transformers, config_class)(
        **{key: value for key, value in keys.items() if value is not _ABSENT}
    )
    config._attn_implementation = "eager"
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            # Norms away from one, biases away from zero, scores far enough apart to be chosen by.
            is_norm = ("norm" in name or "ln_" in name) and name.endswith("weight")
            parameter.data.normal_(1.0 if is_norm else 0.0, 0.2 if is_norm else 0.25)
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.25)
    return model.eval()


def save(kind: str, directory: Path, seed: int = 0, **changes: Any) -> Path:
    """Save ``build(kind)`` as a checkpoint; returns the directory."""
    model = build(kind, seed, **changes)
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Change keys of a saved config.json; None removes one."""
    path = directory / "config.json"
    config = json.loads(path.read_text())
    for key, value in changes.items():
        if value is None:
            config.pop(key, None)
        else:
            config[key] = value
    path.write_text(json.dumps(config))


def greedy_tokens(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """How Hugging Face's own generate continues a prompt, always by the likeliest token."""
    import torch

    output = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        max_new_tokens=num_tokens,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, len(prompt) :].tolist()
