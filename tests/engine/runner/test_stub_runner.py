"""The stub model: free tokens that obey the rules of real ones."""

from __future__ import annotations

import numpy as np
import pytest

from engine.config import EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.paths import default_model_dir
from engine.pooling import PoolingParams
from engine.requests import fan_out
from engine.types import Request, SamplingParams


def make_core(**changes: object) -> EngineCore:
    config = EngineConfig(model=str(default_model_dir()), load_format="stub", **changes)
    return EngineCore.load(config)


def run(core: EngineCore, requests: list[Request]) -> dict[str, list[int]]:
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        output = core.step()
        for id_, tokens in zip(output.ids, output.token_ids, strict=True):
            texts[id_] += tokens
    return texts


def test_tokens_are_a_function_of_seed_and_position():
    sampling = SamplingParams(max_tokens=30, n=3, seed=4)
    requests = fan_out("a", tuple(range(300, 340)), sampling)
    core = make_core()
    together = run(core, requests)
    assert all(len(tokens) == 30 for tokens in together.values())
    assert len({tuple(tokens) for tokens in together.values()}) == 3  # seeds differ
    assert all(0 <= id_ < core.info.vocab_size for tokens in together.values() for id_ in tokens)
    assert not {id_ for tokens in together.values() for id_ in tokens} & {*core.info.eos_token_ids}
    # With small steps and after resuming they are the same.
    small = make_core(scheduler=SchedulerConfig(max_num_batched_tokens=8))
    assert run(small, [requests[0]])["a"] == together["a"]
    assert run(make_core(scheduler=SchedulerConfig(max_step_passes=5)), requests) == together
    resumed = Request(
        id="r",
        prompt_token_ids=requests[1].prompt_token_ids,
        sampling=requests[1].sampling,
        resumed_token_ids=tuple(together["a/1"][:11]),
    )
    assert run(core, [resumed])["r"] == together["a/1"][11:]


def test_vectors_cost_as_little():
    core = make_core(scheduler=SchedulerConfig(max_num_batched_tokens=8))
    prompts = {"a": (1, 2, 300), "b": tuple(range(40))}
    for id_, prompt in prompts.items():
        core.add(Request(id=id_, prompt_token_ids=prompt, pooling=PoolingParams()))
    found = {}
    while core.has_work:
        found |= core.step().embeddings
    for id_, prompt in prompts.items():
        vector = np.frombuffer(found[id_], "<f4")
        assert vector.size == core.info.pooling.size
        assert np.flatnonzero(vector).tolist() == [prompt[-1] % vector.size]


def test_sizes_come_from_the_config():
    with pytest.raises(ModelLoadError, match="out of range"):
        make_core(max_model_len=10**9)
    core = make_core(max_model_len=100)
    assert (core.info.max_model_len, core.info.num_parameters) == (100, 0)
