"""Texts with speculation are those without, whoever guesses and whatever is asked for."""

from __future__ import annotations

import random
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.types import EngineOutput, Request, SamplingParams
from tests import tiny_models

NUM_OUTPUT = 24
_RNG = random.Random(7)
_STEM = [_RNG.randrange(3, 160) for _ in range(18)]
PROMPTS = [
    [5, 6, 7, 8, 9, 10] * 4,
    [*_STEM, 11, 12],
    [*_STEM, 40],
    *([_RNG.randrange(3, 160) for _ in range(n)] for n in (1, 5, 33)),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another family, which knows nothing of what the first would say."""
    return str(tiny_models.save("gemma2", tmp_path_factory.mktemp("gemma2")))


def config_of(model: str, speculation: SpeculationConfig | None, **settings: Any) -> EngineConfig:
    cache = {"num_blocks": 128, "block_size": 4}
    cache |= {key: settings.pop(key) for key in tuple(cache) if key in settings}
    return EngineConfig(
        model=model,
        dtype="float32",
        num_threads=1,
        attention_backend=settings.pop("attention_backend", "auto"),
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**settings),
        speculation=speculation,
    )


def generate(
    config: EngineConfig, requests: list[Request]
) -> tuple[dict[str, list[int]], dict[str, list], EngineCore]:
    """All texts, all log-probabilities, and the engine."""
    core = EngineCore.load(config)
    for request in requests:
        core.add(request)
    texts: dict[str, list[int]] = {}
    logprobs: dict[str, list] = {}
    while core.has_work:
        output: EngineOutput = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            texts.setdefault(row_id, []).extend(tokens)
            logprobs.setdefault(row_id, []).extend(output.logprobs.get(row_id, ()))
    assert core.stats.blocks.held == 0
    return texts, logprobs, core


def requests_of(**sampling: Any) -> list[Request]:
    params: dict[str, Any] = {"max_tokens": NUM_OUTPUT, "ignore_eos": True, **sampling}
    return [
        Request(
            id=str(index),
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"seed": index, **params}),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


def speculation_of(name: str, tiny: str, other: str, **changes: Any) -> SpeculationConfig:
    methods: dict[str, dict[str, Any]] = {
        "ngram": {"method": "ngram", "min_ngram": 1},
        "suffix": {"method": "suffix", "min_ngram": 1},
        "itself": {"method": "draft", "draft_model": tiny},
        "another model": {"method": "draft", "draft_model": other},
    }
    return SpeculationConfig(**{"adaptive": False, **methods[name], **changes})


PROPOSERS = ("ngram", "suffix", "itself", "another model")
SCHEDULES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "chunks of seven": {"max_num_batched_tokens": 7},
    "few at once": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 30},
    "overlapped": {"overlap": True},
    "plain torch": {"attention_backend": "reference"},
}
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_text_is_the_same(tiny, other, name, schedule):
    expected, _, _ = generate(config_of(tiny, None), requests_of(**GREEDY))
    speculation = speculation_of(name, tiny, other)
    config = config_of(tiny, speculation, **SCHEDULES[schedule])
    texts, _, core = generate(config, requests_of(**GREEDY))
    assert texts == expected
    stats = core.stats
    assert stats.drafts.num_draft_tokens > 0
    assert (stats.num_preemptions > 0) == (schedule == "preempted")
    if name == "itself":
        assert stats.drafts.num_accepted_tokens == stats.drafts.num_draft_tokens


ASKED: dict[str, dict[str, Any]] = {
    "sampled": {},
    "truncated": {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalised": {"frequency_penalty": 1.0, "presence_penalty": 0.5, "repetition_penalty": 1.2},
    "greedy and penalised": {"temperature": 0.0, "frequency_penalty": 1.5},
    "biased": {"logit_bias": {7: 3.0, 9: -100.0}},
    "bad words": {"bad_token_ids": ((7,), (8, 9), (5, 6)), "temperature": 0.3},
    "few tokens allowed": {"allowed_token_ids": (3, 5, 7, 9, 11)},
    "ends late": {"ignore_eos": False, "stop_token_ids": tuple(range(3, 40)), "min_tokens": 9},
    "told": {"logprobs": 3, "prompt_logprobs": 1},
}


@pytest.mark.parametrize("asked", ASKED)
@pytest.mark.parametrize("name", ["ngram", "itself"])
def test_coupled_drafts_change_no_text_whatever_is_asked_for(tiny, other, name, asked):
    """Seed by seed; a draft that draws with the same noise is nearly always right."""
    requests = requests_of(**ASKED[asked])
    expected, expected_logprobs, _ = generate(config_of(tiny, None), requests)
    config = config_of(tiny, speculation_of(name, tiny, other))
    texts, logprobs, core = generate(config, requests)
    assert texts == expected
    for row_id, entries in expected_logprobs.items():
        told = logprobs[row_id]
        assert [entry.token_id for entry in told] == [entry.token_id for entry in entries]
        for entry, same in zip(told, entries, strict=True):
            assert entry.top_ids == same.top_ids
            assert entry.logprob == pytest.approx(same.logprob, abs=1e-4)
    stats = core.stats.drafts
    if name == "itself" and asked in ("sampled", "truncated", "biased", "told"):
        assert stats.num_accepted_tokens == stats.num_draft_tokens > 0
