"""A model of states alone: blocks without memory, and settings of a cache that it does not have."""

from __future__ import annotations

import pytest

from engine.config import CacheConfig, EngineConfig, SpeculationConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.runner import load_runner
from engine.types import SamplingParams
from tests import tiny_models
from tests.engine.handmade import request
from tests.engine.running import texts

PROMPT = tuple(range(20, 90))
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """(directory, the greedy continuation of the prompt by Hugging Face's generate)."""
    twin = tiny_models.build("mamba2")
    directory = tmp_path_factory.mktemp("mamba2")
    twin.save_pretrained(directory)
    return str(directory), tiny_models.greedy_tokens(twin, PROMPT, 8)


def make(directory: str, **changes) -> EngineCore:
    config = EngineConfig(model=directory, num_threads=1, dtype="float32", **changes)
    return EngineCore(config, load_runner(config))


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nothing_is_set_and_the_prefix_is_found(model, backend):
    directory, expected = model
    core = make(directory, attention_backend=backend)
    memory = core.info.memory
    assert core.info.attention_backend == backend
    assert (memory.kv_cache_bytes, memory.bytes_per_token) == (0, 0)
    assert memory.max_model_len == 262_144
    assert memory.num_blocks * memory.block_size >= 2 * memory.max_model_len
    assert "no KV cache, states of 256 sequences" in memory.describe()
    assert "longest context 262,144 tokens" in memory.describe()
    for name in ("first", "again"):
        assert texts(core, request(name, PROMPT, GREEDY)) == {name: expected}
    assert core.stats.prefix_cache_hits == 64


def test_few_short_texts_need_few_blocks(model):
    memory = make(model[0], max_model_len=100).info.memory
    assert (memory.max_model_len, memory.num_blocks) == (100, 7 * memory.num_states)


@pytest.mark.parametrize(
    ("cache", "named"),
    [
        ({"dtype": "int8"}, "kv_cache_dtype 'int8'"),
        ({"memory_bytes": 2**20}, "kv_cache_memory_bytes"),
    ],
)
def test_settings_of_the_cache_are_refused(model, cache, named):
    with pytest.raises(ModelLoadError, match=f"{named}: mamba2 models have no KV cache"):
        make(model[0], cache=CacheConfig(**cache))


def test_a_draft_model_has_a_cache_of_its_own(model, tmp_path):
    directory, expected = model
    small = str(tiny_models.save("llama", tmp_path))
    speculation = SpeculationConfig(method="draft", draft_model=small, adaptive=False)
    core = make(directory, max_model_len=128, speculation=speculation)
    assert core.info.memory.bytes_per_token > 0
    assert texts(core, request("a", PROMPT, GREEDY)) == {"a": expected}
    assert core.stats.drafts.num_draft_tokens > 0
