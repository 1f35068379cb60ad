"""Draft heads change no text, and a trained head is mostly right."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import pytest
import torch

from engine.config import SpeculationConfig
from engine.core import EngineCore
from engine.requests import fan_out
from engine.runner import load
from engine.runner import programs as recorded_steps
from engine.runner.graphs import DecodeGraphs, Replay
from engine.runner.prompt_graphs import PromptGraphs
from engine.speculation import load_head
from engine.speculation.draft_length import DraftLengthController
from engine.speculation.draft_model import DraftModel
from engine.speculation.features import Features
from engine.speculation.head_graphs import HeadGraphs
from engine.types import SamplingParams
from kernels.cpu.backend import CpuAttention
from kernels.cpu.linear import is_available
from tests import tiny_draft_heads, tiny_models
from tests.called_again import called_again
from tests.engine.runner.test_speculation import (
    GREEDY,
    PROMPTS,
    SCHEDULES,
    config_of,
    generate,
    requests_of,
)
from tests.engine.speculation.test_draft_head import KINDS, saved

# EAGLE-3's reads more of the model than EAGLE's, and guesses as that does.
HEADS = [
    pytest.param(kind, marks=pytest.mark.slow if kind == "eagle" else ())
    for kind in (*KINDS, "qwen_mtp")
]


class Served(NamedTuple):
    """A model, its speculation config, and its output for ``PROMPTS`` without speculation."""

    model: str
    speculation: SpeculationConfig
    greedy: dict[str, list[int]]


@pytest.fixture(scope="module", params=HEADS)
def served(request, tmp_path_factory) -> Served:
    """A model with a head trained on its greedy texts."""
    kind, directory = request.param, tmp_path_factory.mktemp(request.param)
    if kind == "mtp":
        base = tiny_draft_heads.build_mtp("deepseek_v3")
    else:
        base = tiny_models.build("qwen3_5_text" if kind == "qwen_mtp" else "llama")
    twin = tiny_draft_heads.build(kind, base)
    model, _ = saved(twin, directory)
    greedy, _, _ = generate(config_of(model, None), requests_of(**GREEDY))
    texts = [[*prompt, *greedy[str(index)]] for index, prompt in enumerate(PROMPTS)]
    twin.learn(texts, [len(prompt) for prompt in PROMPTS], steps=120)
    return Served(*saved(twin, directory), greedy)


def first_kept(core: EngineCore) -> float:
    """The share of first drafts that were accepted."""
    drafts = core.stats.drafts
    assert drafts.num_drafts > 8
    return drafts.accepted_per_position[0] / drafts.num_drafts


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_greedy_text_is_the_same_and_foreseen(served, schedule):
    config = config_of(served.model, served.speculation, **SCHEDULES[schedule])
    texts, _, core = generate(config, requests_of(**GREEDY))
    assert texts == served.greedy
    assert first_kept(core) > 0.5
    assert (core.stats.num_preemptions > 0) == (schedule == "preempted")


def test_heads_that_read_at_the_wrong_place_foresee_little(served, monkeypatch):
    """A wrong offset would not pass the bound above."""
    config = config_of(served.model, served.speculation)
    of, init = Features.of, DraftModel.__init__

    def of_the_token_before(self, slots):
        return of(self, (slots - 1).clamp(min=0))

    def beside_its_own_state(self, *args: Any, **options: Any):
        init(self, *args, **options)
        self._lead = 0

    for owner, name, wrong in (
        (Features, "of", of_the_token_before),
        (DraftModel, "__init__", beside_its_own_state),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, wrong)
            texts, _, core = generate(config, requests_of(**GREEDY))
        assert texts == served.greedy
        assert first_kept(core) < 0.4


ASKED: dict[str, dict[str, Any]] = {
    "sampled": {"temperature": 0.8},
    "penalised": {"frequency_penalty": 1.0, "top_p": 0.9, "logit_bias": {7: 3.0}},
    "told": {"logprobs": 3, "prompt_logprobs": 1, "temperature": 0.3},
}


@pytest.mark.parametrize("asked", ASKED)
def test_coupled_drafts_change_no_text_whatever_is_asked_for(served, asked):
    requests = requests_of(**ASKED[asked])
    expected, _, _ = generate(config_of(served.model, None), requests)
    texts, _, core = generate(config_of(served.model, served.speculation), requests)
    assert texts == expected
    assert core.stats.drafts.num_accepted_tokens > 0


def test_rejection_leaves_greedy_text_and_draws_from_what_the_head_said(served):
    speculation = msgspec.structs.replace(served.speculation, draft_sampling="rejection")
    config = config_of(served.model, speculation)
    texts, _, core = generate(config, requests_of(**GREEDY))
    assert texts == served.greedy
    assert first_kept(core) > 0.5
    sampled = requests_of(temperature=0.5)
    crowd, _, core = generate(config, sampled)
    assert core.stats.drafts.num_accepted_tokens > 0
    assert generate(config, sampled[3:4])[0]["3"] == crowd["3"]


@pytest.mark.parametrize("schedule", ["chunks of seven", "preempted", "overlapped"])
def test_a_head_that_is_seldom_asked_has_read_all(served, schedule, monkeypatch):
    """Features of prefixes, forks and preempted sequences are available when a head drafts late."""
    rng = random.Random(3)
    monkeypatch.setattr(
        DraftLengthController, "take_drafts", lambda pace, *_: rng.choice((0, 0, 1, 2))
    )
    requests = requests_of(**GREEDY)
    requests += fan_out(
        "forked", PROMPTS[1], SamplingParams(n=3, temperature=0.0, max_tokens=20, ignore_eos=True)
    )
    core = EngineCore.load(config_of(served.model, served.speculation, **SCHEDULES[schedule]))
    texts: dict[str, list[int]] = {}
    for wave in ("", "again-"):  # the second finds the prefixes of the first
        for request in requests:
            fork_of = request.fork_of and wave + request.fork_of
            core.add(msgspec.structs.replace(request, id=wave + request.id, fork_of=fork_of))
        while core.has_work:
            output = core.step()
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                texts.setdefault(row_id, []).extend(tokens)
    assert core.stats.prefix_cache_hits > 0
    for row_id, text in texts.items():
        name = row_id.removeprefix("again-")
        expected = served.greedy[name if name in served.greedy else "1"]
        assert text == expected[: len(text)]
    assert first_kept(core) > 0.5


@pytest.mark.skipif(not is_available(), reason="no native linear layers here")
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_recorded_steps_leave_a_head_the_same_states(kind, tmp_path, monkeypatch):
    """In bfloat16, bit for bit; for prompt chunks and single tokens, with drafts and without."""
    shape = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
    model = str(tiny_models.save("llama", tmp_path / "model", **shape))
    twin = tiny_draft_heads.build(kind, tiny_models.build("llama", **shape))
    head = str(twin.save(tmp_path / "head"))
    texts, tables, drafts = [], [], []
    monkeypatch.setattr(recorded_steps, "_MIN_OCCURRENCES", 1)
    for enforce_eager in (False, True):
        claims = itertools.cycle((0, 2, 0, 0, 2))
        monkeypatch.setattr(
            DraftLengthController, "take_drafts", lambda *_, claims=claims: next(claims)
        )
        speculation = SpeculationConfig(method="eagle", draft_model=head, adaptive=False)
        config = msgspec.structs.replace(
            config_of(model, speculation, attention_backend="cpu", max_num_batched_tokens=11),
            dtype="bfloat16",
            enforce_eager=enforce_eager,
        )
        told, _, core = generate(config, requests_of(**GREEDY))
        texts.append(told)
        tables.append(core._runner._features._table)
        drafts.append(core.stats.drafts)
        if not enforce_eager:
            programs = core._runner._graphs
            assert not programs._unrecordable
            assert len(programs._programs) > 3
    assert texts[0] == texts[1]
    assert drafts[0] == drafts[1]
    assert drafts[0].num_draft_tokens > 0
    assert torch.equal(tables[0], tables[1])


def test_captured_steps_leave_a_head_what_it_reads(served, monkeypatch):
    """As on a GPU, where steps are padded; here graphs are functions that are called again."""
    replays = []

    def capture(function: Callable[[], Any]) -> tuple[Replay, Any]:
        replay, left = called_again(function)
        return lambda: replays.append(replay()), left

    def captured(*given: Any) -> tuple[DecodeGraphs, PromptGraphs]:
        plan, decoder, cache, rows, _, features, _ = given
        parts = decoder, cache, plan.kernels, plan.attention, rows
        graphs = DecodeGraphs(*parts, 30, capture, features)
        prompts = PromptGraphs(*parts, 30, 64, capture, features)
        with torch.inference_mode():
            while graphs.capture_next() or prompts.capture_next():
                pass
        return graphs, prompts

    config = config_of(served.model, served.speculation, max_num_batched_tokens=24)
    _, _, launched = generate(config, requests_of(**GREEDY))
    monkeypatch.setattr(load, "_graphs", captured)
    monkeypatch.setattr(CpuAttention, "can_replay", lambda *_: True)
    load_prompt = PromptGraphs.load

    def loading(*given: Any) -> Any:
        loaded.append(load_prompt(*given))
        return loaded[-1]

    loaded: list[Any] = []
    monkeypatch.setattr(PromptGraphs, "load", loading)
    texts, _, core = generate(config, requests_of(**GREEDY))
    assert texts == served.greedy
    assert replays
    assert any(loaded)
    assert first_kept(core) > 0.5
    tables = (each._runner._features._table for each in (core, launched))
    torch.testing.assert_close(*tables, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("sampling", ["coupled", "rejection"])
def test_captured_passes_of_a_head_make_the_same_drafts(served, sampling, monkeypatch):
    """Of those that read what the model left, and of those that read the head's own states."""
    speculation = msgspec.structs.replace(served.speculation, draft_sampling=sampling)
    config = config_of(served.model, speculation)
    expected, _, launched = generate(config, requests_of(**GREEDY))
    replays: Counter[str] = Counter()

    def with_graphs(*given: Any, features: Features, **others: Any) -> DraftModel:
        _, cache, kernels, spec, rows = given
        graphs = HeadGraphs(features, cache, kernels, spec, rows, called_again)
        with torch.inference_mode():
            while graphs.capture_next():
                pass
        for name in ("reading", "following"):
            passes = getattr(graphs, name)
            monkeypatch.setattr(passes, "load", _counting(passes.load, replays, name))
        return DraftModel(*given, **{**others, "features": features, "programs": graphs})

    monkeypatch.setattr(load_head, "DraftModel", with_graphs)
    monkeypatch.setattr(CpuAttention, "can_replay", lambda *_: True)
    texts, _, core = generate(config, requests_of(**GREEDY))
    assert texts == expected == served.greedy
    assert core.stats.drafts == launched.stats.drafts
    assert min(replays["reading"], replays["following"]) > 4


def _counting(load: Callable[..., Any], counted: Counter[str], name: str) -> Callable[..., Any]:
    def loading(*given: Any) -> Any:
        counted[name] += 1
        return load(*given)

    return loading
