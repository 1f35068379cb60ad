"""What the tiny random models of ``tests/tiny_models.py`` are: keys of their configs."""

from __future__ import annotations

from typing import Any

SHAPE = {
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


ABSENT = object()  # a key of the shape that a family does not have
_LAYER_NORM = {"rms_norm_eps": ABSENT, "layer_norm_eps": 1e-4}


def _rope(kind: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}


_FALCON = {
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps"), ABSENT),
    **{"layer_norm_epsilon": 1e-4, "alibi": False},
}
_DEEPSEEK = {
    **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "pad_token_id": 0},
    **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "n_shared_experts": 2,
}
_ROUTED = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"n_shared_experts": 2, "n_group": 1, "topk_group": 1},
}
_GPT2 = {
    **dict.fromkeys(SHAPE, ABSENT),
    **{"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 128, "n_inner": 80},
    **{"vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2},
}
_FULL = ["full_attention"] * 3


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
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "gpt_bigcode_by_head": ("GPTBigCodeConfig", {**_GPT2, "multi_query": False}),
    "opt": (
        "OPTConfig",
        {
            **dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps"), ABSENT),
            **{"ffn_dim": 80, "pad_token_id": 0},
        },
    ),
    "gpt_neox": (
        "GPTNeoXConfig",
        {
            **_LAYER_NORM,
            "num_key_value_heads": ABSENT,
            **_rope("default", partial_rotary_factor=0.25),
        },
    ),
    "gpt_neox_serial": (
        "GPTNeoXConfig",
        {
            **_LAYER_NORM,
            "num_key_value_heads": ABSENT,
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
    "glm": ("GlmConfig", {"head_dim": 16, "pad_token_id": 0}),
    "glm4": ("Glm4Config", {"head_dim": 16, "pad_token_id": 0, "attention_bias": False}),
    "glm4_moe": (
        "Glm4MoeConfig",
        {
            **{**_ROUTED, "head_dim": 16, "attention_bias": True, "use_qk_norm": True},
            **{"first_k_dense_replace": 1, "routed_scaling_factor": 1.7},
        },
    ),
    "glm4_moe_lite": (
        "Glm4MoeLiteConfig",
        {**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    ),
    "solar_open": ("SolarOpenConfig", {**_ROUTED, "head_dim": 16}),
    "dots1": (
        "Dots1Config",
        {
            **{**_ROUTED, "first_k_dense_replace": 1, "norm_topk_prob": True, "head_dim": 16},
            **{"sliding_window": 12, "max_window_layers": 2},
        },
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
            **{"intermediate_size": 24, **_rope("default", partial_rotary_factor=0.5)},
        },
    ),
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24},
            **{"moe_layer_start_index": 1, "tie_word_embeddings": False},
        },
    ),
    "olmo3": (
        "Olmo3Config",
        {
            **{"pad_token_id": 0, "sliding_window": 12},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            },
        },
    ),
    "olmoe": (
        "OlmoeConfig",
        {"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "pad_token_id": 0},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "logits_scaling": 2.0},
        },
    ),
    "granitemoeshared": (
        "GraniteMoeSharedConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
            **{"residual_multiplier": 0.4, "shared_intermediate_size": 40},
        },
    ),
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
            **{"attention_multiplier": 0.2, "pad_token_id": 0},
        },
    ),
    "exaone4": (
        "Exaone4Config",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "exaone4_full": ("Exaone4Config", {"sliding_window": None, "layer_types": _FULL}),
    "seed_oss": ("SeedOssConfig", {"head_dim": 16}),
    "internlm3": ("InternLM3Config", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "iquestcoder": ("IQuestCoderConfig", {"head_dim": 16}),
    "helium": ("HeliumConfig", {"head_dim": 8, "pad_token_id": 0, "attention_bias": True}),
    "ministral": (
        "MinistralConfig",
        {
            **{"sliding_window": 12, "head_dim": 16},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "ministral3": (
        "Ministral3Config",
        {
            **{"head_dim": 16, "pad_token_id": 0},
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    "arcee": ("ArceeConfig", {"attention_bias": True, "mlp_bias": True}),
    "nemotron": ("NemotronConfig", {"rms_norm_eps": ABSENT, "norm_eps": 1e-4}),
    "jais2": ("Jais2Config", _LAYER_NORM),
    "starcoder2": (
        "Starcoder2Config",
        {"rms_norm_eps": ABSENT, "norm_epsilon": 1e-4, "sliding_window": 12},
    ),
    "hunyuan_dense": (
        "HunYuanDenseV1Config",
        {"head_dim": 16, "pad_token_id": 0, **_rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "hunyuan_moe": (
        "HunYuanMoEV1Config",
        {"head_dim": 8, "pad_token_id": 0, "num_experts": 6, "moe_topk": 3, "attention_bias": True},
    ),
    "afmoe": (
        "AfmoeConfig",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"head_dim": 16, "sliding_window": 12, "route_scale": 1.7, "mup_enabled": True},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "cwm": (
        "CwmConfig",
        {
            **{"head_dim": 16, "sliding_window": 12, "pad_token_id": 0},
            **_rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            ),
        },
    ),
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"num_shared_experts": 2, "n_group": 3, "topk_group": 2, "sliding_window": 12},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "hy_v3": (
        "HYV3Config",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"head_dim": 16, "num_shared_experts": 2},
        },
    ),
    "mellum": (
        "MellumConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"head_dim": 16, "sliding_window": 12},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
                    "original_max_position_embeddings": 32,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "mistral4": (
        "Mistral4Config",
        {
            **{**_DEEPSEEK, "n_group": 3, "topk_group": 2, "first_k_dense_replace": 1},
            **_rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    "vaultgemma": (
        "VaultGemmaConfig",
        {
            **{"head_dim": 16, "query_pre_attn_scalar": 9, "sliding_window": 12},
            **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 4.0, "pad_token_id": 0},
        },
    ),
    "youtu": (
        "YoutuConfig",
        {
            **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "pad_token_id": 0},
            **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12},
        },
    ),
    "granite_swa": (
        "GraniteSWAConfig",
        {
            **{"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "sliding_window": 12},
            **{"layer_rope_theta": [0, 10000.0, 1000.0], "pad_token_id": 0},
        },
    ),
    "granitemoe_swa": (
        "GraniteMoeSWAConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
            **{"shared_intermediate_size": 40, "attention_multiplier": 0.2, "sliding_window": 12},
            "pad_token_id": 0,
        },
    ),
}
