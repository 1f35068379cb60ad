"""Tiny Gemma 4 models, whose layers differ in their heads, so that ranks need separate tests, and
Gemma 3n models, which have one rank only."""

from __future__ import annotations

from typing import Any

_GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_key_value_heads": 3,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "final_logit_softcapping": 4.0,
    "pad_token_id": 0,
}

GEMMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma4": ("Gemma4TextConfig", {**_GEMMA4, "hidden_size_per_layer_input": 0}),
    "gemma4_moe": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 6,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_shared": (
        "Gemma4TextConfig",
        {
            **_GEMMA4,
            "attention_k_eq_v": False,
            "num_hidden_layers": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 3,
            "num_kv_shared_layers": 3,
            "use_double_wide_mlp": True,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 160,
        },
    ),
    "gemma4_unified": ("Gemma4UnifiedTextConfig", {**_GEMMA4, "attention_k_eq_v": False}),
}

_GEMMA3N = {
    "head_dim": 8,
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_hidden_layers": 6,
    "num_kv_shared_layers": 3,
    "intermediate_size": [80, 80, 72, 80, 96, 80],
    "activation_sparsity_pattern": [0.8, 0.8, 0.95, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 150,  # the last tokens have none of their own
    "laurel_rank": 4,
    "final_logit_softcapping": 4.0,
    "pad_token_id": 0,
}

GEMMAS_3N: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3n": ("Gemma3nTextConfig", _GEMMA3N),
    "gemma3n_other": (
        "Gemma3nTextConfig",
        {
            **{**_GEMMA3N, "num_kv_shared_layers": 0, "intermediate_size": 80},
            **{"altup_num_inputs": 3, "altup_active_idx": 1, "altup_correct_scale": False},
            "activation_sparsity_pattern": [0.0] * 6,
        },
    ),
}
