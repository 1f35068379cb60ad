"""Keys that a family's own exporter writes beside those of Hugging Face: read, not refused."""

from __future__ import annotations

from typing import Any

import pytest

from engine.models.families import read_spec

_SIZES: dict[str, Any] = {
    **{"vocab_size": 100, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"max_position_embeddings": 64, "rope_theta": 10000.0, "hidden_act": "silu"},
    **{"auto_map": {"AutoModelForCausalLM": "modeling.Model"}},
}
_ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
EXPORTED: dict[str, dict[str, Any]] = {
    "phi3": {"sliding_window": 16},
    "deepseek_v3": {**_ROUTED, "n_group": 1, "topk_group": 1, "q_lora_rank": 8, "ep_size": 1},
}


@pytest.mark.parametrize("kind", EXPORTED)
def test_the_exporters_keys_are_understood(kind):
    assert read_spec({"model_type": kind, **_SIZES, **EXPORTED[kind]}).num_layers == 4
