"""Requests of a random life (``real_lives.py``), of all kinds, some with a common prefix."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from engine.pooling import PoolingParams
from engine.requests import fan_out
from engine.types import Adapter, Grammar, Request, SamplingParams
from tests.image_prompts import ask, rules_of

VOCAB = 160
_EXTRAS: tuple[dict[str, Any], ...] = (
    {"top_k": 20, "top_p": 0.9},
    {"min_p": 0.05},
    {"frequency_penalty": 1.0},
    {"presence_penalty": 1.5, "repetition_penalty": 1.3},
    {"logit_bias": {7: 3.0, 9: -100.0}},
    {"bad_token_ids": ((5,), (6, 7), (8, 9, 10))},
    {"allowed_token_ids": tuple(range(20, 90, 3))},
    {"stop_token_ids": tuple(range(3, 160, 11)), "min_tokens": 4},
    {"logprobs": 3},
    {"prompt_logprobs": 1, "logprobs": 0},
    {"grammar": Grammar("regex", "[a-h ]{4,25}"), "logprobs": 1},
    {"grammar": Grammar("json_object"), "presence_penalty": 0.5},
)
_RANKS = 4, 8  # of adapters


class RequestMaker:
    """Makes the requests of one life.

    Args:
        rng: of the life.
        model: its directory.
        sees: whether prompts may hold images.
        adapters: directories of adapters; each is registered again and again.
    """

    def __init__(self, rng: random.Random, model: str, *, sees: bool, adapters: list[Path]) -> None:
        self._rng = rng
        self._rules = rules_of(Path(model)) if sees else None
        self._adapters = adapters
        self._registered: list[Adapter] = []
        self._stems = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (20, 33)]
        self._stems.append([5, 6, 7, 8] * 5)

    def make(self) -> list[list[Request]]:
        """Some requests, each with its forks."""
        return [self._make(f"r{number}") for number in range(self._rng.randint(3, 9))]

    def _make(self, name: str) -> list[Request]:
        rng = self._rng
        stem = rng.choice(self._stems)[: rng.choice((0, 7, 16, 40))]
        prompt = [*stem, *(rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 5, 12))))]
        given: dict[str, Any] = {
            **{"priority": rng.randrange(3), "cache_salt": rng.choice(("", "", "x"))},
            **{"tenant": rng.choice("tu"), "background": rng.random() < 0.1},
        }
        if rng.random() < 0.1:
            pooled = PoolingParams(kind=rng.choice(("last", "max")), normalize=False)
            return [Request(id=name, prompt_token_ids=tuple(prompt), pooling=pooled, **given)]
        if self._rules is not None and rng.random() < 0.6:
            shapes = rng.choice((((2, 3),), ((1, 2), (2, 1)), ((3, 3),)))
            seen = ask(name, self._rules, rng.randrange(2), shapes=shapes)
            prompt, given["images"] = [*seen.prompt_token_ids, *prompt[-12:]], seen.images
        sampling = SamplingParams(
            temperature=rng.choice((0.0, 0.0, 0.6, 1.0)),
            seed=rng.randrange(5),
            max_tokens=rng.choice((4, 12, 25, 40)),
            ignore_eos=rng.random() < 0.7,
            n=rng.choice((1, 1, 1, 3)),
            **(rng.choice(_EXTRAS) if rng.random() < 0.7 else {}),
        )
        return fan_out(name, prompt, sampling, adapter=self._adapter(), **given)

    def _adapter(self) -> Adapter | None:
        """None, one in use, or one that is registered now: what was cached for others is not its
        own."""
        rng = self._rng
        if not self._adapters or rng.random() < 0.3:
            return None
        if not self._registered or rng.random() < 0.4:
            path = rng.choice(self._adapters)
            self._registered.append(Adapter(str(len(self._registered)), "a", str(path)))
        return rng.choice(self._registered)


def save_adapters(model: str) -> list[Path]:
    """Save some random adapters of a model beside it; returns their directories."""
    weights = load_file(Path(model) / "model.safetensors")
    made: list[Path] = []
    for seed, rank in enumerate(_RANKS):
        directory = Path(model) / f"adapter-{seed}"
        made.append(directory)
        if directory.exists():
            continue
        directory.mkdir()
        generator, tensors = torch.Generator().manual_seed(seed), {}
        for name, weight in weights.items():
            if name.endswith("q_proj.weight"):
                (outputs, inputs), module = weight.shape, name.removesuffix(".weight")
                for side, shape in (("A", (rank, inputs)), ("B", (outputs, rank))):
                    key = f"base_model.model.{module}.lora_{side}.weight"
                    tensors[key] = 0.3 * torch.randn(shape, generator=generator)
        save_file(tensors, directory / "adapter_model.safetensors")
        config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
        (directory / "adapter_config.json").write_text(json.dumps(config))
    return made
