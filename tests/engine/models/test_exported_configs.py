"""Additional keys written by a family's own exporter: accepted, not rejected."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.families import read_spec

_SIZES: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu"},
    **{"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_NANO_3 = {
    **_ROUTED,
    **{"hybrid_override_pattern": "ME*E", "n_shared_experts": 1, "norm_eps": 1e-5, "n_group": 1},
    **{"moe_shared_expert_intermediate_size": 48, "moe_shared_expert_overlap": False},
    **{"topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"mamba_ssm_cache_dtype": "float32", "partial_rotary_factor": 1.0},
}
_INDEXED = {
    **{**_ROUTED, "n_shared_experts": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "ep_size": 1},
    **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8, "index_head_dim": 8},
    **{"index_n_heads": 4, "index_topk": 16, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    **{"moe_layer_freq": 1, "first_k_dense_replace": 1, "norm_topk_prob": True},
    **{"num_nextn_predict_layers": 1, "attention_bias": False, "attention_dropout": 0.0},
    **{"n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.5, "pretraining_tp": 1},
}
_LONGROPE = {"type": "longrope", "original_max_position_embeddings": 32}
EXPORTED: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 16},
    "deepseek_v3": {**_ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "ep_size": 1},
    "axk1": {
        **{**_ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "ep_size": 1},
        **{"topk_method": "none", "moe_layer_freq": 1, "first_k_dense_replace": 1},
        "auto_map": {"AutoModelForCausalLM": "modeling_axk1.AXK1ForCausalLM"},
    },
    "axk2": {
        **{**_INDEXED, "n_group": None, "topk_group": None, "gated_norm_rank": 4, "head_dim": 4},
        **{"qk_head_dim": 12, "auto_map": None},
    },
    "flint": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 32, "sliding_window": 13, "auto_map": None},
        **{"layer_types": ["full_attention"] * 2 + ["sliding_attention", "full_attention"]},
        **{"mlp_only_layers": [0, 1], "decoder_sparse_step": 1, "norm_topk_prob": True},
        **{"output_router_logits": False, "router_aux_loss_coef": 0.0005},
        **{"attention_bias": False, "attention_dropout": 0.0},
    },
    "muse_glimmer_text": {
        **{"hidden_act": None, "hidden_activation": "silu", "auto_map": None, "rope_theta": None},
        **{"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}},
        **{"layer_rope_theta": [0, 500000.0, 500000.0, 500000.0], "qk_scale_factor": 3.87},
        **{"layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 16},
        **{"post_norm_eps": 1e-8, "output_multiplier": 0.19611613513818404},
        **{"final_logit_softcapping": 20.0, "attention_bias": False, "tie_word_embeddings": False},
    },
    "longcat_flash": {
        **{"num_layers": 2, "attention_method": "MLA", "zero_expert_type": "identity"},
        **{"zero_expert_num": 4, "n_routed_experts": 8, "moe_topk": 2, "ffn_hidden_size": 64},
        **{"expert_ffn_hidden_size": 16, "mla_scale_q_lora": True, "mla_scale_kv_lora": True},
        **{"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        **{"v_head_dim": 8, "routed_scaling_factor": 6.0, "router_bias": False, "head_dim": None},
        **{"norm_topk_prob": False, "attention_bias": False, "attention_dropout": 0.0},
    },
    "deepseek_v32": {**_INDEXED, "head_dim": None, "auto_map": None},
    "glm_moe_dsa": {
        **{**_INDEXED, "head_dim": 4, "qk_head_dim": 12, "rope_theta": None, "auto_map": None},
        **{"indexer_rope_interleave": True, "rope_interleave": True, "moe_router_dtype": "float32"},
        **{"index_topk_freq": 4, "index_skip_topk_offset": 3, "index_topk_pattern": None},
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    },
    "minimax_m2": {
        **{"attn_type_list": [1] * 4, "use_qk_norm": True, "qk_norm_type": "per_layer"},
        **{"scoring_func": "sigmoid", "use_routing_bias": True, "shared_intermediate_size": 0},
        **{"num_local_experts": 8, "num_experts_per_tok": 2, "rotary_dim": 4},
        **{"layernorm_full_attention_beta": 1.0, "layernorm_linear_attention_beta": 1.0},
        **{"layernorm_mlp_beta": 1.0, "mlp_intermediate_size": 96, "shared_moe_mode": "sigmoid"},
        **{"mtp_transformer_layers": 1, "num_mtp_modules": 3, "use_mtp": True},
        **{"router_jitter_noise": 0.0, "sliding_window": None},
    },
    "mimo_v2_flash": {
        **{**_ROUTED, "n_shared_experts": None, "n_group": 1, "topk_group": 1, "v_head_dim": 6},
        **{"scoring_func": "sigmoid", "topk_method": "noaux_tc", "routed_scaling_factor": None},
        **{"head_dim": 24, "swa_head_dim": 24, "swa_v_head_dim": 6, "swa_num_attention_heads": 4},
        **{"swa_num_key_value_heads": 4, "swa_rope_theta": 100.0, "partial_rotary_factor": 0.334},
        **{"sliding_window": 16, "sliding_window_size": 16, "attention_chunk_size": 16},
        **{"hybrid_layer_pattern": [0, 1, 1, 0], "moe_layer_freq": [0, 1, 1, 1]},
        **{"add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False},
        **{"attention_value_scale": 0.707, "layernorm_epsilon": 1e-5, "hybrid_block_size": None},
    },
    "cohere2_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "auto_map": None},
        **{"expert_selection_fn": "sigmoid", "norm_topk_prob": True, "logit_scale": 0.25},
        **{"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 96, "use_qk_norm": False},
        **{"prefix_dense_sliding_window_pattern": 1, "sliding_window_pattern": 4},
        **{"shared_expert_combination_strategy": "average", "use_gated_activation": True},
        **{"layer_norm_eps": 1e-5, "sliding_window": 16, "tie_word_embeddings": True},
    },
    "laguna": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        **{"shared_expert_intermediate_size": 16, "gating": "per-head", "sliding_window": 16},
        **{"num_attention_heads_per_layer": [4, 6, 6, 6], "moe_routed_scaling_factor": 2.5},
        **{"moe_router_logit_softcapping": 0.0, "moe_apply_router_weight_on_input": False},
        **{"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "router_aux_loss_coef": 0.0},
        **{"layer_types": ["full_attention", *["sliding_attention"] * 3], "rope_theta": None},
        **{"attention_bias": False, "norm_topk_prob": True, "gating_types": ["per_head"] * 4},
        **{"decoder_sparse_step": 1, "mlp_only_layers": [0], "eos_token_id": [2, 24]},
        "rope_parameters": {
            "full_attention": {
                **{"rope_type": "yarn", "rope_theta": 500000.0, "factor": 128.0, "beta_slow": 1.0},
                **{"beta_fast": 32.0, "attention_factor": 1.4852, "partial_rotary_factor": 0.5},
                "original_max_position_embeddings": 8,
            },
            "sliding_attention": {
                **{"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0},
            },
        },
    },
    "youtu": {
        **{"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4},
        **{"v_head_dim": 8, "rope_interleave": True, "qk_head_dim": 12, "head_dim": None},
        "rope_scaling": {"type": "yarn", "factor": 1.0, "mscale_all_dim": 0},
    },
    "bailing_hybrid": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 2},
        **{"topk_group": 1, "num_shared_experts": 1, "first_k_dense_replace": 1},
        **{"kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
        **{"layer_group_size": 2, "kda_safe_gate": True, "kda_lower_bound": -5.0},
        **{"short_conv_kernel_size": 4, "num_nextn_predict_layers": 1, "model_max_length": 64},
        **{"mtp_loss_scaling_factor": 0.1, "moe_renormalize": True, "num_expert_group": 2},
    },
    "apertus": {
        **{"hidden_act": "xielu", "hidden_dropout": 0.0, "mlp_bias": False, "post_norm": False},
        **{"qk_norm": True, "attention_bias": False, "eos_token_id": [68, 72], "auto_map": None},
        "rope_scaling": {
            **{"rope_type": "llama3", "type": "llama3", "factor": 8.0, "low_freq_factor": 1.0},
            **{"high_freq_factor": 4.0, "original_max_position_embeddings": 32},
        },
    },
    "dots1": {
        **{**_ROUTED, "n_shared_experts": 2, "n_group": 1, "topk_group": 1},
        **{"scoring_func": "noaux_tc", "moe_layer_freq": 1, "first_k_dense_replace": 1},
        **{"sliding_window": None, "use_sliding_window": False, "max_window_layers": 4},
    },
    "ernie4_5_moe": {
        **{"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 16, "moe_gate": "topk"},
        **{"moe_capacity": [64, 64, 64], "moe_use_aux_free": True, "moe_num_shared_experts": 2},
        **{"moe_layer_start_index": 1, "moe_layer_end_index": 3, "moe_layer_interval": 1},
        **{"use_bias": False, "num_nextn_predict_layers": 1},
    },
    "granitemoehybrid": {
        **{"layer_types": ["mamba", "mamba", "attention", "mamba"], "init_method": "mup"},
        **{"mamba_chunk_size": 256, "mamba_conv_bias": True, "mamba_d_conv": 4, "mamba_d_head": 16},
        **{"mamba_d_state": 8, "mamba_expand": 2, "mamba_n_groups": 1, "mamba_n_heads": 4},
        **{"mamba_proj_bias": False, "normalization_function": "rmsnorm", "rope_scaling": None},
        **{"num_experts_per_tok": 0, "num_local_experts": 0, "output_router_logits": False},
        **{"position_embedding_type": "nope", "router_aux_loss_coef": 0.01, "auto_map": None},
        **{"shared_intermediate_size": 64, "attention_multiplier": 0.1, "logits_scaling": 8},
    },
    "nemotron_h": {
        **{"hybrid_override_pattern": "M-M*", "attention_bias": False, "chunk_size": 128},
        **{"conv_kernel": 4, "expand": 2, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5},
        **{"mamba_head_dim": 16, "mamba_hidden_act": "silu", "mamba_num_heads": 4, "n_groups": 2},
        **{"mamba_proj_bias": False, "mlp_bias": False, "mlp_hidden_act": "relu2"},
        **{"num_logits_to_keep": 1, "rescale_prenorm_residual": True, "residual_in_fp32": False},
        **{"rms_norm_eps": 1e-5, "sliding_window": None, "ssm_state_size": 8, "use_bias": False},
        **{"time_step_floor": 0.0001, "time_step_limit": [0.0, math.inf], "time_step_max": 0.1},
        **{"time_step_min": 0.001, "time_step_rank": 256, "use_conv_bias": True},
        "use_mamba_kernels": True,
    },
    "mamba2": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "rope_theta")),
        **{"max_position_embeddings": None, "auto_map": None, "chunk_size": 256, "expand": 2},
        **{"conv_kernel": 4, "layer_norm_epsilon": 1e-5, "n_groups": 2, "norm_before_gate": True},
        **{"num_heads": 8, "rescale_prenorm_residual": False, "residual_in_fp32": True},
        **{"rms_norm": True, "state_size": 16, "time_step_floor": 0.0001, "time_step_max": 0.1},
        **{"time_step_init_scheme": "random", "time_step_limit": [0.0, math.inf]},
        **{"time_step_min": 0.001, "time_step_rank": 256, "time_step_scale": 1.0},
        **{"use_bias": False, "use_conv_bias": True},
    },
    "falcon_mamba": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "rope_theta", "head_dim")),
        **{"max_position_embeddings": None, "auto_map": None, "expand": 2, "intermediate_size": 64},
        **{"conv_kernel": 4, "layer_norm_epsilon": 1e-5, "mixer_rms_eps": 1e-6, "state_size": 16},
        **{"rescale_prenorm_residual": False, "residual_in_fp32": True, "time_step_floor": 0.0001},
        **{"time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001},
        **{"time_step_rank": "auto", "time_step_scale": 1.0, "use_bias": False},
        **{"use_conv_bias": True, "use_falcon_mambapy": False, "use_mambapy": False},
    },
    "mamba": {
        **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "rope_theta", "head_dim")),
        **{"max_position_embeddings": None, "auto_map": None, "expand": 2, "intermediate_size": 64},
        **{"conv_kernel": 4, "d_inner": 64, "d_model": 32, "fused_add_norm": True, "n_layer": 4},
        **{"layer_norm_epsilon": 1e-5, "pad_vocab_size_multiple": 8, "rms_norm": True},
        **{"rescale_prenorm_residual": False, "residual_in_fp32": True, "ssm_cfg": {}},
        **{"state_size": 16, "time_step_rank": 2, "use_bias": False, "use_conv_bias": True},
    },
    "jamba": {
        **{"attn_layer_offset": 1, "attn_layer_period": 4, "expert_layer_offset": 1},
        **{"expert_layer_period": 2, "mamba_conv_bias": True, "mamba_d_conv": 4, "head_dim": None},
        **{"mamba_d_state": 16, "mamba_dt_rank": 2, "mamba_expand": 2, "mamba_proj_bias": False},
        **{"num_experts": 4, "num_experts_per_tok": 2, "num_logits_to_keep": 1, "rope_theta": None},
        **{"output_router_logits": False, "router_aux_loss_coef": 0.001, "sliding_window": None},
        **{"use_mamba_kernels": True, "rms_norm_eps": 1e-6, "mamba_inner_layernorms": True},
        "calc_logits_for_entire_prompt": False,
    },
    "kimi_linear": {
        **{"first_k_dense_replace": 1, "head_dim": 72, "kv_lora_rank": 8, "mla_use_nope": True},
        "linear_attn_config": {
            **{"full_attn_layers": [4], "kda_layers": [1, 2, 3], "head_dim": 8, "num_heads": 4},
            "short_conv_kernel_size": 4,
        },
        **{"model_max_length": 1024, "moe_intermediate_size": 16, "moe_layer_freq": 1},
        **{"moe_renormalize": True, "moe_router_activation_func": "sigmoid", "num_experts": 8},
        **{"num_expert_group": 1, "num_experts_per_token": 2, "num_nextn_predict_layers": 0},
        **{"num_shared_experts": 1, "q_lora_rank": None, "qk_nope_head_dim": 8},
        **{"qk_rope_head_dim": 4, "routed_scaling_factor": 2.446, "topk_group": 1},
        **{"use_grouped_topk": True, "v_head_dim": 8, "rope_scaling": None},
        "max_position_embeddings": 1024,
    },
    "lfm2": {
        **{"block_auto_adjust_ff_dim": True, "block_dim": 32, "block_ff_dim": 96},
        **{"block_ffn_dim_multiplier": 1.0, "block_mlp_init_scale": 1.0, "block_multiple_of": 8},
        **{"block_norm_eps": 1e-5, "block_out_init_scale": 1.0, "block_use_swiglu": True},
        **{"block_use_xavier_init": True, "conv_L_cache": 3, "conv_bias": False, "conv_dim": 32},
        **{"conv_dim_out": 32, "conv_use_xavier_init": True, "full_attn_idxs": [2]},
        **{"norm_eps": 1e-5, "num_heads": 4, "use_pos_enc": True, "auto_map": None},
    },
    "qwen3_5_text": {
        **{"attn_output_gate": True, "full_attention_interval": 4, "mamba_ssm_dtype": "float32"},
        **{"mlp_only_layers": [], "mtp_num_hidden_layers": 1, "partial_rotary_factor": 0.5},
        **{"mtp_use_dedicated_embeddings": False, "linear_num_value_heads": 4, "auto_map": None},
        **{"linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    },
    "afmoe": {
        **{"global_attn_every_n_layers": 4, "load_balance_coeff": 0.001, "mup_enabled": True},
        **{"n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1},
        **{"num_dense_layers": 2, "num_experts": 8, "num_experts_per_tok": 2, "route_norm": True},
        **{"num_shared_experts": 1, "moe_intermediate_size": 16, "route_scale": 2.826},
        **{"score_func": "sigmoid", "sliding_window": 16, "use_grouped_mm": True},
    },
    "exaone_moe": {
        **{"num_experts": 8, "num_experts_per_tok": 2, "num_shared_experts": 1, "n_group": 1},
        **{"topk_group": 1, "moe_intermediate_size": 16, "scoring_func": "sigmoid"},
        **{"topk_method": "noaux_tc", "sliding_window": 16, "sliding_window_pattern": "LLLG"},
        **{"first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "auto_map": None},
    },
    "falcon_h1": {
        **{"mamba_d_ssm": 48, "mamba_n_heads": 6, "mamba_d_head": 8, "mamba_n_groups": 1},
        **{"mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_chunk_size": 256},
        **{"mamba_conv_bias": True, "mamba_norm_before_gate": True, "mamba_rms_norm": False},
        **{"mamba_proj_bias": False, "mamba_use_mlp": True, "projectors_bias": False},
        **{"mlp_multipliers": [0.9, 0.2], "ssm_multipliers": [0.3, 0.2, 0.1, 0.5, 0.4]},
        **{"key_multiplier": 0.4, "lm_head_multiplier": 0.04, "embedding_multiplier": 5.6},
        **{"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.2, "attention_in_multiplier": 1.0},
        **{"attention_out_multiplier": 0.9, "num_logits_to_keep": 1, "attn_layer_indices": None},
        "auto_map": None,
    },
    "granite_swa": {
        **{"sliding_window": 16, "layer_rope_theta": [0, 10000, 10000, 1e6], "auto_map": None},
    },
    "lfm3": {
        **{"conv_L_cache": 7, "conv_bias": False, "norm_eps": 1e-5, "sliding_window": 16},
        **{"layer_types": ["conv", "conv", "full_attention", "conv"], "auto_map": None},
        **{"use_attention_gate": True, "use_sandwich_norm": True, "rope_theta": None},
    },
    "phimoe": {
        **{"attention_bias": True, "hidden_dropout": 0.0, "input_jitter_noise": 0.01},
        **{"lm_head_bias": True, "num_experts_per_tok": 2, "num_local_experts": 16},
        **{"original_max_position_embeddings": 32, "output_router_logits": False},
        **{"router_aux_loss_coef": 0.0, "router_jitter_noise": 0.01, "sliding_window": 64},
        "rope_scaling": {
            **{**_LONGROPE, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            **{"short_mscale": 1.243, "long_mscale": 1.5},
        },
    },
    "minicpm3": {
        **{"attention_bias": False, "dim_model_base": 16, "kv_lora_rank": 8, "q_lora_rank": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "scale_depth": 1.4, "scale_emb": 12},
        **{"eos_token_id": [2, 99], "num_key_value_heads": 4, "head_dim": None},
        "rope_scaling": {
            **{"type": "longrope", "original_max_position_embeddings": 64},
            **{"short_factor": [1.0, 1.1], "long_factor": [1.0, 1.1]},
        },
    },
    "olmo": {
        **{"attention_bias": False, "attention_dropout": 0.0, "clip_qkv": 8.0, "auto_map": None},
        **{"initializer_range": 0.02, "pretraining_tp": 1, "rope_scaling": None, "head_dim": None},
        **{"eos_token_id": 50279, "pad_token_id": 1, "tie_word_embeddings": False},
    },
    "phi": {
        **{"attention_dropout": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.1, "rope_scaling": None},
        **{"partial_rotary_factor": 0.5, "qk_layernorm": False, "layer_norm_eps": 1e-5},
        **{"hidden_act": "gelu_new", "bos_token_id": None, "eos_token_id": None, "head_dim": None},
    },
    "internlm3": {
        "bias": False,
        "qkv_bias": False,
        "rope_scaling": {"type": "dynamic", "factor": 6},
    },
}


_GPT: dict[str, Any] = {
    **{"vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.02},
    **{"activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "use_cache": True},
    **{"summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True},
    **{"summary_type": "cls_index", "summary_use_proj": True, "gradient_checkpointing": False},
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
}
_GPTJ = {
    **{**_GPT, "n_embd": 32, "n_head": 4, "n_layer": 4, "n_positions": 64, "n_inner": None},
    **{"rotary": True, "rotary_dim": 4, "scale_attn_weights": True, "n_ctx": 64},
    **{"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "tie_word_embeddings": False},
    "tokenizer_class": "GPT2Tokenizer",
}
_GPT_NEO = {
    **{**_GPT, "hidden_size": 32, "num_heads": 4, "num_layers": 4, "window_size": 8},
    **{"attention_layers": ["global", "local"] * 2, "attention_types": [[["global", "local"], 2]]},
    **{"attention_dropout": 0, "embed_dropout": 0, "resid_dropout": 0, "intermediate_size": None},
    "max_position_embeddings": 64,
}


_DBRX: dict[str, Any] = {
    **{"model_type": "dbrx", "vocab_size": 100, "auto_map": {"AutoConfig": "x.Y"}},
    **{"d_model": 32, "n_heads": 4, "n_layers": 4, "max_seq_len": 64, "emb_pdrop": 0.0},
    **{"resid_pdrop": 0.0, "output_router_logits": False, "router_aux_loss_coef": 0.05},
    "attn_config": {"clip_qkv": 8, "kv_n_heads": 2, "model_type": "", "rope_theta": 500000},
    "ffn_config": {
        **{"ffn_hidden_size": 48, "model_type": "", "moe_jitter_eps": 0.01, "moe_top_k": 2},
        **{"moe_loss_weight": 0.05, "moe_num_experts": 8},
    },
}


def test_dbrx_as_it_was_exported():
    spec = read_spec(_DBRX)
    assert (spec.num_layers, spec.num_kv_heads, spec.qkv_clip) == (4, 2, 8)
    assert (spec.rope.theta, spec.moe.num_experts, spec.moe.normalised) == (500000, 8, True)
    bent = {**_DBRX["ffn_config"], "moe_normalize_expert_weights": 2}
    with pytest.raises(ModelLoadError, match="'moe_normalize_expert_weights' is 2"):
        read_spec({**_DBRX, "ffn_config": bent})


def test_gpt_j_and_neo_as_they_were_exported():
    for kind in ("gptj", "codegen"):
        spec = read_spec({"model_type": kind, **_GPTJ})
        assert (spec.num_layers, spec.rope.num_dims, spec.tie_word_embeddings) == (4, 4, False)
    neo = read_spec({"model_type": "gpt_neo", **_GPT_NEO})
    assert [layer.window for layer in neo.layers] == [None, 8, None, 8]
    assert neo.tie_word_embeddings


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({**_GPTJ, "rotary_dim": 10}, "'rotary_dim' must be an even part of 8"),
        ({**_GPTJ, "rotary": False}, "'rotary' is False"),
        ({**_GPTJ, "n_head": 2, "model_type": "codegen"}, "'n_head' must be divisible by 4"),
        ({**_GPTJ, "model_type": "codegen", "auto_map": {"AutoModel": "x.Y"}}, "'auto_map'"),
        ({**_GPT_NEO, "attention_types": [[["global"], 3]]}, "has 3 layers, not 4"),
        ({**_GPT_NEO, "attention_types": [[["alibi"], 4]]}, "has .*'alibi'.* not supported"),
        ({**_GPT_NEO, "attention_types": [["global"]]}, "has .* not supported"),
        ({**_GPT_NEO, "attention_types": [[[{}], 4]]}, "has .* not supported"),
    ],
)
def test_what_gpts_do_not_do_is_named(changes, named):
    kind = "gpt_neo" if "num_heads" in changes else "gptj"
    with pytest.raises(ModelLoadError, match=named):
        read_spec({"model_type": kind, **changes})


@pytest.mark.parametrize("kind", EXPORTED)
def test_the_exporters_keys_are_understood(kind):
    spec = read_spec({"model_type": kind, **_SIZES, **EXPORTED[kind]})
    assert spec.num_layers == (3 if kind == "nemotron_h" else 4)


def test_lfm2_has_attention_where_it_says_and_an_mlp_of_the_adjusted_width():
    spec = read_spec({"model_type": "lfm2", **_SIZES, **EXPORTED["lfm2"]})
    assert [layer.recurrent for layer in spec.layers] == [True, True, False, True]
    assert spec.intermediate_size == 64  # two thirds of 96, a multiple of 8
    assert spec.tie_word_embeddings


def test_each_layer_of_granite_swash_turns_by_its_own_base():
    spec = read_spec({"model_type": "granite_swa", **_SIZES, **EXPORTED["granite_swa"]})
    assert [layer.rope for layer in spec.layers] == [False, True, True, True]
    assert [layer.local_rope for layer in spec.layers] == [False, False, False, True]
    assert [layer.window for layer in spec.layers] == [None, 16, 16, 16]
    assert (spec.rope.theta, spec.local_rope.theta) == (1e4, 1e6)


def test_granite_4_has_states_of_heads_where_it_says():
    spec = read_spec({"model_type": "granitemoehybrid", **_SIZES, **EXPORTED["granitemoehybrid"]})
    assert [layer.recurrent for layer in spec.layers] == [True, True, False, True]
    assert not any(layer.rope for layer in spec.layers)
    assert spec.state_bytes(2) == 3 * (3 * 80 * 2 + 4 * 8 * 16 * 4)


def test_minicpm3_has_multipliers_unless_they_are_null():
    config = {"model_type": "minicpm3", **_SIZES, **EXPORTED["minicpm3"]}
    spec = read_spec(config)
    assert (spec.embedding_scale, spec.residual_scale, spec.logit_scale) == (12, 0.7, 0.5)
    assert (spec.latent.value_dim, spec.tie_word_embeddings) == (8, True)
    plain = read_spec({**config, "scale_depth": None, "dim_model_base": None})
    assert (plain.residual_scale, plain.logit_scale) == (1, 1)


def test_mamba_2_has_states_and_no_keys():
    spec = read_spec({"model_type": "mamba2", **_SIZES, **EXPORTED["mamba2"]})
    assert spec.state_bytes(2) == 4 * (3 * (64 + 2 * 2 * 16) * 2 + 8 * 16 * 8 * 4)
    assert spec.kv_bytes_per_token(2) == 0
    assert not any(layer.mlp or layer.rope for layer in spec.layers)


def test_nemotron_h_has_mlps_where_it_says():
    keys = {**_SIZES, **EXPORTED["nemotron_h"], "num_hidden_layers": 8}
    spec = read_spec({"model_type": "nemotron_h", **keys, "hybrid_override_pattern": "M-MM-M*-"})
    assert [layer.recurrent for layer in spec.layers] == [True, True, True, True, False]
    assert [layer.mlp for layer in spec.layers] == [True, False, True, False, True]
    assert [layer.checkpoint_layers for layer in spec.layers] == [
        (0, 1),
        (2, 2),
        (3, 4),
        (5, 5),
        (6, 7),
    ]
    assert spec.recurrence.time_step_limit == (0, math.inf)


def test_nemotron_3_has_experts_where_it_says():
    spec = read_spec({"model_type": "nemotron_h", **_SIZES, **EXPORTED["nemotron_h"], **_NANO_3})
    assert [layer.experts for layer in spec.layers] == [True, True]
    moe = spec.moe
    assert (moe.num_experts, moe.top_k, moe.scale) == (8, 2, 2.5)
    assert (moe.intermediate_size, moe.shared_intermediate_size) == (16, 48)


def test_phi_moe_has_factors_of_scores_for_short_and_long_and_no_window_as_long_as_its_texts():
    spec = read_spec({"model_type": "phimoe", **_SIZES, **EXPORTED["phimoe"]})
    scaling = spec.rope.scaling
    assert (scaling.attention_factor, scaling.long_attention_factor) == (1.243, 1.5)
    assert spec.windows == (None,)
    assert spec.moe.margin == 0.02
    assert spec.head_bias


def test_a_config_may_have_an_infinite_limit_as_python_writes_it(tmp_path):
    config = {"model_type": "nemotron_h", **_SIZES, **EXPORTED["nemotron_h"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "Infinity" in (tmp_path / "config.json").read_text()
    assert read_config(str(tmp_path)).spec.recurrence.time_step_limit == (0, math.inf)


def test_jamba_has_states_of_channels_and_experts_where_it_says():
    spec = read_spec({"model_type": "jamba", **_SIZES, **EXPORTED["jamba"]})
    assert [layer.recurrent for layer in spec.layers] == [True, False, True, True]
    assert [layer.experts for layer in spec.layers] == [False, True, False, True]
    assert spec.state_bytes(2) == 3 * (3 * 64 * 2 + 16 * 64 * 4)
    assert spec.recurrence.step_rank == 2


def test_falcon_mamba_makes_time_steps_from_a_sixteenth_of_its_width():
    spec = read_spec({"model_type": "falcon_mamba", **_SIZES, **EXPORTED["falcon_mamba"]})
    assert (spec.recurrence.step_rank, spec.recurrence.norms) == (2, "weightless")
    assert spec.windows == ()


def test_kimi_linear_counts_its_published_layers_from_one():
    spec = read_spec({"model_type": "kimi_linear", **_SIZES, **EXPORTED["kimi_linear"]})
    assert [layer.recurrent for layer in spec.layers] == [True, True, True, False]
    assert [layer.experts for layer in spec.layers] == [False, True, True, True]
    assert spec.state_bytes(2) == 3 * (3 * 3 * 32 * 2 + 4 * 8 * 8 * 4)
    assert spec.kv_bytes_per_token(2) == (8 + 4) * 2
    assert (spec.max_position_embeddings, spec.moe.top_k, spec.moe.scale) == (1024, 2, 2.446)


def test_ling_is_read_as_its_published_config_says():
    """Hugging Face's implementation knows neither the limits nor what else is only there."""
    config = {"model_type": "bailing_hybrid", **_SIZES, **EXPORTED["bailing_hybrid"]}
    published = {
        **{"expert_swiglu_limit_list": [0, 0, 7.0, 7], "q_lora_rank": None, "rotary_dim": 4},
        **{"share_expert_swiglu_limit_list": [0, 0, 0, 5], "partial_rotary_factor": 0.5},
        **{"group_norm_size": 4, "num_kv_heads_for_linear_attn": 4, "no_kda_lora": True},
        **{"gated_attention_proj_granularity_type": "head_wise", "use_qkv_bias": False},
    }
    plain, spec = read_spec(config), read_spec(config | published)
    assert [layer.expert_gate_limit for layer in spec.layers] == [None, None, 7.0, 7]
    assert [layer.gate_limit for layer in spec.layers] == [None, None, None, 5]
    assert (spec.rope, spec.latent) == (plain.rope, plain.latent)


def test_qwen3_5_attends_in_every_fourth_layer_and_turns_a_part_of_the_head():
    spec = read_spec({"model_type": "qwen3_5_text", **_SIZES, **EXPORTED["qwen3_5_text"]})
    assert [layer.recurrent for layer in spec.layers] == [True, True, True, False]
    assert spec.rope.num_dims == 4
    assert spec.kv_bytes_per_token(2) == 2 * 1 * 2 * 8 * 2  # for the single attention layer
    assert spec.state_bytes(2) == 3 * (3 * 64 * 2 + 4 * 8 * 8 * 4)


def test_mimo_has_windows_and_experts_where_its_published_config_says():
    config = {"model_type": "mimo_v2_flash", **_SIZES, **EXPORTED["mimo_v2_flash"]}
    spec = read_spec(config)
    layers = [(layer.window, layer.experts) for layer in spec.layers]
    assert layers == [(None, False), (17, True), (17, True), (None, True)]
    assert (spec.local_rope.theta, spec.rope.num_dims, spec.local_rope.num_dims) == (100, 8, 8)
    # The cache holds values as wide as keys, of 2 and 4 heads.
    assert spec.kv_bytes_per_token(2) == 2 * (2 + 4 + 4 + 2) * 24 * 2
    assert spec.value_scale == 0.707
    assert read_spec({**config, "attention_value_scale": None}).value_scale == 1


def test_rope_on_a_part_of_the_head_by_its_width():
    spec = read_spec({"model_type": "minimax_m2", **_SIZES, **EXPORTED["minimax_m2"]})
    assert spec.rope.num_dims == 4


@pytest.mark.parametrize(
    ("kind", "changes", "named"),
    [
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "'attn_type_list' has linear attention"),
        ("minimax_m2", {"shared_intermediate_size": 8}, "'shared_intermediate_size' is set"),
        ("apertus", {"hidden_act": "silu"}, "'hidden_act' is 'silu'; only 'xielu'"),
        ("apertus", {"rope_scaling": None}, "'rope_parameters' is missing"),
        ("mimo_v2_flash", {"v_head_dim": 32}, "'v_head_dim' exceeds the 24 dimensions"),
        ("mimo_v2_flash", {"swa_head_dim": 8}, "'swa_head_dim' is 8; only 24"),
        ("mimo_v2_flash", {"hybrid_layer_pattern": [0, 1, 2, 0]}, "must have 0 or 1 for each"),
        ("mimo_v2_flash", {"swa_num_key_value_heads": 3}, "layers 3 KV heads for 4 heads"),
        ("mimo_v2_flash", {"n_shared_experts": 1}, "'n_shared_experts' is set"),
        ("afmoe", {"score_func": "softmax"}, "'score_func' is 'softmax'"),
        ("afmoe", {"n_group": 2}, "'n_group' is 2; only 1"),
        ("dots1", {"scoring_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ("ernie4_5_moe", {"use_bias": True}, "'use_bias' is true"),
        ("ernie4_5_moe", {"moe_k": 9}, "'moe_k' exceeds the 8 experts"),
        ("internlm3", {"qkv_bias": True}, "'qkv_bias' differs"),
        ("granitemoehybrid", {"layer_types": ["mamba"] * 4}, "names a model without attention"),
        ("granitemoehybrid", {"mamba_d_head": 8}, "'mamba_n_heads' of 8 make no width of 64"),
        ("granitemoehybrid", {"mamba_n_groups": 3}, "'mamba_n_groups' must divide the 4 heads"),
        ("granitemoehybrid", {"time_step_limit": [1, 0.5]}, "'time_step_limit' must be two"),
        ("granitemoehybrid", {"position_embedding_type": "alibi"}, "is 'alibi'; known: nope, rope"),
        ("nemotron_h", {"hybrid_override_pattern": "M-M-"}, "has no attention"),
        ("nemotron_h", {"hybrid_override_pattern": "*-*-"}, "has no state space"),
        ("nemotron_h", {"hybrid_override_pattern": "-M*-"}, "has no mixer before MLP 0"),
        ("nemotron_h", {"hybrid_override_pattern": "M--*"}, "has no mixer before MLP 2"),
        ("nemotron_h", {**_NANO_3, "num_experts_per_tok": 9}, "fewer than 9 experts"),
        ("nemotron_h", {**_NANO_3, "n_shared_experts": 2}, "'n_shared_experts' is 2; only 1"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*?"}, "pattern' has '\\?'"),
        ("nemotron_h", {"hybrid_override_pattern": "M-*"}, "'num_hidden_layers' differs from"),
        ("nemotron_h", {"n_groups": 3}, "'n_groups' must divide the 4 heads"),
        ("nemotron_h", {"sliding_window": 8}, "'sliding_window' is set"),
        ("mamba2", {"num_heads": 4}, "'num_heads' of 8 make no width of 64"),
        ("mamba2", {"n_groups": 3}, "'n_groups' must divide the 8 heads"),
        ("cohere2_moe", {"expert_selection_fn": "top"}, "'expert_selection_fn' is 'top'"),
        ("cohere2_moe", {"shared_expert_combination_strategy": "max"}, "_strategy' is 'max'"),
        ("laguna", {"gating": False}, "'gating' is False"),
        ("laguna", {"num_attention_heads_per_layer": [4, 5, 6, 6]}, "has 5 heads for 2 KV heads"),
        ("laguna", {"moe_router_logit_softcapping": 30.0}, "_softcapping' is set"),
        ("bailing_hybrid", {"kda_lower_bound": 1.0}, "'kda_lower_bound' is 1; logarithms"),
        ("bailing_hybrid", {"layer_group_size": 8}, "has no attention"),
        ("bailing_hybrid", {"num_expert_group": 4}, "'n_group' is 2; only 4"),
        ("bailing_hybrid", {"expert_swiglu_limit_list": [0, -1, 0, 0]}, "-1, which is not a limit"),
        ("kimi_linear", {"mla_use_nope": False}, "'mla_use_nope' is False"),
        ("kimi_linear", {"moe_router_activation_func": "softmax"}, "'scoring_func' is 'softmax'"),
        ("kimi_linear", {"num_hidden_layers": 5}, "'full_attn_layers' must be the 5 layers"),
        ("kimi_linear", {"max_position_embeddings": 64}, "is 64; only 1024"),
        ("kimi_linear", {"q_lora_rank": 8}, "'q_lora_rank' is set"),
        ("falcon_mamba", {"time_step_rank": "all"}, "'time_step_rank' must be a positive integer"),
        ("falcon_mamba", {"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
        ("mamba", {"ssm_cfg": {"layer": "Mamba2"}}, "'ssm_cfg' is set"),
        ("jamba", {"attn_layer_offset": 4}, "must be below 'attn_layer_period', 4"),
        ("jamba", {"attn_layer_period": 9, "attn_layer_offset": 8}, "leaves no layer with att"),
        ("jamba", {"num_experts_per_tok": 5}, "'num_experts_per_tok' exceeds the 4 experts"),
        ("mamba2", {"conv_kernel": 1}, "'conv_kernel' must be at least 2"),
        ("mamba2", {"hidden_act": "relu"}, "'hidden_act' is 'relu'"),
        ("mamba2", {"rms_norm": False}, "'rms_norm' is False"),
        ("falcon_h1", {"ssm_multipliers": [1.0]}, "'ssm_multipliers' must have 5 entries"),
        ("falcon_h1", {"projectors_bias": True}, "'projectors_bias' differs from"),
        ("granite_swa", {"layer_rope_theta": [1, 2, 3, 4]}, "'layer_rope_theta' has more than two"),
        ("granite_swa", {"layer_rope_theta": [-1, 0, 0, 0]}, "'layer_rope_theta' must be a list"),
        ("lfm3", {"layer_types": ["conv"] * 4}, "'layer_types' has no attention"),
        ("lfm2", {"full_attn_idxs": []}, "'layer_types' has no attention"),
        ("lfm2", {"conv_L_cache": 1}, "'conv_L_cache' must be at least 2"),
        ("olmo", {"clip_qkv": -1.0}, "'clip_qkv' must be a number above 0"),
        ("phimoe", {"num_experts_per_tok": 4}, "'num_experts_per_tok' is 4; only 2"),
        ("phimoe", {"router_jitter_noise": -0.1}, "'router_jitter_noise' must be a number"),
        ("phimoe", {"num_local_experts": 1}, "'num_experts_per_tok' exceeds the 1 experts"),
        ("phimoe", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "is not 'longrope'"),
        (
            "phimoe",
            {"rope_scaling": {**_LONGROPE, "short_factor": [1.0] * 4, "long_factor": [1.0] * 4}},
            "'short_mscale' must be a number",
        ),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 4}, "'layer_types' has 'mamba'"),
        ("qwen3_5_text", {"linear_num_key_heads": 3}, "'linear_num_key_heads' must divide the 4"),
        ("qwen3_5_text", {"attn_output_gate": False}, "'attn_output_gate' is False"),
    ],
)
def test_what_is_not_served_is_named(kind, changes, named):
    with pytest.raises(ModelLoadError, match=named):
        read_spec({"model_type": kind, **_SIZES, **EXPORTED[kind], **changes})


WHOLE = {
    **{"model_type": "qwen3", **_SIZES, "auto_map": None},
    **{"is_encoder_decoder": False, "add_cross_attention": False, "pruned_heads": {}},
}


def test_a_whole_config_may_say_what_is_not_there():
    assert read_spec(WHOLE).num_layers == 4


@pytest.mark.usefixtures("all_keys_matter")
@pytest.mark.parametrize(
    ("key", "there"), [("is_encoder_decoder", True), ("pruned_heads", {"0": [1]})]
)
def test_what_a_decoder_does_not_have_is_refused_where_it_is_there(key, there):
    with pytest.raises(ModelLoadError, match=key):
        read_spec({**WHOLE, key: there})
