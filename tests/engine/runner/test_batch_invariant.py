"""--batch-invariant: a sequence's scores have the same bits in any batch, chunk and cache."""

from __future__ import annotations

import random

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.quantization import choose_method
from engine.runner import load_runner
from engine.types import Request, SamplingParams
from kernels.cpu import linear
from tests import tiny_models

DTYPES = ("float32", "bfloat16")
TOLD = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=4)


@pytest.fixture(scope="module", params=["llama", "mistral"])
def directory(request, tmp_path_factory) -> str:
    return str(tiny_models.save(request.param, tmp_path_factory.mktemp(request.param)))


def make(
    directory: str, dtype: str, *, enforce_eager: bool = False, backend: str = "auto", **scheduler
) -> EngineCore:
    config = EngineConfig(
        model=directory,
        dtype=dtype,
        attention_backend=backend,
        batch_invariant=True,
        enforce_eager=enforce_eager,
        num_threads=2,
        cache=CacheConfig(block_size=4, num_blocks=200),
        scheduler=SchedulerConfig(**scheduler),
    )
    try:
        return EngineCore(config, load_runner(config))
    except ModelLoadError as error:
        pytest.skip(str(error))  # no compiler on this machine


def answers(core: EngineCore, prompts: list[tuple[int, ...]]) -> list[list]:
    """Tokens and their log-probabilities, to the last bit."""
    for index, prompt in enumerate(prompts):
        core.add(Request(id=str(index), prompt_token_ids=prompt, sampling=TOLD))
    told: list[list] = [[] for _ in prompts]
    while core.has_work:
        output = core.step()
        assert not output.errors
        for row_id in output.ids:
            told[int(row_id)] += output.logprobs[row_id]
    return told


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_same_bits_alone_in_a_crowd_in_chunks_and_with_hits(directory: str, dtype: str) -> None:
    rng = random.Random(1)
    stem = tuple(rng.randrange(3, 160) for _ in range(30))
    prompts = [stem + tuple(rng.randrange(3, 160) for _ in range(n)) for n in (1, 9, 23)]
    prompts += [tuple(rng.randrange(3, 160) for _ in range(n)) for n in (1, 2, 5, 14, 45)]
    core = make(directory, dtype)
    alone = [answers(core, [prompt])[0] for prompt in prompts]  # from here on the stem is cached
    assert core.stats.prefix_cache_hits > 0
    for limits in ({}, {"max_num_batched_tokens": 7}, {"max_num_batched_tokens": 19}):
        crowd = make(directory, dtype, **limits)
        assert answers(crowd, prompts) == alone
        assert answers(crowd, prompts[::-1])[::-1] == alone


@pytest.mark.skipif(not linear.is_available(), reason="no panels here")
@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma4_shared", "llama4", "gpt_neox"])
def test_recorded_steps_have_these_bits_too(kind: str, tmp_path) -> None:
    rng = random.Random(3)
    prompts = [tuple(rng.randrange(3, 160) for _ in range(n)) for n in (1, 3, 9, 21, 45)]
    directory = str(tiny_models.save(kind, tmp_path))
    crowd = make(directory, "bfloat16", max_num_batched_tokens=7)
    alone = make(directory, "bfloat16", enforce_eager=True)
    assert answers(crowd, prompts) == [answers(alone, [prompt])[0] for prompt in prompts]
    assert crowd._runner._graphs._programs
    assert alone._runner._graphs is None


@pytest.mark.skipif(not linear.is_available(), reason="no panels here")
@pytest.mark.parametrize("kind", ["qwen2_moe", "gpt_oss", "deepseek_v3", "deepseek_v32"])
def test_experts_in_panels(kind: str, tmp_path) -> None:
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(3, 160) for _ in range(n)) for n in (1, 3, 9, 21, 45)]
    directory = str(tiny_models.save(kind, tmp_path))
    core = make(directory, "bfloat16")
    alone = [answers(core, [prompt])[0] for prompt in prompts]
    for limits in ({}, {"max_num_batched_tokens": 7}):
        assert answers(make(directory, "bfloat16", **limits), prompts) == alone
    config = EngineConfig(model=directory, dtype="float32", batch_invariant=True)
    with pytest.raises(ModelLoadError, match="experts is not batch-invariant"):
        load_runner(config)


def test_the_ordinary_mode_does_not_promise_it(directory: str) -> None:
    """Otherwise the test above could not fail."""
    prompts = [tuple(range(20 + i, 60 + 3 * i)) for i in range(8)]
    config = EngineConfig(
        model=directory, dtype="float32", num_threads=1, attention_backend="reference"
    )
    core = EngineCore(config, load_runner(config))
    alone = [answers(core, [prompt])[0] for prompt in prompts]
    assert answers(core, prompts) != alone


def test_what_cannot_be_invariant_is_refused_and_said(directory: str) -> None:
    config = EngineConfig(model=directory, batch_invariant=True, attention_backend="reference")
    with pytest.raises(ModelLoadError, match="depend on the batch"):
        load_runner(config)
    with pytest.raises(ModelLoadError, match=r"int4.*not batch-invariant"):
        choose_method("int4", torch.bfloat16, torch.device("cpu"), invariant=True)
