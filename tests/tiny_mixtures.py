"""The tiny random models of ``tests/tiny_models.py`` with a mixture of experts."""

from __future__ import annotations

from tests.tiny_shape import ABSENT, SHAPE, Kinds, rope

_DEEPSEEK = {
    **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16, "pad_token_id": 0},
    **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "n_shared_experts": 2,
}
# Queries attend to fewer positions than the tests' texts have. Where all index heads of a position
# say 0, equal scores would leave the choice to Hugging Face's sort: with ten heads that is rare.
_SPARSE = {
    **{**_DEEPSEEK, "first_k_dense_replace": 1},
    **{"index_topk": 12, "index_n_heads": 10, "index_head_dim": 16},
}
_ROUTED = {
    **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    **{"n_shared_experts": 2, "n_group": 1, "topk_group": 1},
}
_COHERE = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24, "head_dim": 16},
    **{"sliding_window": 12, "logit_scale": 0.3, "pad_token_id": 0},
}
_LAGUNA = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "head_dim": 16},
    **{"shared_expert_intermediate_size": 40, "moe_routed_scaling_factor": 1.7},
    **{"sliding_window": 12, "mlp_layer_types": ["sparse", "sparse", "dense"]},
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "rope_parameters": {
        "full_attention": {
            **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0},
            **{"original_max_position_embeddings": 32, "partial_rotary_factor": 0.5},
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    },
}

MIXTURES: Kinds = {
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
    "gpt_oss": (
        "GptOssConfig",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 16},
            **{"sliding_window": 12, "swiglu_limit": 1.5, "pad_token_id": 0},
            **rope("yarn", factor=4.0, original_max_position_embeddings=32, truncate=False),
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
            **rope(
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
    "axk1": (
        "AXK1Config",
        {
            **{**_DEEPSEEK, "mlp_layer_types": ["dense", "sparse", "sparse"]},
            **{"n_group": 3, "topk_group": 2},
        },
    ),
    "axk2": ("AXK2Config", {**_SPARSE, "gated_norm_rank": 5, "n_group": 3, "topk_group": 2}),
    "flint": (
        "FlintConfig",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"shared_expert_intermediate_size": 40, "num_hidden_layers": 5, "head_dim": 16},
            **{"sliding_window": 12, "mlp_only_layers": [1], "pad_token_id": 0},
        },
    ),
    "longcat_flash": (
        "LongcatFlashConfig",
        {
            **{"num_layers": 2, "q_lora_rank": 20, "kv_lora_rank": 16, "num_key_value_heads": 6},
            **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "head_dim": 8, "v_head_dim": 12},
            **{"ffn_hidden_size": 80, "n_routed_experts": 6, "moe_topk": 3, "zero_expert_num": 4},
            **{"expert_ffn_hidden_size": 24, "routed_scaling_factor": 1.5, "pad_token_id": 0},
            **dict.fromkeys(("num_hidden_layers", "intermediate_size"), ABSENT),
        },
    ),
    "deepseek_v32": (
        "DeepseekV32Config",
        {
            **{**_SPARSE, "n_group": 3, "topk_group": 2},
            **rope("yarn", factor=4.0, original_max_position_embeddings=32, mscale_all_dim=1.2),
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsaConfig",
        {**_SPARSE, "indexer_types": ["full", "shared", "full"], "n_group": 1, "topk_group": 1},
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
    "mimo_v2_flash": (
        "MiMoV2FlashConfig",
        {
            **{**_ROUTED, "n_shared_experts": ABSENT, "head_dim": 24, "v_head_dim": 10},
            **{"num_attention_heads": 4, "sliding_window": 12, "attention_bias": True},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "flex_olmo": (
        "FlexOlmoConfig",
        {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 24, "pad_token_id": 0},
    ),
    "minimax_m2": (
        "MiniMaxM2Config",
        {
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 16},
            **{"intermediate_size": 24, **rope("default", partial_rotary_factor=0.5)},
        },
    ),
    "ernie4_5_moe": (
        "Ernie4_5_MoeConfig",
        {
            **{"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 24},
            **{"moe_layer_start_index": 1, "tie_word_embeddings": False},
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
    "exaone_moe": (
        "ExaoneMoeConfig",
        {
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"num_shared_experts": 2, "n_group": 3, "topk_group": 2, "sliding_window": 12},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "cohere2_moe": (
        "Cohere2MoeConfig",
        {
            **{**_COHERE, "rms_norm_eps": ABSENT, "layer_norm_eps": 1e-4, "num_shared_experts": 2},
            **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 56},
            **{"num_hidden_layers": 4, "sliding_window_pattern": 2},
        },
    ),
    "cohere2_moe_sigmoid": (
        "Cohere2MoeConfig",
        {
            **{**_COHERE, "expert_selection_fn": "sigmoid", "norm_topk_prob": False},
            **{"num_shared_experts": 1, "shared_expert_combination_strategy": "sum"},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "kolibri1": (
        "Kolibri1Config",
        {
            **{"intermediate_size": ABSENT, "num_experts": 6, "num_experts_per_tok": 3},
            **{"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
            **{"head_dim": 16, "sliding_window": 12, "norm_topk_prob": True},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "laguna": ("LagunaConfig", {**_LAGUNA, "num_attention_heads_per_layer": [6, 4, 6]}),
    "laguna_by_number": ("LagunaConfig", {**_LAGUNA, "gating": "per-element"}),
    "step3p7": (
        "Step3p7TextConfig",
        {
            **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"share_expert_dim": 40, "head_dim": 16, "sliding_window": 12, "pad_token_id": 0},
            **{"num_sliding_attention_heads": 4, "moe_router_scaling_factor": 1.7},
            **{"swiglu_limits": [None, 0.5, None], "swiglu_limits_shared": [0.7, None, 0.4]},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {
                    **{"rope_type": "default", "rope_theta": 10000.0},
                    "partial_rotary_factor": 0.5,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
            },
        },
    ),
    "dbrx": (
        "DbrxConfig",
        {
            **dict.fromkeys(SHAPE, ABSENT),
            **{"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128, "vocab_size": 160},
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.5, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 24, "moe_num_experts": 6, "moe_top_k": 3},
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
            **rope(
                "yarn",
                factor=4.0,
                original_max_position_embeddings=16,
                mscale=1.0,
                mscale_all_dim=1.0,
                llama_4_scaling_beta=0.5,
            ),
        },
    ),
    "phimoe": (
        "PhimoeConfig",
        {
            **{"num_local_experts": 6, "attention_bias": True, "lm_head_bias": True},
            # Large enough that experts are near, and far from, others.
            "router_jitter_noise": 0.3,
            **rope(
                "longrope",
                original_max_position_embeddings=128,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 3.0, 4.0],
                short_mscale=1.1,
                long_mscale=1.3,
            ),
        },
    ),
    "phimoe_window": (
        "PhimoeConfig",
        {"num_local_experts": 5, "head_dim": 16, "sliding_window": 12, "router_jitter_noise": 0.0},
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
