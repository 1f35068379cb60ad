"""Tiny Gemma 4 models, whose layers differ in their heads, so that ranks need separate tests."""

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
