"""Adapters in a batch whose drafts come from the model without adapters."""

from __future__ import annotations

import random
import warnings
from pathlib import Path

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, LoraConfig, SpeculationConfig
from engine.core import EngineCore
from engine.types import Adapter, Request, SamplingParams
from tests import tiny_models

peft = pytest.importorskip("peft")

_RNG = random.Random(4)
PROMPTS = [[_RNG.randrange(3, 160) for _ in range(n)] for n in (4, 9, 21)]


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny_models.save("llama", tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def adapters(tmp_path_factory) -> list[Adapter]:
    """An adapter that changes the output, and one so weak that drafts of the base often fit."""
    made = []
    for name, scale in (("strong", 0.3), ("weak", 0.02)):
        torch.manual_seed(len(made))
        path = tmp_path_factory.mktemp(name)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT and transformers warn about each other
            config = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "up_proj"])
            adapted = peft.get_peft_model(tiny_models.build("llama"), config)
            for parameter_name, parameter in adapted.named_parameters():
                if "lora_" in parameter_name:
                    parameter.data.normal_(0, scale)
            adapted.save_pretrained(path)
        made.append(Adapter(id=name, name=name, path=str(path)))
    return made


def texts(
    base: Path, adapters: list[Adapter], speculation: SpeculationConfig | None, **sampling
) -> tuple[dict[str, list[int]], EngineCore]:
    config = EngineConfig(
        model=str(base),
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(block_size=4, num_blocks=256),
        lora=LoraConfig(max_loaded=2, max_on_host=2),
        speculation=speculation,
    )
    core = EngineCore.load(config)
    told: dict[str, list[int]] = {}
    for number, prompt in enumerate(PROMPTS):
        for adapter in (None, *adapters):
            name = "base" if adapter is None else adapter.name
            params = SamplingParams(seed=number, max_tokens=24, ignore_eos=True, **sampling)
            told[f"{name}-{number}"] = []
            core.add(
                Request(
                    id=f"{name}-{number}",
                    prompt_token_ids=tuple(prompt),
                    sampling=params,
                    adapter=adapter,
                )
            )
    while core.has_work:
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told[row_id] += tokens
    return told, core


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("method", ["draft", "ngram", "suffix"])
def test_rows_with_adapters_say_what_they_say_without_drafts(base, adapters, method, temperature):
    """The base model drafts for all: always right for its own rows, sometimes for the others."""
    expected, _ = texts(base, adapters, None, temperature=temperature)
    speculation = SpeculationConfig(
        method=method,
        draft_model=str(base) if method == "draft" else None,
        min_ngram=1,
        adaptive=False,
    )
    told, core = texts(base, adapters, speculation, temperature=temperature)
    assert told == expected
    assert told["strong-0"] != told["base-0"]
    drafts = core.stats.drafts
    assert drafts.num_accepted_tokens < drafts.num_draft_tokens
    if method == "draft":
        assert drafts.num_accepted_tokens > 24  # from three rows of the base model
