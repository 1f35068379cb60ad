"""A width that cannot be sharded is reported by its name in the model's own config.json."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.checkpoint import read_config
from engine.models.spec import DecoderSpec, MoeSpec
from engine.parallel.sharding_support import check_sharding_support
from tests import tiny_models

SHARED = {
    "qwen2_moe": "shared_expert_intermediate_size",
    "deepseek_v3": "n_shared_experts * moe_intermediate_size",
    "glm4_moe": "n_shared_experts * moe_intermediate_size",
    "ernie4_5_moe": "moe_num_shared_experts * moe_intermediate_size",
    "llama4": "intermediate_size",
    "granitemoehybrid": "shared_intermediate_size",
    "nemotron_h_moe": "moe_shared_expert_intermediate_size",
    "qwen3_next": "shared_expert_intermediate_size",
}
EXPERTS = {
    "mixtral": "intermediate_size",
    "granitemoe": "intermediate_size",
    "gpt_oss": "intermediate_size",
    "olmoe": "intermediate_size",
    "phimoe": "intermediate_size",
    "qwen3_moe": "moe_intermediate_size",
}


def refusal(kind, directory, *, whole_experts: bool, **widths: int) -> str:
    """The error of two ranks, for a model of this kind with these expert widths."""
    spec = read_config(str(tiny_models.save(kind, directory))).spec
    assert isinstance(spec, DecoderSpec)
    assert isinstance(spec.moe, MoeSpec)
    # All other sharded widths are even.
    even = replace(spec, num_heads=4, num_kv_heads=2, intermediate_size=64)
    config = EngineConfig(
        model=str(directory), tensor_parallel_size=2, enable_expert_parallel=whole_experts
    )
    with pytest.raises(ModelLoadError) as raised:
        check_sharding_support(config, replace(even, moe=replace(spec.moe, **widths)))
    return str(raised.value)


@pytest.mark.parametrize("kind", SHARED)
def test_the_width_of_the_expert_that_all_tokens_see(kind, tmp_path):
    told = refusal(kind, tmp_path, whole_experts=True, shared_intermediate_size=7)
    key = SHARED[kind]
    assert told == f"tensor_parallel_size 2: {key} (7) cannot be divided by it"
    config = json.loads((tmp_path / "config.json").read_text())
    assert set(re.findall(r"\w+", key)) <= config.keys()


@pytest.mark.parametrize("kind", EXPERTS)
def test_the_width_of_an_expert(kind, tmp_path):
    told = refusal(kind, tmp_path, whole_experts=False, intermediate_size=7)
    key = EXPERTS[kind]
    assert told == f"tensor_parallel_size 2: {key} (7) cannot be divided by it"
    assert key in json.loads((tmp_path / "config.json").read_text())
