"""The configs of the tiny random models of ``tests/tiny_models.py`` without stateful layers."""

from __future__ import annotations

from tests.tiny_mixtures import MIXTURES
from tests.tiny_shape import ABSENT, SHAPE, Kinds, rope

_ALIBI = dict.fromkeys(
    ("intermediate_size", "num_key_value_heads", "rms_norm_eps", "max_position_embeddings"), ABSENT
)
_LAYER_NORM = {"rms_norm_eps": ABSENT, "layer_norm_eps": 1e-4}
_FALCON = {
    **dict.fromkeys(("intermediate_size", "num_key_value_heads", "rms_norm_eps"), ABSENT),
    **{"layer_norm_epsilon": 1e-4, "alibi": False},
}
_GPT2 = {
    **dict.fromkeys(SHAPE, ABSENT),
    **{"n_embd": 48, "n_head": 6, "n_layer": 3, "n_positions": 128, "n_inner": 80},
    **{"vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2},
}
_FULL = ["full_attention"] * 3

_DENSE: Kinds = {
    "llama": ("LlamaConfig", {}),
    "llama_mha": ("LlamaConfig", {"num_key_value_heads": 6}),
    "llama_mqa": ("LlamaConfig", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "llama_bias": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True, "head_dim": 16}),
    "llama_linear": ("LlamaConfig", rope("linear", factor=2.0)),
    "llama_dynamic": ("LlamaConfig", rope("dynamic", factor=2.0)),
    "llama_llama3": (
        "LlamaConfig",
        rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=32,
        ),
    ),
    "llama_yarn": (
        "LlamaConfig",
        rope("yarn", factor=4.0, original_max_position_embeddings=32),
    ),
    "llama_longrope": (
        "LlamaConfig",
        rope(
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
    "muse_glimmer": (
        "MuseGlimmerTextConfig",
        {
            **{"num_hidden_layers": 5, "head_dim": 16, "sliding_window": 12, "pad_token_id": 0},
            **{"qk_scale_factor": 2.5, "output_multiplier": 0.4, "post_norm_eps": 1e-2},
            **{"final_logit_softcapping": 4.0, "tie_word_embeddings": False},
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
    "olmo": ("OlmoConfig", {"rms_norm_eps": ABSENT, "pad_token_id": 0, "clip_qkv": 0.5}),
    "olmo_unclipped": (
        "OlmoConfig",
        {"rms_norm_eps": ABSENT, "pad_token_id": 0, "attention_bias": True},
    ),
    "olmo2": ("Olmo2Config", {"pad_token_id": 0}),
    "stablelm": ("StableLmConfig", {"use_qkv_bias": True, **_LAYER_NORM}),
    "stablelm_parallel": (
        "StableLmConfig",
        {
            "use_parallel_residual": True,
            **_LAYER_NORM,
            **rope("default", partial_rotary_factor=0.5),
        },
    ),
    "stablelm_heads": (
        "StableLmConfig",
        {"qk_layernorm": True, "use_parallel_residual": True, **_LAYER_NORM},
    ),
    "gpt2": ("GPT2Config", _GPT2),
    "gpt_bigcode": ("GPTBigCodeConfig", _GPT2),
    "gpt_bigcode_by_head": ("GPTBigCodeConfig", {**_GPT2, "multi_query": False}),
    "gptj": ("GPTJConfig", {**_GPT2, "rotary_dim": 4}),
    "codegen": (
        "CodeGenConfig",
        {**_GPT2, "n_embd": 64, "n_head": 4, "rotary_dim": 8, "n_inner": None},
    ),
    "gpt_neo": (
        "GPTNeoConfig",
        {
            **dict.fromkeys(SHAPE, ABSENT),
            **{"hidden_size": 48, "num_heads": 6, "num_layers": 3, "intermediate_size": 80},
            **{"vocab_size": 160, "max_position_embeddings": 128, "bos_token_id": 1},
            **{"eos_token_id": 2, "window_size": 12},
            "attention_types": [[["global", "local"], 1], [["global"], 1]],
        },
    ),
    "phi": (
        "PhiConfig",
        {**_LAYER_NORM, "num_key_value_heads": 6, **rope("default", partial_rotary_factor=0.25)},
    ),
    "phi_groups": (
        "PhiConfig",
        {**_LAYER_NORM, "tie_word_embeddings": True, **rope("default", partial_rotary_factor=0.5)},
    ),
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
            **rope("default", partial_rotary_factor=0.25),
        },
    ),
    "gpt_neox_serial": (
        "GPTNeoXConfig",
        {
            **_LAYER_NORM,
            "num_key_value_heads": ABSENT,
            "use_parallel_residual": False,
            **rope("default", partial_rotary_factor=0.5),
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
    "bloom": ("BloomConfig", {**_ALIBI, "seq_length": 128}),
    "mpt": (
        "MptConfig",
        {
            **dict.fromkeys(SHAPE, ABSENT),
            **{"d_model": 48, "n_heads": 6, "n_layers": 3, "max_seq_len": 128},
            **{"vocab_size": 160, "bos_token_id": 1, "eos_token_id": 2},
            "attn_config": {"clip_qkv": 0.5, "softmax_scale": 0.3},
        },
    ),
    "cohere": ("CohereConfig", {**_LAYER_NORM, "logit_scale": 0.3, "pad_token_id": 0}),
    "cohere_qk": ("CohereConfig", {**_LAYER_NORM, "use_qk_norm": True, "pad_token_id": 0}),
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
    "ernie4_5": ("Ernie4_5Config", {"head_dim": 16, "use_bias": True}),
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
    "hyperclovax": (
        "HyperCLOVAXConfig",
        {
            **{"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 0.5},
            **{"attention_multiplier": 0.2, "pad_token_id": 0},
        },
    ),
    "nanochat": ("NanoChatConfig", {}),
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
    "apertus": (
        "ApertusConfig",
        {
            **{"head_dim": 16, "attention_bias": True, "pad_token_id": 0},
            **rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
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
        {"head_dim": 16, "pad_token_id": 0, **rope("dynamic", alpha=50.0, factor=1.0)},
    ),
    "cwm": (
        "CwmConfig",
        {
            **{"head_dim": 16, "sliding_window": 12, "pad_token_id": 0},
            **rope(
                "llama3",
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
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
    "minicpm3": (
        "MiniCPM3Config",
        {
            **{"num_key_value_heads": 6, "q_lora_rank": 20, "kv_lora_rank": 16},
            **{"qk_nope_head_dim": 10, "qk_rope_head_dim": 8, "dim_model_base": 16},
            **rope(
                "longrope",
                original_max_position_embeddings=128,
                factor=1.0,
                short_factor=[1.0, 1.1, 1.2, 1.3],
                long_factor=[1.0, 2.0, 3.0, 4.0],
            ),
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
}
KINDS: Kinds = _DENSE | MIXTURES
