"""Stateful models: the text equals Hugging Face's under any schedule."""

from __future__ import annotations

import logging

import msgspec
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
from engine.core import EngineCore
from engine.errors import ModelLoadError
from engine.kv_cache import sizing
from engine.models.checkpoint import read_config
from engine.models.layer_state import HybridMemory, LayerState
from engine.pass_budget import PassBudget
from engine.runner import load_runner
from engine.types import Request, SamplingParams
from tests import tiny_models
from tests.engine.handmade import Hand, load, request
from tests.engine.running import texts

MIB = 2**20
KINDS = (
    "qwen3_5_text",
    pytest.param("olmo_hybrid", marks=pytest.mark.slow),  # the rule of qwen3_5_text
    "lfm2_moe",
    pytest.param("granitemoehybrid", marks=pytest.mark.slow),  # the scan of falcon_h1
    "falcon_h1",
    "mamba2",
)
PROMPT = tuple(range(20, 57))
NUM_OUTPUT = 14
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    """(directory, the greedy continuation of the prompt by Hugging Face's generate)."""
    twin = tiny_models.build(request.param)
    directory = tmp_path_factory.mktemp(request.param)
    twin.save_pretrained(directory)
    return directory, tiny_models.greedy_tokens(twin, PROMPT, NUM_OUTPUT)


def make(directory, **changes) -> EngineCore:
    config = EngineConfig(
        model=str(directory),
        num_threads=1,
        **{
            "dtype": "float32",
            "cache": CacheConfig(block_size=4, num_blocks=64),
            "scheduler": SchedulerConfig(max_num_seqs=4),
            **changes,
        },
    )
    return EngineCore(config, load_runner(config))


def cached(core: EngineCore, *requests: Request) -> dict[str, int]:
    """The number of cached tokens of each prompt."""
    found: dict[str, int] = {}
    for each in requests:
        core.add(each)
    while core.has_work:
        found |= core.step().num_cached_tokens
    return found


def test_a_prompt_that_comes_again_begins_with_a_snapshot(model):
    directory, expected = model
    core = make(directory)
    assert cached(core, request("first", PROMPT, GREEDY)) == {"first": 0}
    assert cached(core, request("again", PROMPT, GREEDY)) == {"again": 36}
    assert texts(core, request("once more", PROMPT, GREEDY))["once more"] == expected
    # A conversation that continues: the answer is computed, the earlier prompt is cached.
    longer = (*PROMPT, *expected, 9, 9, 9)
    assert cached(core, request("longer", longer, GREEDY)) == {"longer": 36}
    found = texts(core, request("longest", longer, GREEDY))["longest"]
    assert found == texts(make(directory), request("fresh", longer, GREEDY))["fresh"]
    stats = core.stats
    assert stats.prefix_cache_hits == 36 * 3 + 52
    core.sleep(1)
    core.wake()
    assert cached(core, request("after", PROMPT, GREEDY)) == {"after": 0}


def test_what_prompts_begin_with_alike_is_found_by_the_third(model):
    directory, _ = model
    core = make(directory)
    prompts = [(*PROMPT[:26], *range(100 + 9 * i, 109 + 9 * i)) for i in range(3)]
    requests = [request(f"{i}", prompt, GREEDY) for i, prompt in enumerate(prompts)]
    assert [cached(core, each)[each.id] for each in requests] == [0, 0, 24]
    for i, prompt in enumerate(prompts):
        again, fresh = (
            texts(each, request("a", prompt, GREEDY)) for each in (core, make(directory))
        )
        assert again == fresh, i


def test_choices_begin_with_the_state_of_their_prompt(model):
    directory, expected = model
    core = make(directory)
    choices = [
        Request(id=f"{i}", prompt_token_ids=PROMPT, sampling=GREEDY, fork_of="0" if i else None)
        for i in range(3)
    ]
    assert cached(core, *choices) == {"0": 0, "1": 36, "2": 36}
    found = texts(make(directory), *choices)
    assert found == {"0": expected, "1": expected, "2": expected}


def test_nothing_is_found_where_prefixes_are_not_kept(model):
    directory, expected = model
    cache = CacheConfig(block_size=4, num_blocks=64, enable_prefix_caching=False)
    core = make(directory, cache=cache)
    assert core.info.memory.num_snapshots == 0
    for name in ("first", "again"):
        assert texts(core, request(name, PROMPT, GREEDY))[name] == expected
    assert core.stats.prefix_cache_hits == 0


def test_choices_of_one_prompt_have_states_of_their_own(model):
    directory, expected = model
    sampled = SamplingParams(temperature=1.0, max_tokens=NUM_OUTPUT, ignore_eos=True)

    def choice(index: int, fork_of: str | None = None) -> Request:
        sampling = msgspec.structs.replace(sampled, seed=index)
        return Request(id=f"{index}", prompt_token_ids=PROMPT, sampling=sampling, fork_of=fork_of)

    alone = {f"{index}": texts(make(directory), choice(index))[f"{index}"] for index in range(3)}
    greedy = Request(id="greedy", prompt_token_ids=PROMPT, sampling=GREEDY, fork_of="0")
    together = texts(make(directory), choice(0), choice(1, "0"), choice(2, "0"), greedy)
    assert together == {**alone, "greedy": expected}


def test_a_text_goes_on_after_its_engine_has_died(model):
    directory, expected = model
    resumed = Request(
        id="a", prompt_token_ids=PROMPT, sampling=GREEDY, resumed_token_ids=tuple(expected[:5])
    )
    assert texts(make(directory), resumed)["a"] == expected[5:]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_step_that_fails_is_run_again_from_the_first_token(model, monkeypatch, caplog, overlap):
    """The fault comes after the layers, which have changed the states by then.

    For prompt and decode steps, with more preceding tokens than fit a step.
    """
    caplog.set_level(logging.CRITICAL)
    directory, expected = model
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, overlap=overlap)
    core = make(directory, scheduler=scheduler, enforce_eager=True)
    decoder, calls = core._runner._model, iter(range(10_000))
    forward = decoder.forward

    def failing(*arguments):
        hidden = forward(*arguments)
        if next(calls) in (1, 6, 15):
            raise RuntimeError("a passing fault")
        return hidden

    monkeypatch.setattr(decoder, "forward", failing)
    other = Request(id="b", prompt_token_ids=PROMPT[3:], sampling=GREEDY)
    alone = texts(make(directory), other)["b"]
    assert texts(core, request("a", PROMPT, GREEDY), other) == {"a": expected, "b": alone}
    assert next(calls) > 20


class _Always(PassBudget):
    """Always makes the maximum number of passes."""

    def max_passes(self, num_rows: int) -> int:
        return self._max_passes


def _in_passes(directory) -> EngineCore:
    core = make(directory, scheduler=SchedulerConfig(max_num_seqs=4, max_step_passes=8))
    core._pass_budget = _Always(8)
    return core


def test_several_passes_of_a_step_tell_what_as_many_steps_do(model):
    directory, expected = model
    other = Request(id="b", prompt_token_ids=PROMPT[5:], sampling=GREEDY)
    alone = texts(make(directory), other)["b"]
    core = _in_passes(directory)
    assert texts(core, request("a", PROMPT, GREEDY), other) == {"a": expected, "b": alone}
    assert core.stats.num_steps < NUM_OUTPUT


def test_a_row_that_breaks_in_a_later_pass_fails_at_once(tmp_path):
    """Its state is past that pass, so another step would not reveal the fault."""
    directory = tiny_models.save("qwen3_5_text", tmp_path)
    other = Request(id="b", prompt_token_ids=PROMPT[5:], sampling=GREEDY)
    both = texts(make(directory), request("a", PROMPT, GREEDY), other)
    expected, alone = both["a"], both["b"]
    poison = next(token for token in expected[2:] if token not in {*PROMPT, *alone})
    core = _in_passes(directory)
    with torch.inference_mode():
        core._runner._model._modules.embed.keywords["weight"][poison] = float("nan")
    for each in (request("a", PROMPT, GREEDY), other):
        core.add(each)
    found: dict[str, list[int]] = {"a": [], "b": []}
    errors: set[str] = set()
    while core.has_work:
        output = core.step()
        errors |= output.errors.keys()
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            found[row_id].extend(tokens)
    assert errors == {"a"}
    assert found["b"] == alone
    assert found["a"] == expected[: len(found["a"])]
    assert len(found["a"]) <= expected.index(poison) + 1


def test_a_row_begins_with_no_state_whatever_lies_there(model):
    directory, expected = model
    runner = load(directory)
    for layer in runner._cache.layers:
        state = layer.state if isinstance(layer, HybridMemory) else layer
        for tensor in state.tensors() if isinstance(state, LayerState) else ():
            tensor.fill_(float("nan"))
    hand = Hand(runner)
    hand.add(request("a", PROMPT))
    assert hand.decode("a", NUM_OUTPUT) == expected


@pytest.mark.parametrize("level", [1, 2])
def test_it_sleeps_and_wakes(model, level):
    directory, expected = model
    core = make(directory)
    assert texts(core, request("a", PROMPT, GREEDY))["a"] == expected
    core.sleep(level)
    core.wake()
    assert texts(core, request("b", PROMPT, GREEDY))["b"] == expected


@pytest.mark.parametrize(
    ("changes", "most"), [({"dtype": "bfloat16"}, 0.1), ({"quantization": "int8"}, 0.15)]
)
def test_rounded_weights_are_near(model, changes, most):
    directory, _ = model
    twin = load(directory)
    logits = [_logits(runner) for runner in (twin, load(directory, **changes))]
    assert (logits[1] - logits[0]).norm() / logits[0].norm() < most


def _logits(runner) -> torch.Tensor:
    """The logits of the prompt's tokens."""
    decoder, hidden = runner._model, []
    forward = decoder.forward
    decoder.forward = lambda *arguments: hidden.append(forward(*arguments)) or hidden[-1]
    hand = Hand(runner)
    hand.add(request("a", PROMPT, SamplingParams(prompt_logprobs=0)))
    hand.step({"a": len(PROMPT)})
    with torch.inference_mode():
        return decoder.logits(torch.cat(hidden))


def test_random_weights_serve(model):
    directory, _ = model
    core = make(directory, load_format="dummy")
    assert len(texts(core, request("a", PROMPT, GREEDY))["a"]) == NUM_OUTPUT


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"speculation": SpeculationConfig(method="ngram"), "tensor_parallel_size": 2},
            "speculation 'ngram'",
        ),
        ({"cache": CacheConfig(offload_bytes=MIB)}, "kv_offload_bytes"),
    ],
)
def test_what_a_state_does_not_bear_is_refused(tmp_path, changes, named):
    directory = tiny_models.save("lfm2", tmp_path)
    with pytest.raises(ModelLoadError, match=f"{named}: lfm2 models keep a state"):
        make(directory, **changes)


def test_no_model_with_states_drafts(tmp_path):
    directory = tiny_models.save("lfm2", tmp_path / "draft")
    speculation = SpeculationConfig(method="draft", draft_model=str(directory))
    with pytest.raises(
        ModelLoadError,
        match="is a lfm2 model, which keeps a state of each sequence",
    ):
        make(tiny_models.save("llama", tmp_path / "model"), speculation=speculation)


def _plan(spec, free_bytes: int, monkeypatch, *, num_drafts: int = 0, device="cpu", **changes):
    monkeypatch.setattr(sizing, "available_bytes", lambda _device: free_bytes)
    return sizing.plan_memory(
        spec,
        CacheConfig(**changes),
        SchedulerConfig(max_num_seqs=8),
        block_size=16,
        max_model_len=None,
        dtype=torch.float32,
        device=torch.device(device),
        weights_bytes=MIB,
        num_drafts=num_drafts,
    )


def test_as_many_sequences_run_as_there_is_room_for_states(tmp_path, monkeypatch):
    spec = read_config(str(tiny_models.save("qwen3_5_text", tmp_path))).spec
    each = spec.state_bytes(4)
    assert each == 2 * 4 * (3 * (2 * 2 * 8 + 4 * 12) + 4 * 8 * 12)
    roomy = _plan(spec, 1024 * MIB, monkeypatch)
    assert roomy.num_states == 8
    assert "states of 8 sequences" in roomy.describe()
    # Only attention layers have blocks.
    assert roomy.bytes_per_token == 2 * 1 * 2 * 16 * 4
    tight = _plan(spec, 20 * each, monkeypatch)
    assert tight.num_states == 4  # a quarter of the free memory, plus a line for padding
    assert (tight.num_snapshots, tight.state_bytes) == (1, 6 * each)
    assert roomy.num_snapshots == 1024
    assert _plan(spec, 1024 * MIB, monkeypatch, enable_prefix_caching=False).num_snapshots == 0
    with pytest.raises(ModelLoadError, match="no memory for states"):
        _plan(spec, 7 * each, monkeypatch)


def test_what_drafts_feed_is_planned_for(tmp_path, monkeypatch):
    spec = read_config(str(tiny_models.save("qwen3_5_text", tmp_path))).spec
    assert spec.trial_bytes(4) == 2 * 4 * (2 * 2 * 8 + 4 * 12 + 4 * 12 + 2 * 4)
    without, drafting = (_plan(spec, 1024 * MIB, monkeypatch, num_drafts=count) for count in (0, 3))
    assert without.trial_bytes == 0
    assert "drafts on trial" not in without.describe()
    assert drafting.trial_bytes == 8 * 4 * spec.trial_bytes(4)
    assert "draft states" in drafting.describe()
    assert without.free_bytes - drafting.free_bytes == drafting.trial_bytes
    on_gpu = _plan(spec, 1024 * MIB, monkeypatch, num_drafts=3, device="cuda", num_blocks=8)
    assert on_gpu.trial_bytes == (8 * 4 + 8) * spec.trial_bytes(4), "and those of captured steps"
