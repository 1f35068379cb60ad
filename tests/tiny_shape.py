"""The config keys shared by the tiny random models of ``tests/tiny_models.py``."""

from __future__ import annotations

from typing import Any

# name -> (Hugging Face config class, differences from SHAPE)
Kinds = dict[str, tuple[str, dict[str, Any]]]

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

ABSENT = object()  # marks a key of the shape that a family does not have


def rope(kind: str, **parameters: Any) -> dict[str, Any]:
    """A config's entry for a RoPE variant."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **parameters}}
