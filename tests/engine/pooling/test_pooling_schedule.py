"""Scheduling of prompts that are pooled."""

from __future__ import annotations

import msgspec
import pytest

from engine.config import CacheConfig
from engine.core import EngineCore
from engine.errors import ContextLengthExceeded
from engine.pooling import PoolingParams
from engine.types import EngineInfo, EngineOutput, Request, SamplingParams, StepPlan
from tests.engine.fakes import (
    FakeRunner,
    FaultyRunner,
    expected_embedding,
    make_config,
    make_info,
)

MEAN = PoolingParams(kind="mean", normalize=False)


def pooling(id: str, length: int, params: PoolingParams = MEAN) -> Request:
    return Request(id=id, prompt_token_ids=tuple(i % 5 for i in range(length)), pooling=params)


def run(core: EngineCore) -> list[EngineOutput]:
    outputs = []
    while core.has_work:
        outputs.append(core.step())
    return outputs


def test_a_vector_cut_short_by_preemption_begins_again() -> None:
    """A growing sequence takes the blocks of a half-computed prompt."""
    config = make_config(cache=CacheConfig(block_size=1), max_num_batched_tokens=2)
    core = EngineCore(config, FakeRunner(make_info(20, 1, 20)))
    text = SamplingParams(max_tokens=15, ignore_eos=True)
    core.add(Request(id="text", prompt_token_ids=(1,), sampling=text))
    request = pooling("vector", 12)
    core.add(request)
    *_, last = run(core)
    assert core.stats.num_preemptions == 1
    assert last.embeddings == {"vector": expected_embedding(request)}
    assert last.finish_reasons == ("stop",)
    assert core.stats.blocks.held == 0


def test_the_result_of_a_prompt_that_was_preempted_since_does_not_end_it() -> None:
    """With several steps in flight, it may even run again before that result arrives."""
    config = make_config(cache=CacheConfig(block_size=1), max_num_batched_tokens=2)
    config = msgspec.structs.replace(config, pipeline_parallel_size=3)
    core = EngineCore(config, FakeRunner(make_info(17, 1, 20)))
    for name, length in (("long", 10), ("short", 3)):
        text = SamplingParams(max_tokens=length, ignore_eos=True)
        core.add(Request(id=name, prompt_token_ids=(1,), sampling=text))
    request = pooling("vector", 11)
    core.add(request)
    (embedding,) = [output.embeddings["vector"] for output in run(core) if output.embeddings]
    assert core.stats.num_preemptions
    assert embedding == expected_embedding(request)
    assert core.stats.blocks.held == 0


def test_a_fault_in_the_middle_of_a_prompt_counts_nothing_twice() -> None:
    """The step runs twice, the second time row by row; only the faulty row fails."""

    def fault(plan: StepPlan) -> None:
        if any(row.id == "bad" and row.start >= 8 for row in plan.rows):
            raise RuntimeError("this row is bad")

    config = make_config(max_num_batched_tokens=12)
    core = EngineCore(config, FaultyRunner(make_info(64, 4, 200), fault))
    good = pooling("good", 30)
    for request in (pooling("bad", 30), good):
        core.add(request)
    outputs = run(core)
    assert [id_ for output in outputs for id_ in output.errors] == ["bad"]
    (embedding,) = [output.embeddings["good"] for output in outputs if output.embeddings]
    assert embedding == expected_embedding(good)


class _Encoder(FakeRunner):
    """A runner that must see a prompt whole; it records the prompts of each step."""

    def __init__(self, info: EngineInfo) -> None:
        super().__init__(info)
        self.steps: list[list[int]] = []

    def launch(self, plan: StepPlan):
        self.steps.append([len(row.token_ids) for row in plan.rows])
        return super().launch(plan)


def test_whole_prompts_are_never_cut() -> None:
    import msgspec

    info = msgspec.structs.replace(make_info(8, 40, 40), unchunked_prefill=True)
    runner = _Encoder(info)
    core = EngineCore(make_config(max_num_batched_tokens=10, max_num_seqs=8), runner)
    requests = [pooling(f"r{i}", length) for i, length in enumerate((7, 40, 3, 20, 17, 9))]
    for request in requests:
        core.add(request)
    with pytest.raises(ContextLengthExceeded):
        core.add(pooling("long", 41))
    found = {id_: vector for output in run(core) for id_, vector in output.embeddings.items()}
    assert found == {request.id: expected_embedding(request) for request in requests}
    # As many as fit a step of the longest prompt, in order.
    assert [lengths for lengths in runner.steps if lengths] == [[7], [40], [3, 20, 17], [9]]
