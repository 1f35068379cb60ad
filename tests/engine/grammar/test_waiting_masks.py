"""Deferring masks until the model's choices are known changes no text."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.grammar import llguidance_backend
from engine.grammar.llguidance_backend import DeferralPolicy, LlguidanceBackend, LlguidanceMatcher
from engine.paths import default_model_dir
from engine.requests import fan_out
from engine.runner import load_runner
from engine.sampling.masks import MaskLines
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar, Request, SamplingParams, TokenLogprobs

PEOPLE = {
    "type": "array",
    "minItems": 4,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 9},
            "tag": {"enum": ["new", "newer"]},
            "note": {"type": "string", "minLength": 4, "maxLength": 14},
        },
        "required": ["name", "note"],
        "additionalProperties": False,
    },
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(PEOPLE)),
    Grammar("json_object"),
    Grammar("regex", "[a-zé]{3,9}( [A-Za-zé]{3,9}){0,5}[.!]?"),
    Grammar("regex", "The answer (is )?[0-9]{1,3}, [a-z ]{1,12}"),
    Grammar("choice", json.dumps(["Paris is it", "Paris", "Rome is it"])),
    Grammar("lark", 'start: "<" WORD ("," WORD)* ">"\nWORD: /[a-z]{1,8}/'),
)


@pytest.mark.parametrize("grammar", GRAMMARS, ids=lambda grammar: grammar.text[:12])
def test_a_token_is_allowed_where_its_mask_says_so(
    backend: LlguidanceBackend, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each position of random texts where a mask may be deferred, for all tokens."""
    monkeypatch.setattr(llguidance_backend, "_MIN_LETTERS", 1)
    chance = random.Random(5)
    compiled = backend.compile(grammar)
    mask = np.zeros((1, -(-backend.vocab_size // 32)), np.int32)
    num_waited = 0
    for _ in range(12):
        matcher, token = compiled.matcher(), None
        matcher.deferral.is_expensive = True
        for _ in range(30):
            told = [] if token is None else [token]
            step = matcher.batch_matcher.advance_and_fill([(matcher, told, 0, True)], mask)
            assert not step.failures
            if step.deferred:
                num_waited += 1
                matcher.fill(mask[0])
                matcher.deferral.is_expensive = True
            bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: backend.vocab_size]
            if step.deferred:
                said = [matcher.allows(token_id) for token_id in range(backend.vocab_size)]
                assert said == bits.astype(bool).tolist()
            if matcher.is_complete:
                break
            # Prefer letters over ends, since masks are deferred within texts.
            choices = np.flatnonzero(bits).tolist()
            wordy = [id_ for id_ in choices if matcher.batch_matcher._is_text[id_]]
            token = chance.choice(wordy if wordy and chance.random() < 0.8 else choices)
    assert (num_waited > 5) == (grammar.kind != "choice")  # a choice has no equivalent letters


def make_core() -> EngineCore:
    config = EngineConfig(
        model=str(default_model_dir()),
        dtype="float32",
        num_threads=1,
        batch_invariant=True,
        scheduler=SchedulerConfig(max_num_seqs=16),
        cache=CacheConfig(num_blocks=400, block_size=4),
    )
    return EngineCore(config, load_runner(config))


def crowd(tokenizer: Tokenizer) -> list[Request]:
    """All grammars, with various other parameters."""
    end = tokenizer.eos_token_ids[0]
    word = tuple(tokenizer.encode(" is", add_special_tokens=False))
    extras: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "logprobs": 3},
        {"temperature": 2.0, "presence_penalty": 1.0, "repetition_penalty": 1.3},
        {"temperature": 0.8, "bad_token_ids": (word, (word[0], word[0]), (65,))},
        {"temperature": 1.2, "ignore_eos": True},
        {"temperature": 1.5, "top_p": 0.8},
        {"temperature": 0.0, "min_tokens": 9, "logit_bias": {end: 40.0, 70: 4.0, 71: 3.0}},
        {"temperature": 0.5, "bad_token_ids": ((word[0],),), "logit_bias": {word[0]: 40.0}},
        {"temperature": 2.0, "allowed_token_ids": tuple(range(0, 2000, 2))},
    ]
    requests: list[Request] = []
    for number, grammar in enumerate(GRAMMARS):
        for index, extra in enumerate(extras):
            params = SamplingParams(grammar=grammar, seed=index, max_tokens=40, **extra)
            prompt = tokenizer.encode(f"Question {number}: what is the capital of France?")
            requests += fan_out(f"{number}-{index}", prompt, params)
    return requests


Told = tuple[list[int], list[TokenLogprobs]]


def texts(tokenizer: Tokenizer) -> dict[str, Told]:
    core = make_core()
    told: dict[str, Told] = {}
    for request in crowd(tokenizer):
        told[request.id] = [], []
        core.add(request)
    while core.has_work:
        output = core.step()
        assert not output.errors, output.errors
        for id_, tokens in zip(output.ids, output.token_ids, strict=True):
            told[id_][0].extend(tokens)
        for id_, logprobs in output.logprobs.items():
            told[id_][1].extend(logprobs)
    assert core.check() == []
    return told


@pytest.mark.parametrize("always", [False, True], ids=["near ends", "everywhere"])
def test_texts_are_those_of_masks_that_do_not_wait(
    demo_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, always: bool
) -> None:
    if always:  # defer wherever there is text, as if each mask were expensive
        monkeypatch.setattr(llguidance_backend, "_EXPENSIVE_MASK_S", -1.0)
        monkeypatch.setattr(llguidance_backend, "_MIN_LETTERS", 1)
    counted: Counter[str] = Counter()
    settle, waited = MaskLines.write_deferred, LlguidanceMatcher.record_deferral

    def count(self: MaskLines, rows: list, choices: list) -> dict:
        counted["settled"] += len(rows)
        return settle(self, rows, choices)

    def count_vain(self: LlguidanceMatcher, *, wasted: bool) -> None:
        counted["in vain"] += wasted
        waited(self, wasted=wasted)

    monkeypatch.setattr(MaskLines, "write_deferred", count)
    monkeypatch.setattr(LlguidanceMatcher, "record_deferral", count_vain)
    told = texts(demo_tokenizer)
    assert counted["settled"] > (200 if always else 40)
    assert 0 < counted["in vain"] < counted["settled"] / 2
    monkeypatch.setattr(MaskLines, "can_defer", False)
    counted.clear()
    assert texts(demo_tokenizer) == told
    assert not counted


def test_who_waits_in_vain_waits_more_rarely() -> None:
    patience, asked = DeferralPolicy(), []
    for number in range(200):
        if patience.may_defer():
            asked.append(number)
            patience.record_deferral(wasted=True)
    assert asked[:5] == [0, 2, 6, 14, 30]
    assert np.diff(asked).max() == 32
    patience.record_deferral(wasted=False)
    assert patience.may_defer()
