"""The tiny random models of ``tests/tiny_models.py`` with stateful layers."""

from __future__ import annotations

from typing import Any

from tests.tiny_shape import ABSENT

_LINEAR = ["linear_attention", "full_attention", "linear_attention"]
_CONVS = ["conv", "full_attention", "conv"]
_DELTA = {
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 16, "pad_token_id": 0},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 12, "layer_types": _LINEAR},
}
_EXPERTS = {
    **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
    "shared_expert_intermediate_size": 40,
}
# Hugging Face saves three convolutions of equal width, so values are as wide as keys.
_OLMO = {
    **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "pad_token_id": 0},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": _LINEAR},
}
_CONV = {"layer_types": _CONVS, "pad_token_id": 0, "norm_eps": 1e-4, "rms_norm_eps": ABSENT}

_MAMBA = {
    **{"mamba_n_heads": 6, "mamba_d_head": 24, "mamba_d_state": 12, "mamba_chunk_size": 8},
    **{"mamba_expand": 3, "pad_token_id": 0},
}
_GRANITE = {
    **_MAMBA,
    **{"layer_types": _LINEAR, "shared_intermediate_size": 40, "embedding_multiplier": 3.0},
    **{"residual_multiplier": 0.4, "attention_multiplier": 0.2, "logits_scaling": 2.0},
}

# Hugging Face clamps time steps to at least ``time_step_min``; the published models do not.
_NEMOTRON = {
    **dict.fromkeys(("num_hidden_layers", "rms_norm_eps"), ABSENT),
    **{"layer_norm_epsilon": 1e-4, "head_dim": 16, "pad_token_id": 0, "time_step_min": 1e-12},
    **{"mamba_num_heads": 6, "mamba_head_dim": 24, "ssm_state_size": 12, "chunk_size": 8},
    **{"n_groups": 2, "conv_kernel": 4},
    "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "mlp"],
}

_MAMBA2 = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), ABSENT),
    **dict.fromkeys(("rms_norm_eps", "max_position_embeddings"), ABSENT),
    **{"num_heads": 6, "head_dim": 16, "state_size": 12, "n_groups": 2, "chunk_size": 8},
    **{"layer_norm_epsilon": 1e-4, "pad_token_id": 0},
}

_MAMBA1 = {
    **dict.fromkeys(("intermediate_size", "num_attention_heads", "num_key_value_heads"), ABSENT),
    **dict.fromkeys(("rms_norm_eps", "max_position_embeddings"), ABSENT),
    **{"state_size": 12, "layer_norm_epsilon": 1e-4, "pad_token_id": 0},
}

# name -> (Hugging Face config class, differences from the shape of the others)
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon_h1": (
        "FalconH1Config",
        {
            **{**_MAMBA, "mamba_d_ssm": 144, "mamba_n_groups": 2, "key_multiplier": 0.6},
            **{"attention_in_multiplier": 1.3, "attention_out_multiplier": 0.7},
            **{"ssm_multipliers": [0.7, 1.2, 0.8, 1.1, 0.9], "ssm_in_multiplier": 1.4},
            **{"ssm_out_multiplier": 0.5, "mlp_multipliers": [0.8, 1.2]},
            **{"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5},
        },
    ),
    "falcon_h1_norm": (
        "FalconH1Config",
        {
            **{**_MAMBA, "mamba_d_ssm": 144, "mamba_rms_norm": True, "mlp_bias": True},
            **{"mamba_norm_before_gate": False, "attention_bias": True, "mamba_proj_bias": True},
            **{"projectors_bias": True, "key_multiplier": 0.6, "ssm_in_multiplier": 1.4},
        },
    ),
    "lfm3": (
        "Lfm3Config",
        {
            **{**_CONV, "head_dim": 16, "sliding_window": 12, "conv_L_cache": 5},
            **{"num_hidden_layers": 4, "tie_word_embeddings": True},
            "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
        },
    ),
    "lfm3_ungated": (
        "Lfm3Config",
        {
            **{**_CONV, "head_dim": 16, "use_attention_gate": False, "use_sandwich_norm": False},
            "tie_word_embeddings": True,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**_DELTA, **_EXPERTS, "mlp_only_layers": [1], "linear_num_key_heads": 4},
    ),
    "qwen3_5_text": ("Qwen3_5TextConfig", _DELTA),
    "qwen3_5_moe_text": (
        "Qwen3_5MoeTextConfig",
        {**_DELTA, **_EXPERTS, "linear_conv_kernel_dim": 3, "attention_bias": True},
    ),
    "olmo_hybrid": ("OlmoHybridConfig", _OLMO),
    "olmo_hybrid_nope": (
        "OlmoHybridConfig",
        {
            **_OLMO,
            "rope_parameters": {"rope_type": "default", "rope_theta": None},
            "linear_allow_neg_eigval": False,
        },
    ),
    "lfm2": ("Lfm2Config", {**_CONV, "conv_bias": True, "block_auto_adjust_ff_dim": False}),
    "lfm2_adjusted": (
        "Lfm2Config",
        {**_CONV, "intermediate_size": 160, "block_multiple_of": 24, "tie_word_embeddings": False},
    ),
    "lfm2_moe": (
        "Lfm2MoeConfig",
        {
            **_CONV,
            **{"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"num_dense_layers": 1, "routed_scaling_factor": 1.5},
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE,
            **{"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 24},
            **{"mamba_n_groups": 2, "mamba_proj_bias": True},
        },
    ),
    "granitemoehybrid_dense": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE,
            **{"num_local_experts": 0, "position_embedding_type": "rope"},
            **{"mamba_conv_bias": False, "mamba_d_conv": 3},
        },
    ),
    "granitemoehybrid_attention": (
        "GraniteMoeHybridConfig",
        {
            **_GRANITE,
            **{"num_local_experts": 0, "position_embedding_type": "rope"},
            "layer_types": ["full_attention"] * 3,
        },
    ),
    "bamba": (
        "BambaConfig",
        {**_MAMBA, "attn_layer_indices": [1], "mamba_n_groups": 3, "mlp_bias": True},
    ),
    "kimi_linear": (
        "KimiLinearConfig",
        {
            **{"num_key_value_heads": 6, "kv_lora_rank": 16, "qk_nope_head_dim": 10},
            **{"qk_rope_head_dim": 8, "v_head_dim": 12, "num_experts": 6, "pad_token_id": 0},
            **{"num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 1},
            **{"linear_num_heads": 4, "linear_head_dim": 8, "layer_types": _LINEAR},
        },
    ),
    "bailing_hybrid": (
        "BailingHybridConfig",
        {
            **{"num_key_value_heads": 6, "kv_lora_rank": 16, "qk_nope_head_dim": 10},
            **{"qk_rope_head_dim": 8, "v_head_dim": 12, "num_local_experts": 6, "n_group": 3},
            **{"topk_group": 2, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"head_dim": 16, "layer_group_size": 2, "first_k_dense_replace": 1},
            **{"kda_lower_bound": -3.0, "rope_theta": 10000.0, "pad_token_id": 0},
        },
    ),
    "mamba": ("MambaConfig", _MAMBA1),
    "mamba_biased": (
        "MambaConfig",
        {
            **{**_MAMBA1, "use_bias": True, "use_conv_bias": False, "conv_kernel": 3},
            "tie_word_embeddings": False,
        },
    ),
    "falcon_mamba": ("FalconMambaConfig", {**_MAMBA1, "mixer_rms_eps": 1e-3}),
    "jamba": (
        "JambaConfig",
        {
            **{"mamba_d_state": 12, "mamba_expand": 3, "num_hidden_layers": 4, "pad_token_id": 0},
            **{"attn_layer_period": 3, "attn_layer_offset": 1, "num_experts": 5},
        },
    ),
    "jamba_dense": (
        "JambaConfig",
        {
            **{"mamba_d_state": 12, "mamba_dt_rank": 5, "num_experts": 1, "pad_token_id": 0},
            **{"attn_layer_period": 3, "attn_layer_offset": 1, "mamba_proj_bias": True},
        },
    ),
    "mamba2": ("Mamba2Config", _MAMBA2),
    "mamba2_tied": (
        "Mamba2Config",
        {
            **{**_MAMBA2, "n_groups": 1, "tie_word_embeddings": True, "use_bias": True},
            **{"use_conv_bias": False, "conv_kernel": 3},
        },
    ),
    "nemotron_h": ("NemotronHConfig", _NEMOTRON),
    "nemotron_h_biased": (
        "NemotronHConfig",
        {
            **_NEMOTRON,
            **{"use_bias": True, "mlp_bias": True, "use_conv_bias": False, "conv_kernel": 3},
            "layers_block_type": ["full_attention", "linear_attention", "mlp", "linear_attention"],
        },
    ),
    "nemotron_h_moe": (
        "NemotronHConfig",
        {
            **_NEMOTRON,
            **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"moe_shared_expert_intermediate_size": 40, "routed_scaling_factor": 1.5},
            "layers_block_type": [
                *("linear_attention", "moe", "full_attention", "moe"),
                *("linear_attention", "mlp", "linear_attention"),
            ],
        },
    ),
    "nemotron_h_latent": (
        "NemotronHConfig",
        {
            **_NEMOTRON,
            **{"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24},
            **{"moe_shared_expert_intermediate_size": 40, "moe_latent_size": 20},
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        },
    ),
    # Hugging Face applies the limits in prefill but not in decode: compare only logits.
    "bamba_limited": (
        "BambaConfig",
        {**_MAMBA, "attn_layer_indices": [1], "time_step_limit": [0.3, 1.5]},
    ),
}
