"""Drafts for stateful models: a rejected draft must leave no trace in the state."""

from __future__ import annotations

import logging
import random
from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.models.trial import Trial
from engine.pass_budget import PassBudget
from engine.runner import load_runner, programs, trials
from engine.runner.graphs import DecodeGraphs
from engine.runner.programs import DecodePrograms
from engine.speculation.proposer import Drafter
from engine.speculation.speculator import Speculator
from engine.types import Request, SamplingParams
from kernels.cpu.backend import CpuAttention
from kernels.cpu.native import build
from tests import tiny_models
from tests.called_again import called_again
from tests.engine.replays import count_draft_replays
from tests.engine.running import Guesser, prompts_that_share, texts

KINDS = (
    "qwen3_5_text",
    pytest.param("olmo_hybrid", marks=pytest.mark.slow),  # the rule of qwen3_5_text
    "lfm2_moe",
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),  # the scan of falcon_h1
    "falcon_h1",
    "jamba",
    "kimi_linear",
)
NUM_OUTPUT = 24
PROMPTS = prompts_that_share(seed=5)


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory) -> str:
    return str(tiny_models.save(request.param, tmp_path_factory.mktemp(request.param)))


@dataclass
class Oracle:
    """A proposer that knows the texts and is occasionally wrong."""

    texts: dict[str, list[int]]
    rng: random.Random = field(default_factory=lambda: random.Random(2))

    def begin(self, request: Request) -> Drafter:
        text = [*request.prompt_token_ids, *self.texts[request.id]]
        return Guesser(text, self.rng, wrong=range(3, 160), right=0.7)

    def finish(self, request: Request, token_ids: list[int]) -> None:
        pass


def make(directory: str, proposer: Oracle | None = None, **changes: Any) -> EngineCore:
    cache = {"block_size": 4, "num_blocks": 128}
    cache |= {key: changes.pop(key) for key in tuple(cache) if key in changes}
    own = ("attention_backend", "speculation", "enforce_eager", "dtype", "max_model_len")
    given = {key: changes.pop(key) for key in own if key in changes}
    speculation = SpeculationConfig(method="ngram", min_ngram=1, adaptive=False)
    if proposer is not None:
        given["speculation"] = speculation
    config = EngineConfig(
        model=directory,
        num_threads=1,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(**{"max_num_seqs": 4, **changes}),
        **{"dtype": "float32", **given},
    )
    speculator = None if proposer is None else Speculator(speculation, proposer)
    return EngineCore(config, load_runner(config), speculator=speculator)


def requests_of(**sampling: Any) -> list[Request]:
    params = {"temperature": 0.0, "max_tokens": NUM_OUTPUT, "ignore_eos": True, **sampling}
    return [
        Request(
            id=f"{index}",
            prompt_token_ids=tuple(prompt),
            sampling=SamplingParams(**{"seed": index, **params}),
        )
        for index, prompt in enumerate(PROMPTS)
    ]


GREEDY: dict[str, Any] = {}
SEEDED: dict[str, Any] = {"temperature": 1.0}


@pytest.fixture(scope="module")
def told(model) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
    """The output without drafts: greedy, and seeded."""
    greedy, seeded = (texts(make(model), *requests_of(**way)) for way in (GREEDY, SEEDED))
    return greedy, seeded


SCHEDULES: dict[str, dict[str, Any]] = {
    "plenty": {},
    "chunks of seven": {"max_num_batched_tokens": 7},
    "few at once": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 30},
    "overlapped": {"overlap": True},
    "in passes": {"max_step_passes": 4},
    "plain torch": {"attention_backend": "reference"},
    "not recorded": {"enforce_eager": True},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_texts_are_those_without_drafts(model, told, schedule, monkeypatch):
    """Seeded, then greedy, and again from snapshots taken between drafts."""
    monkeypatch.setattr(PassBudget, "max_passes", lambda pace, _rows: pace._max_passes)
    greedy, seeded = told
    core = make(model, oracle := Oracle(seeded), **SCHEDULES[schedule])
    assert texts(core, *requests_of(**SEEDED)) == seeded
    oracle.texts = greedy
    for _ in range(2):
        assert texts(core, *requests_of(**GREEDY)) == greedy
    stats = core.stats
    assert 0 < stats.drafts.num_accepted_tokens < stats.drafts.num_draft_tokens
    assert (stats.num_preemptions > 0) == (schedule == "preempted")
    assert stats.prefix_cache_hits > 0 or schedule == "preempted"  # when blocks are scarce


def test_steps_with_drafts_are_recorded(model, monkeypatch):
    """In bfloat16, with native products: the text is still that of steps without drafts."""
    found: list[bool] = []
    find = DecodePrograms.find

    def watched(self, batch, *, has_drafts=False, adapted=False):
        graph = find(self, batch, has_drafts=has_drafts, adapted=adapted)
        if has_drafts:
            found.append(graph is not None and graph.trial is not None)
        return graph

    monkeypatch.setattr(DecodePrograms, "find", watched)
    # Of a batch size, before it is captured.
    monkeypatch.setattr(programs, "_MIN_OCCURRENCES", 2)
    requests = requests_of(max_tokens=40)
    expected = texts(make(model, dtype="bfloat16"), *requests)
    assert texts(make(model, Oracle(expected), dtype="bfloat16"), *requests) == expected
    assert sum(found) > 10
    assert sum(found) < len(found)  # rare batch sizes are not captured


@pytest.mark.skipif(build.load() is None, reason="no native kernels here")
@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_drafts_are_captured(model, told, overlap, monkeypatch):
    """A function that is called again stands for a graph, and its batches are padded."""
    monkeypatch.setattr(
        CpuAttention, "can_replay", lambda _, bounds, batch, spec: batch.num_rows <= bounds.num_rows
    )
    greedy, seeded = told
    core = make(model, oracle := Oracle(seeded), overlap=overlap, attention_backend="cpu")
    runner = core._runner
    parts = runner._model, runner._cache, runner._kernels, runner._builder._spec, runner._rows
    runner._graphs = graphs = DecodeGraphs(*parts, 24, called_again, num_drafts=8)
    while runner.prepare():
        pass
    replays = count_draft_replays(graphs)
    assert texts(core, *requests_of(**SEEDED)) == seeded
    oracle.texts = greedy
    assert texts(core, *requests_of(**GREEDY)) == greedy
    assert 0 < core.stats.drafts.num_accepted_tokens < core.stats.drafts.num_draft_tokens
    assert sum(replays) > 10, "all but those with prompts beside them"


def one_draft_is_lost(patch: pytest.MonkeyPatch) -> None:
    settle = trials.StepTrial.settle

    def short(self, num_accepted):
        settle(self, (num_accepted - 1).clamp(min=0))

    patch.setattr(trials.StepTrial, "settle", short)


def none_is_fed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Trial, "commit", lambda self, rows: None)


def drafts_are_fed_in_earnest(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        trials._HostRows, "on_trial", lambda self: (self.slots, self.query_start, self.starts)
    )


@pytest.mark.parametrize("plant", [one_draft_is_lost, none_is_fed, drafts_are_fed_in_earnest])
def test_a_planted_bug_is_noticed(model, told, plant, monkeypatch):
    plant(monkeypatch)
    assert texts(make(model, Oracle(told[0])), *requests_of()) != told[0]


@pytest.mark.parametrize("draft", ["ngram", "suffix", "draft"])
def test_who_guesses_changes_no_text(model, told, draft, tmp_path):
    small = tiny_models.save("llama", tmp_path) if draft == "draft" else None
    speculation = SpeculationConfig(
        method=draft, draft_model=small and str(small), min_ngram=1, adaptive=False
    )
    core = make(model, speculation=speculation, max_model_len=128)
    assert texts(core, *requests_of()) == told[0]
    assert core.stats.drafts.num_draft_tokens > 0


def test_a_text_goes_on_after_its_engine_has_died(model, told):
    first, expected = requests_of()[0], told[0]
    resumed = Request(
        id=first.id,
        prompt_token_ids=first.prompt_token_ids,
        sampling=first.sampling,
        resumed_token_ids=tuple(expected[first.id][:5]),
    )
    rest = texts(make(model, Oracle(expected)), resumed)
    assert rest == {first.id: expected[first.id][5:]}


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_with_drafts_that_fails_is_run_again(model, told, overlap, monkeypatch, caplog):
    """After its drafts have been computed, or before."""
    caplog.set_level(logging.CRITICAL)
    requests, expected = requests_of(), told[0]
    core, calls = make(model, Oracle(expected), overlap=overlap), iter(range(10_000))
    settle = Trial.commit

    def failing(self, rows):
        call = next(calls)
        if call == 3:
            raise RuntimeError("a passing fault")
        settle(self, rows)
        if call == 9:
            raise RuntimeError("another")

    monkeypatch.setattr(Trial, "commit", failing)
    assert texts(core, *requests) == expected
    assert next(calls) > 12
