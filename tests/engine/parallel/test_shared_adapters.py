"""LoRA adapters on several ranks: each row of a mixed batch equals its merged model."""

from __future__ import annotations

import pytest

from engine.config import CacheConfig, EngineConfig, LoraConfig, SchedulerConfig
from engine.core import EngineCore
from engine.runner import load_runner
from tests.engine.lora.test_lora import ADAPTERS, make_served, requests_of, run


@pytest.mark.parametrize("kind", ["llama", "phi3", "gpt2", "qwen2_moe", "deepseek_v3"])
def test_each_row_equals_its_merged_model(kind, tmp_path):
    """Projections sharded by outputs and by inputs, fused, transposed; shared experts; latents."""
    two = {name: ADAPTERS[name] for name in ("all", "root")}
    base, adapters, prompts, texts = make_served(kind, tmp_path, two)
    config = EngineConfig(
        model=str(base),
        dtype="float32",
        device="cpu",
        tensor_parallel_size=2,
        num_threads=1,
        scheduler=SchedulerConfig(max_num_batched_tokens=17),
        cache=CacheConfig(block_size=4, num_blocks=512),
        lora=LoraConfig(max_loaded=1, max_on_host=2),
    )
    runner = load_runner(config)
    order = [(name, i) for i in range(len(prompts)) for name in (None, *adapters)]
    tokens = run(EngineCore(config, runner), requests_of(adapters, prompts, order))
    runner._team.close()
    for name, i in order:
        assert tokens[f"{name}-{i}"] == texts[name][i], (name, i)
