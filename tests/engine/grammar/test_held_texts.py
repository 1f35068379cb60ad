"""Constrained texts are the same under any schedule: overlapped, preempted, resumed, batched."""

from __future__ import annotations

import json
from collections.abc import Sequence

import jsonschema
import numpy as np
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.grammar.backend import GrammarFailed
from engine.grammar.compiler import GrammarCompiler
from engine.paths import default_model_dir
from engine.requests import fan_out
from engine.runner import load_runner
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar, Request, SamplingParams

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"enum": [1, 22, 333]}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def make_core(overlap: bool = False, num_blocks: int = 256, grammars=None) -> EngineCore:
    config = EngineConfig(
        model=str(default_model_dir()),
        dtype="float32",
        num_threads=1,
        scheduler=SchedulerConfig(max_num_seqs=16, overlap=overlap),
        cache=CacheConfig(num_blocks=num_blocks, block_size=4),
    )
    return EngineCore(config, load_runner(config), grammars=grammars)


def crowd(tokenizer: Tokenizer) -> list[Request]:
    """Requests with and without a grammar, greedy and sampled, forked and not."""
    grammar = Grammar("json_schema", json.dumps(PERSON))
    words = SamplingParams(temperature=0.0, max_tokens=24)
    bad = tuple(tokenizer.encode(" is", add_special_tokens=False))
    each = [
        SamplingParams(temperature=0.0, grammar=grammar, max_tokens=48),
        words,
        SamplingParams(temperature=1.5, seed=3, n=3, grammar=grammar, max_tokens=48),
        SamplingParams(temperature=1.0, seed=4, max_tokens=24),
        SamplingParams(temperature=0.0, max_tokens=24, bad_token_ids=(bad, (bad[0], bad[0]))),
        SamplingParams(temperature=1.0, seed=5, grammar=Grammar("regex", "[a-z]{3}( [a-z]{3})*")),
    ]
    requests: list[Request] = []
    for index, sampling in enumerate(each):
        prompt = tokenizer.encode(f"Question {index}: what is the capital of France?")
        if sampling.max_tokens is None:
            sampling = SamplingParams(
                temperature=1.0, seed=5, grammar=sampling.grammar, max_tokens=20
            )
        requests += fan_out(f"r{index}", prompt, sampling)
    return requests


def texts(core: EngineCore, requests: Sequence[Request]) -> dict[str, tuple[int, ...]]:
    told: dict[str, list[int]] = {r.id: list(r.resumed_token_ids) for r in requests}
    for request in requests:
        core.add(request)
    while core.has_work:
        output = core.step()
        assert not output.errors, output.errors
        for id_, tokens in zip(output.ids, output.token_ids, strict=True):
            told[id_] += tokens
    assert core.check() == []
    return {id_: tuple(tokens) for id_, tokens in told.items()}


@pytest.fixture(scope="module")
def expected(demo_tokenizer: Tokenizer) -> dict[str, tuple[int, ...]]:
    core, told = make_core(), {}
    for request in crowd(demo_tokenizer):
        told |= texts(core, [request])
    for id_ in ("r0", "r2", "r2/1", "r2/2"):
        jsonschema.validate(json.loads(demo_tokenizer.decode(told[id_])), PERSON)
    return told


@pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
@pytest.mark.parametrize("num_blocks", [256, 20], ids=["roomy", "tight"])
def test_a_crowd_changes_no_text(
    demo_tokenizer: Tokenizer, expected: dict, overlap: bool, num_blocks: int
):
    core = make_core(overlap, num_blocks)
    assert texts(core, crowd(demo_tokenizer)) == expected
    assert bool(core.stats.num_preemptions) == (num_blocks == 20)


def test_a_resumed_text_goes_on_as_it_was(demo_tokenizer: Tokenizer, expected: dict):
    """As after a crash of the engine: the output so far comes with the request."""
    import msgspec

    core = make_core(overlap=True)
    resumed = [
        msgspec.structs.replace(
            request,
            fork_of=None,
            resumed_token_ids=expected[request.id][: 1 + index * 2],
        )
        for index, request in enumerate(crowd(demo_tokenizer))
        if len(expected[request.id]) > 1 + index * 2
    ]
    assert len(resumed) >= 5
    told = texts(core, resumed)
    assert told == {request.id: expected[request.id] for request in resumed}


class _Tiring:
    """A grammar that allows everything, and fails after three tokens."""

    num_bytes = 1
    batch_matcher = None

    def __init__(self) -> None:
        self._count = 0

    def compile(self, grammar: Grammar) -> _Tiring:
        return self

    def matcher(self) -> _Tiring:
        return _Tiring()

    def accept(self, token_ids: Sequence[int]) -> None:
        self._count += len(token_ids)

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = -1
        if self._count >= 3:
            raise GrammarFailed("it takes too long")


@pytest.mark.parametrize("overlap", [False, True], ids=["stepwise", "overlapped"])
def test_a_grammar_that_fails_ends_its_own_request_alone(
    demo_tokenizer: Tokenizer, expected: dict, overlap: bool
):
    core = make_core(overlap, grammars=GrammarCompiler(_Tiring))
    requests = [r for r in crowd(demo_tokenizer) if r.id in ("r0", "r1", "r3", "r4")]
    told: dict[str, list[int]] = {request.id: [] for request in requests}
    errors = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        output = core.step()
        errors |= output.errors
        for id_, tokens in zip(output.ids, output.token_ids, strict=True):
            told[id_] += tokens
    assert list(errors) == ["r0"]
    assert errors["r0"].code == "grammar_timeout"
    assert len(told.pop("r0")) == 3
    assert all(tuple(tokens) == expected[id_] for id_, tokens in told.items())
    assert core.check() == []
