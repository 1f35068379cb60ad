"""Texts of a model on several ranks equal Hugging Face's under any schedule."""

from __future__ import annotations

import queue
import random

import numpy as np
import pytest
import torch

from engine.config import (
    CacheConfig,
    EngineConfig,
    SchedulerConfig,
    SpeculationConfig,
)
from engine.core import EngineCore
from engine.errors import EngineDead, ModelLoadError
from engine.pooling import PoolingParams
from engine.requests import fan_out
from engine.runner import load_runner
from engine.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.handmade import BLOCK_SIZE, request

NUM_OUTPUT = 12
SCHEDULES = {
    "chunks of five": {"max_num_batched_tokens": 5},
    "overlapped": {"overlap": True},
    "passes": {"max_step_passes": 4},
    "preempted": {"num_blocks": 16},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """(directory, prompts, greedy continuations by Hugging Face's generate)."""
    model = tiny_models.build("qwen3")
    directory = tmp_path_factory.mktemp("qwen3")
    model.save_pretrained(directory)
    rng = random.Random(4)
    shared = [rng.randrange(3, 160) for _ in range(22)]
    prompts = [shared[:18] + [rng.randrange(3, 160) for _ in range(n)] for n in (1, 9, 17)]
    prompts += [[rng.randrange(3, 160) for _ in range(n)] for n in (1, 33)]
    texts = [tiny_models.greedy_tokens(model, prompt, NUM_OUTPUT) for prompt in prompts]
    return directory, prompts, texts


def engine(directory, size=2, stages=1, **settings):
    """An engine with ``stages`` of ``size`` ranks, and its runner."""
    others = {key: settings.pop(key) for key in ("speculation", "lora") if key in settings}
    cache = CacheConfig(
        block_size=BLOCK_SIZE,
        num_blocks=settings.pop("num_blocks", 128),
        offload_bytes=settings.pop("offload_bytes", 0),
    )
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        tensor_parallel_size=size,
        pipeline_parallel_size=stages,
        cache=cache,
        scheduler=SchedulerConfig(**settings),
        **others,
    )
    runner = load_runner(config)
    return EngineCore(config, runner), runner


def texts_of(core) -> dict[str, list[int]]:
    """Run until all requests are done."""
    texts: dict[str, list[int]] = {}
    while core.has_work:
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            texts.setdefault(row_id, []).extend(tokens)
    return texts


@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_texts_equal_hugging_face_under_any_schedule(checkpoint, name):
    directory, prompts, expected = checkpoint
    core, runner = engine(directory, **SCHEDULES[name])
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    for again in range(2):  # the second round finds the first one's prefixes
        for index, prompt in enumerate(prompts):
            core.add(request(f"{again}/{index}", prompt, sampling))
        texts = texts_of(core)
        assert [texts[f"{again}/{index}"] for index in range(len(prompts))] == expected
    assert (core.stats.num_preemptions > 0) == (name == "preempted")
    assert core.stats.prefix_cache_hits > 0 or name == "preempted"
    runner._team.close()


def test_seeded_choices_and_told_logprobs_are_those_of_one_process(checkpoint):
    """Forks copy blocks on every rank; sampling, masks and biases exist only on rank 0."""
    directory, prompts, _ = checkpoint
    sampling = SamplingParams(
        n=3,
        seed=7,
        max_tokens=NUM_OUTPUT,
        ignore_eos=True,
        logprobs=2,
        frequency_penalty=0.5,
        logit_bias={5: 3.0},
    )
    told = []
    for size in (1, 2):
        core, runner = engine(directory, size)
        for child in fan_out("x", tuple(prompts[2]), sampling):
            core.add(child)
        tokens: dict[str, list[int]] = {}
        logprobs: list[float] = []
        while core.has_work:
            output = core.step()
            for row_id, ids in zip(output.ids, output.token_ids, strict=True):
                tokens.setdefault(row_id, []).extend(ids)
            for row_id in sorted(output.logprobs):
                logprobs += [entry.logprob for entry in output.logprobs[row_id]]
        told.append((tokens, torch.tensor(logprobs)))
        if size > 1:
            runner._team.close()
    (alone, ours), (shared, theirs) = told
    assert shared == alone
    torch.testing.assert_close(theirs, ours, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("size", "stages"), [(2, 1), (1, 3)])
@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_are_verified_on_all_ranks(checkpoint, method, size, stages):
    directory, prompts, expected = checkpoint
    draft = str(directory) if method == "draft" else None  # its drafts are always right
    options = SpeculationConfig(method=method, draft_model=draft, adaptive=False)
    core, runner = engine(directory, size, stages, speculation=options)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    for index, prompt in enumerate(prompts):
        core.add(request(str(index), prompt, sampling))
    texts = texts_of(core)
    assert [texts[str(index)] for index in range(len(prompts))] == expected
    assert core.stats.drafts.num_draft_tokens > 0
    runner._team.close()


def test_a_rank_has_its_part_of_weights_and_cache(checkpoint):
    directory, _, _ = checkpoint
    infos = []
    for size in (1, 2):
        _, runner = engine(directory, size)
        infos.append(runner.info)
        if size > 1:
            runner._team.close()
    alone, shared = (info.memory for info in infos)
    assert shared.bytes_per_token * 2 == alone.bytes_per_token
    assert shared.kv_cache_bytes * 2 == alone.kv_cache_bytes
    assert shared.weights_bytes < 0.52 * alone.weights_bytes  # norms are replicated
    assert infos[0].num_parameters == infos[1].num_parameters
    assert infos[0].fingerprint != infos[1].fingerprint


def test_a_lost_rank_is_the_end_of_the_engine(checkpoint):
    directory, prompts, _ = checkpoint
    core, runner = engine(directory)
    lost: queue.SimpleQueue[str] = queue.SimpleQueue()
    runner.on_loss(lost.put)
    core.add(request("a", prompts[0], SamplingParams(max_tokens=60, ignore_eos=True)))
    core.step()
    (rank,) = runner._team._ranks
    rank._child.hang_up()
    with pytest.raises(EngineDead, match="rank"):
        texts_of(core)
    assert "rank 1 (process" in lost.get(timeout=30)
    runner._team.close()


def test_a_pass_that_fails_on_rank_0_is_the_end_of_the_engine(checkpoint, monkeypatch):
    """The others have continued: no part of the step can be repeated."""
    directory, prompts, _ = checkpoint
    core, runner = engine(directory)
    forward = runner._model.forward
    monkeypatch.setattr(runner._model, "forward", lambda *given: [forward(*given)][1])
    core.add(request("a", prompts[0]))
    with pytest.raises(EngineDead, match="IndexError in a pass that ranks share"):
        core.step()
    runner._team.close()


REFUSED = {
    "num_attention_heads (6) cannot": {"tensor_parallel_size": 4},
    "num_key_value_heads (2) neither": {"tensor_parallel_size": 3},
    "intermediate_size (80) cannot": {"tensor_parallel_size": 6},
    "batch_invariant": {"batch_invariant": True},
    "the model has 0 experts": {"enable_expert_parallel": True},
    "'mtp'": {"speculation": SpeculationConfig(method="mtp")},
    "the stub has no model": {"load_format": "stub"},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_shared_out_is_refused_in_one_line(checkpoint, problem):
    directory, _, _ = checkpoint
    settings = {"model": str(directory), "tensor_parallel_size": 2, **REFUSED[problem]}
    with pytest.raises(ModelLoadError, match=r"^tensor_parallel_size.*[^\n]$") as caught:
        load_runner(EngineConfig(**settings))
    assert problem in str(caught.value)


def test_a_rank_that_cannot_load_tells_why(checkpoint, tmp_path, monkeypatch):
    directory, _, _ = checkpoint
    from engine.parallel import follower

    def refuse(*_):
        raise ModelLoadError("its GPU has no room")

    monkeypatch.setattr(follower, "read_weights", refuse)
    with pytest.raises(ModelLoadError, match="rank 1: its GPU has no room"):
        engine(directory)


def test_pooled_vectors_are_those_of_one_process(checkpoint):
    directory, prompts, _ = checkpoint
    vectors = []
    for size, stages in ((1, 1), (2, 1), (1, 3)):
        core, runner = engine(directory, size, stages, max_num_batched_tokens=7)
        for kind in ("last", "mean"):
            params = PoolingParams(kind=kind)
            core.add(Request(id=kind, prompt_token_ids=tuple(prompts[1]), pooling=params))
        told: dict[str, bytes] = {}
        while core.has_work:
            told |= core.step().embeddings
        if size * stages > 1:
            runner._team.close()
        vectors.append([np.frombuffer(told[kind], "<f4") for kind in ("last", "mean")])
    alone, shared, staged = vectors
    np.testing.assert_allclose(shared, alone, atol=1e-4)
    np.testing.assert_allclose(staged, alone, atol=1e-4)
