"""A quantised KV cache in the whole engine: its size, its text, and block sharing."""

from __future__ import annotations

import random

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.llm import LLM
from engine.runner import load_runner
from engine.types import BlockCopy, SamplingParams
from tests import tiny_models
from tests.engine.handmade import BLOCK_SIZE, Hand, load, request

CACHE_DTYPES = ["int8", "fp8"]
TOLD = SamplingParams(temperature=0.0, prompt_logprobs=0)
NUM_OUTPUT = 12
SCHEDULES = {
    "chunks of five": {"max_num_batched_tokens": 5},
    "one token a step": {"max_num_batched_tokens": 1},
    "few at once": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 16},
    "overlapped": {"overlap": True},
}
# Normalised keys and grouped heads; alternating windows with soft caps. Sinks would add nothing.
FAMILIES = ["qwen3", "gemma2"]


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request, tmp_path_factory):
    model = tiny_models.build(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory, model


def prompts() -> list[list[int]]:
    rng = random.Random(4)
    shared = [rng.randrange(3, 160) for _ in range(22)]
    found = [shared[:18] + [rng.randrange(3, 160) for _ in range(n)] for n in (1, 9, 17)]
    return found + [[rng.randrange(3, 160) for _ in range(n)] for n in (1, 5, 33)]


def texts(directory, dtype: str, backend: str = "auto", **settings) -> dict[str, list[int]]:
    """Greedy continuations, twice: the second round finds the first one's prefixes."""
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        attention_backend=backend,
        cache=CacheConfig(
            num_blocks=settings.pop("num_blocks", 128), block_size=BLOCK_SIZE, dtype=dtype
        ),
        scheduler=SchedulerConfig(**settings),
    )
    core = EngineCore(config, load_runner(config))
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    found: dict[str, list[int]] = {}
    for seed in range(2):
        for index in random.Random(seed).sample(range(6), 6):
            core.add(request(f"{seed}/{index}", prompts()[index], sampling))
        while core.has_work:
            output = core.step()
            assert not output.errors
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                found.setdefault(row_id, []).extend(tokens)
    assert core.stats.blocks.held == 0
    assert settings or core.stats.prefix_cache_hits > 0
    return found


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_greedy_text_is_the_same_under_any_schedule_and_kernels(tiny, dtype):
    """Chunks, cached prefixes, preemption: a token's codes depend only on the token."""
    directory, _ = tiny
    expected = texts(directory, dtype)
    for index in range(6):
        assert expected[f"0/{index}"] == expected[f"1/{index}"]
    for name, settings in SCHEDULES.items():
        assert texts(directory, dtype, **settings) == expected, name
    assert texts(directory, dtype, "reference") == expected


# The largest and the mean change of a tiny model's log-probability; float32, contexts of 60.
TOLERANCES = {"int8": (0.3, 0.05), "fp8": (1.0, 0.2)}


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_logits_are_hugging_faces_within_the_rounding(tiny, dtype):
    directory, model = tiny
    rng = random.Random(1)
    ids = [rng.randrange(3, 160) for _ in range(60)]
    hand = Hand(load(directory, cache_dtype=dtype))
    hand.add(request("a", ids, TOLD))
    parts = [hand.step({"a": count}) for count in (17, 43)]
    ours = torch.tensor([one.logprob for part in parts for one in part.prompt_logprobs["a"]])
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0].float()
    theirs = torch.log_softmax(logits, -1)[torch.arange(59), torch.tensor(ids[1:])]
    differences = (ours - theirs).abs()
    most, mean = TOLERANCES[dtype]
    assert differences.max() < most
    assert differences.mean() < mean
    assert differences.max() > 1e-5  # the codes are really used


@pytest.mark.parametrize("dtype", CACHE_DTYPES)
def test_a_copied_block_continues_as_the_original(tiny, dtype):
    """A fork, as for n > 1 and beams: full blocks are shared, the last is copied with scales."""
    directory, _ = tiny
    prompt = list(range(20, 31))
    hand = Hand(load(directory, cache_dtype=dtype))
    hand.add(request("solo", prompt))
    hand.step({"solo": 11})
    hand.decode("solo", 8)
    hand.add(request("parent", prompt))
    hand.step({"parent": 11})
    source = hand.blocks["parent"][2]
    target = hand._free.pop()
    hand.add(request("child", prompt), shared_blocks=(*hand.blocks["parent"][:2], target))
    hand.computed["child"] = 10
    hand.step({"parent": 1, "child": 1}, copies=[BlockCopy(source, target)])
    assert hand.decode("parent", 6) == hand.tokens["solo"][13:19]
    assert hand.decode("child", 7) == hand.tokens["solo"][12:19]
    assert hand.runner.info.memory.cache_dtype == {"int8": "int8", "fp8": "float8_e4m3fn"}[dtype]


def test_offline_and_fp8s_other_name():
    """The embedded model gives the same answer under either name of the format."""
    answers = []
    for name in ("fp8", "fp8_e4m3"):
        llm = LLM(kv_cache_dtype=name, max_model_len=64, num_gpu_blocks_override=16, use_tqdm=False)
        with llm:
            assert llm.model_info().memory.cache_dtype == "float8_e4m3fn"
            params = SamplingParams(temperature=0.0, max_tokens=8)
            answers.append(llm.generate(["The capital of"], params)[0].outputs[0].text)
    assert answers[0] == answers[1] != ""
