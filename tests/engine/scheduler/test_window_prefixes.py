"""Prefix hits in a model with a window in every layer: on what remains of a text, and correct."""

from __future__ import annotations

import random

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.types import Request, SamplingParams
from tests import tiny_models

WINDOW, SIZE, NUM_OUTPUT = 20, 4, 8  # the window is that of tiny_models' Mistral
_RNG = random.Random(3)
PROMPT = [_RNG.randrange(3, 160) for _ in range(70)]
OTHERS = [[_RNG.randrange(3, 160) for _ in range(12)] for _ in range(4)]


@pytest.fixture(scope="module")
def mistral(tmp_path_factory):
    """(directory, the greedy continuation of PROMPT by Hugging Face)."""
    expected = tiny_models.greedy_tokens(tiny_models.build("mistral"), PROMPT, NUM_OUTPUT)
    directory = tiny_models.save("mistral", tmp_path_factory.mktemp("mistral"))
    return directory, expected


def answer(core: EngineCore, prompt: list[int], name: str) -> tuple[list[int], int]:
    """The text, and how many prompt tokens were cached."""
    hits = core.stats.prefix_cache_hits
    sampling = SamplingParams(temperature=0, max_tokens=NUM_OUTPUT, ignore_eos=True, seed=0)
    core.add(Request(id=name, prompt_token_ids=tuple(prompt), sampling=sampling))
    tokens: list[int] = []
    while core.has_work:
        output = core.step()
        assert not output.errors
        for new in output.token_ids:
            tokens += new
    return tokens, core.stats.prefix_cache_hits - hits


@pytest.mark.parametrize("chunk", [512, 24], ids=["at once", "in chunks"])
def test_a_text_is_found_again_by_its_last_window(mistral, chunk):
    """Its beginning has been overwritten meanwhile."""
    directory, expected = mistral
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        device="cpu",
        num_threads=1,
        cache=CacheConfig(num_blocks=24, block_size=SIZE),
        scheduler=SchedulerConfig(max_num_batched_tokens=chunk),
    )
    core = EngineCore.load(config)
    assert answer(core, PROMPT, "first") == (expected, 0)
    for index, prompt in enumerate(OTHERS):
        answer(core, prompt, f"other-{index}")
    # None of its first twelve blocks can be found any more; those of the last window can.
    pool = core._pool
    assert pool.match(pool.chain(""), PROMPT).block_ids == []
    whole = (len(PROMPT) - 1) // SIZE * SIZE
    assert answer(core, PROMPT, "again") == (expected, whole)
    longer, hits = answer(core, [*PROMPT, *expected[:5]], "longer")
    assert (longer[:3], hits >= whole) == (expected[5:], True)
    assert core.stats.blocks.held == 0
