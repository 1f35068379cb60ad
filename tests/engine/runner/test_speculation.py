"""Speculation changes no text, whichever drafter and parameters are used."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.paths import default_model_dir, embedded_draft_dir
from engine.requests import fan_out
from engine.runner.programs import DecodePrograms
from engine.speculation.draft_length import DraftLengthController
from engine.text.tokenizer import Tokenizer
from engine.types import EngineOutput, Grammar, Request, SamplingParams
from kernels.cpu.linear import is_available
from tests import tiny_models
from tests.engine.running import prompts_that_share

NUM_OUTPUT = 24
PROMPTS = prompts_that_share(seed=7)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """Another family, which does not predict the first one's text."""
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


def test_a_fork_that_comes_late_is_drafted_for_as_well(tiny, other):
    """The block that it copies also holds what the draft model has read of its leader's text."""
    sampling = SamplingParams(seed=3, max_tokens=30, ignore_eos=True)
    short = msgspec.structs.replace(sampling, max_tokens=6)
    leader, fork = fan_out("two", (5, 6, 7), msgspec.structs.replace(sampling, n=2))
    requests = [leader, *fan_out("short", (8, 9), short), fork]
    speculation = speculation_of("itself", tiny, other)
    texts, _, core = generate(config_of(tiny, speculation, max_num_seqs=2, overlap=True), requests)
    assert texts == generate(config_of(tiny, None), requests)[0]
    stats = core.stats.drafts
    assert stats.num_accepted_tokens == stats.num_draft_tokens > 0


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
    """For each seed; a draft model that draws with the same noise is nearly always right."""
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


SCHEMA = """{"type": "object", "properties": {"name": {"type": "string", "maxLength": 12},
"ages": {"type": "array", "items": {"type": "integer"}, "maxItems": 3}}, "required":
["name", "ages"], "additionalProperties": false}"""
HELD = [
    Grammar(kind="json_schema", text=SCHEMA),
    Grammar(kind="regex", text="(yes|no|maybe)( and (yes|no))*[.]"),
    Grammar(kind="choice", text='["a long way to go", "a long way to run", "no"]'),
]


@pytest.mark.parametrize("name", ["ngram", "itself"])
def test_texts_held_to_a_grammar_are_the_same(name):
    """Their masks are computed after drafts, and rolled back."""
    demo = str(default_model_dir())
    requests = [
        Request(
            id=f"{index}/{temperature}",
            prompt_token_ids=tuple(range(300, 310 + index)),
            sampling=SamplingParams(
                grammar=grammar, temperature=temperature, seed=index, max_tokens=40
            ),
        )
        for index, grammar in enumerate(HELD)
        for temperature in (0.0, 1.0)
    ]
    expected, _, _ = generate(config_of(demo, None), requests)
    config = config_of(demo, speculation_of(name, demo, demo))
    texts, _, core = generate(config, requests)
    assert texts == expected
    assert core.stats.drafts.num_accepted_tokens > 0


def test_rejection_keeps_a_models_own_drafts_and_greedy_text(tiny, other):
    """If the draft is the model itself, every draft is accepted: q over p is 1."""
    drawn = speculation_of("itself", tiny, other, draft_sampling="rejection")
    _, _, core = generate(config_of(tiny, drawn), requests_of(top_p=0.9))
    stats = core.stats.drafts
    assert stats.num_accepted_tokens > 0.99 * stats.num_draft_tokens > 0
    expected, _, _ = generate(config_of(tiny, None), requests_of(**GREEDY))
    other_drafts = speculation_of("another model", tiny, other, draft_sampling="rejection")
    assert generate(config_of(tiny, other_drafts), requests_of(**GREEDY))[0] == expected


def test_rejection_gives_the_same_text_alone_and_in_a_crowd(tiny, other):
    """The draw depends on seed, position and draft, and on no other row."""
    drawn = speculation_of("another model", tiny, other, draft_sampling="rejection")
    requests = requests_of(top_k=30)
    crowd, _, _ = generate(config_of(tiny, drawn), requests)
    alone, _, _ = generate(config_of(tiny, drawn), requests[1:2])
    assert alone["1"] == crowd["1"]


@pytest.mark.parametrize(
    ("draft", "told"),
    [(None, "needs draft_model"), ("fewer tokens", "has 64 tokens"), ("missing", "no such model")],
)
def test_a_draft_that_does_not_fit_is_refused(tiny, tmp_path, draft, told):
    directory = None
    if draft == "missing":
        directory = str(tmp_path / "nothing")
    elif draft is not None:
        model = tiny_models.build("llama")
        model.resize_token_embeddings(64)
        model.save_pretrained(tmp_path)
        directory = str(tmp_path)
    speculation = SpeculationConfig(method="draft", draft_model=directory)
    with pytest.raises(ModelLoadError, match=told):
        EngineCore.load(config_of(tiny, speculation))


@pytest.mark.skipif(not is_available(), reason="no native linear layers here")
@pytest.mark.parametrize("how", [{}, {"logit_bias": {7: 2.0}}], ids=["plain", "biased"])
def test_a_recorded_draft_model_guesses_as_well(monkeypatch, how):
    """The embedded model and its draft in bfloat16, with captured steps.

    Drafts are as good as from ordinary steps, and the text is the same as without drafts.
    """
    used = []
    of_size = DecodePrograms.of_size

    def counted(self, size):
        found = of_size(self, size)
        used.append((self._enable_feedback, found is not None))
        return found

    monkeypatch.setattr(DecodePrograms, "of_size", counted)
    tokenizer = Tokenizer.from_dir(default_model_dir())
    prompts = ["The capital of France is", "One, two, three", "Question: what is 3 + 4?\nAnswer:"]
    requests = [
        Request(
            id=str(index),
            prompt_token_ids=tuple(tokenizer.encode(text)),
            sampling=SamplingParams(
                max_tokens=40, ignore_eos=True, seed=5, temperature=0.7 * (index % 2), **how
            ),
        )
        for index, text in enumerate(prompts * 2)
    ]
    speculation = SpeculationConfig(
        method="draft", draft_model=str(embedded_draft_dir()), adaptive=False
    )
    texts, kept = [], []
    for options in ({"speculation": None}, {}, {"enforce_eager": True}):
        config = EngineConfig(
            **{
                "model": str(default_model_dir()),
                "dtype": "bfloat16",
                "num_threads": 1,
                "speculation": speculation,
                "cache": CacheConfig(num_blocks=256, block_size=16),
                **options,
            }
        )
        told, _, core = generate(config, requests)
        texts.append(told)
        kept.append(core.stats.drafts.num_accepted_tokens)
    assert texts[0] == texts[1] == texts[2]
    assert (False, True) in used  # a step of the draft model was captured
    assert (False, False) not in used
    assert kept[0] == 0
    assert kept[1] == pytest.approx(kept[2], rel=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_draft_model_that_is_seldom_asked_has_read_all(tiny, other, schedule, monkeypatch):
    """The model as its own draft is always right, so each draft shows whether it has read the text.

    This covers prompts, cached prefixes in which it never drafted, forks, and preempted sequences.
    """
    rng = random.Random(3)
    monkeypatch.setattr(
        DraftLengthController, "take_drafts", lambda pace, *_: rng.choice((0, 0, 0, 1, 3))
    )
    requests = requests_of(**GREEDY)
    forks = SamplingParams(n=3, temperature=0.0, max_tokens=9, ignore_eos=True)
    requests += fan_out("forked", PROMPTS[1], forks)
    again = [
        msgspec.structs.replace(
            request,
            id=f"again-{request.id}",
            prompt_token_ids=(*request.prompt_token_ids, 9),
            fork_of=request.fork_of and f"again-{request.fork_of}",
        )
        for request in requests
    ]
    expected, _, _ = generate(config_of(tiny, None), [*requests, *again])
    config = config_of(tiny, speculation_of("itself", tiny, other), **SCHEDULES[schedule])
    core = EngineCore.load(config)
    texts: dict[str, list[int]] = {}
    for wave in (requests, again):  # the second finds the prefixes of the first
        for request in wave:
            core.add(request)
        while core.has_work:
            output = core.step()
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                texts.setdefault(row_id, []).extend(tokens)
    assert texts == expected
    drafts = core.stats.drafts
    assert drafts.num_accepted_tokens == drafts.num_draft_tokens > 10


@pytest.mark.skipif(not is_available(), reason="no native linear layers here")
@pytest.mark.parametrize("num_blocks", [512, 48], ids=["plenty", "preempted"])
def test_recorded_guesses_of_a_model_for_itself_are_right(num_blocks, monkeypatch):
    """Rows that are seldom drafted for, in changing batches, with prompts of any length.

    Unread text is read by programs, by chunks, and by the first pass of a chain.
    """
    rng = random.Random(8)
    monkeypatch.setattr(
        DraftLengthController, "take_drafts", lambda pace, *_: rng.choice((0, 0, 0, 0, 1, 2, 4))
    )
    demo = str(default_model_dir())
    requests = [
        Request(
            id=f"{length}",
            prompt_token_ids=tuple(rng.randrange(300, 3000) for _ in range(length)),
            sampling=SamplingParams(
                max_tokens=60, ignore_eos=True, seed=length, temperature=length % 2 * 0.8
            ),
        )
        for length in (1, 2, 17, 33, 60, 300)
    ]
    texts = []
    for speculation in (None, SpeculationConfig(method="draft", draft_model=demo, adaptive=False)):
        config = EngineConfig(
            model=demo,
            dtype="bfloat16",
            num_threads=1,
            cache=CacheConfig(num_blocks=num_blocks, block_size=8),
            speculation=speculation,
        )
        told, _, core = generate(config, requests)
        texts.append(told)
    assert texts[0] == texts[1]
    assert (core.stats.num_preemptions > 0) == (num_blocks < 100)
    drafts = core.stats.drafts
    # Prompts go through other kernels than single tokens: a tie may be decided differently.
    assert drafts.num_accepted_tokens > 0.97 * drafts.num_draft_tokens > 30
