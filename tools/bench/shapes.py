"""Shapes of published models, for random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The configs that Hugging Face hosts for Qwen/Qwen3-0.6B and meta-llama/Llama-3.1-8B.
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": 40960,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 151936,
    },
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": 128000,
        "eos_token_id": 128001,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "max_position_embeddings": 131072,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "original_max_position_embeddings": 8192,
            "rope_type": "llama3",
        },
        "rope_theta": 500_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 128256,
    },
    "tiny": {  # exercises every path on a CPU in a moment
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "head_dim": 16,
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "max_position_embeddings": 2048,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 320,
    },
}


def write_config(name: str, directory: Path, num_layers: int | None = None) -> Path:
    """Write a model directory with only a config, for ``load_format="dummy"``.

    ``num_layers``: instead of the model's.
    """
    config = CONFIGS[name]
    if num_layers is not None:
        config = config | {"num_hidden_layers": num_layers}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    return directory


def matrix_parameters(name: str) -> tuple[int, int]:
    """The number of weights in all layers' matrices, and in the output layer."""
    config = CONFIGS[name]
    hidden = config["hidden_size"]
    head_dim = config.get("head_dim", hidden // config["num_attention_heads"])
    heads = 2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"]
    layer = hidden * head_dim * heads + 3 * hidden * config["intermediate_size"]
    return config["num_hidden_layers"] * layer, config["vocab_size"] * hidden


def attention_flops(name: str, queries: int) -> float:
    """FLOPs of a causal prompt of ``queries`` tokens: two products over the unmasked half."""
    config = CONFIGS[name]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim", config["hidden_size"] // heads)
    return config["num_hidden_layers"] * 2 * heads * head_dim * float(queries) ** 2
