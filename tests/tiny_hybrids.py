"""Of the tiny random models of ``tests/tiny_models.py`` those with layers that keep a state."""

from __future__ import annotations

from typing import Any

from tests.tiny_kinds import ABSENT

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
# Hugging Face saves three convolutions of as many channels each, so values are as wide as keys.
_OLMO = {
    **{"linear_num_key_heads": 3, "linear_num_value_heads": 3, "pad_token_id": 0},
    **{"linear_key_head_dim": 8, "linear_value_head_dim": 8, "layer_types": _LINEAR},
}
_CONV = {"layer_types": _CONVS, "pad_token_id": 0, "norm_eps": 1e-4, "rms_norm_eps": ABSENT}

# name -> (Hugging Face config class, what differs from the shape of the others)
HYBRIDS: dict[str, tuple[str, dict[str, Any]]] = {
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
}
