"""Steps of several passes of a real model have the same output as single-pass steps."""

from __future__ import annotations

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.pass_budget import PassBudget
from engine.runner import load_runner
from engine.types import Request, SamplingParams
from kernels.cpu import linear
from tests import tiny_models

_SHAPE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}
_recorded = pytest.mark.skipif(not linear.is_available(), reason="no native linear layers here")


class _Always(PassBudget):
    """Always makes the maximum number of passes."""

    def max_passes(self, num_rows: int) -> int:
        return self._max_passes


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tiny_models.save("llama", tmp_path_factory.mktemp("llama"), **_SHAPE))


@pytest.fixture(params=["float32", pytest.param("bfloat16", marks=_recorded)])
def make(request, directory):
    """Creates an engine with this many passes per step; in bfloat16 its steps are captured."""

    def make(passes: int) -> EngineCore:
        config = EngineConfig(
            model=directory,
            dtype=request.param,
            device="cpu",
            num_threads=1,
            cache=CacheConfig(block_size=4, num_blocks=80),
            scheduler=SchedulerConfig(max_num_seqs=8, max_step_passes=passes),
        )
        core = EngineCore(config, load_runner(config))
        core._pass_budget = _Always(passes)
        return core

    return make


def ask(core: EngineCore, **stop) -> tuple[dict[str, list[int]], dict[str, str], int]:
    """Greedy and seeded texts of many lengths, finish reasons, and the most tokens at once."""
    for index in range(6):
        is_greedy = index % 2 == 0
        sampling = SamplingParams(
            temperature=0.0 if is_greedy else 0.9,
            top_p=0.95,
            seed=index,
            max_tokens=9 + 5 * index,
            ignore_eos=True,
            **stop,
        )
        prompt = tuple(range(5 + index, 16 + 2 * index))
        core.add(Request(id=str(index), prompt_token_ids=prompt, sampling=sampling))
    texts: dict[str, list[int]] = {str(index): [] for index in range(6)}
    ends: dict[str, str] = {}
    most = 0
    while core.has_work:
        output = core.step()
        for row_id, tokens, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            texts[row_id] += tokens
            most = max(most, len(tokens))
            if reason is not None:
                ends[row_id] = reason
    assert core.check() == []
    assert core.stats.blocks.held == core.stats.blocks.wasted_slots == 0
    return texts, ends, most


@pytest.mark.parametrize("passes", [2, 8])
def test_texts_are_those_of_single_passes(make, passes: int) -> None:
    expected, ends, most = ask(make(1))
    assert most == 1
    core = make(passes)
    assert ask(core) == (expected, ends, passes)
    # Blocks computed by later passes are found by requests with the same text.
    hits = core.stats.prefix_cache_hits
    prompt = (*range(9, 24), *expected["4"])
    greedy = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    core.add(Request(id="again", prompt_token_ids=prompt, sampling=greedy))
    while core.has_work:
        core.step()
    assert core.stats.prefix_cache_hits - hits == (len(prompt) - 2) // 4 * 4


def test_a_text_ends_at_its_stop_token_and_not_behind_it(make) -> None:
    plain, _, _ = ask(make(1))
    stops = tuple(plain[name][7] for name in ("0", "3", "5"))
    expected, ends, _ = ask(make(1), stop_token_ids=stops)
    assert "stop" in ends.values()
    told, told_ends, most = ask(make(8), stop_token_ids=stops)
    assert (told, told_ends) == (expected, ends)
    assert most > 1


def test_a_row_whose_numbers_break_is_told_up_to_there_and_harms_nobody(make) -> None:
    plain, _, _ = ask(make(1))
    others = {token for name, text in plain.items() if name != "4" for token in text}
    prompts = set(range(5, 26))
    poison = next(token for token in plain["4"][5:] if token not in others | prompts)
    expected = dict(plain, **{"4": plain["4"][: plain["4"].index(poison) + 1]})
    for passes in (1, 8):
        core = make(passes)
        embedding = core._runner._model._modules.embed.keywords["weight"]
        with torch.inference_mode():
            embedding[poison] = float("nan")
        told, ends, _ = ask(core)
        assert told == expected
        assert ends == {**dict.fromkeys("01235", "length"), "4": "error"}


def test_a_pass_that_raises_costs_nobody_a_token(make, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, ends, _ = ask(make(1))
    core = make(8)
    run, calls = core._runner._run, 0

    def fail_now_and_then(*arguments):
        nonlocal calls
        calls += 1
        if calls % 7 == 0 and arguments[1].slots.size > 1:
            raise MemoryError
        return run(*arguments)

    monkeypatch.setattr(core._runner, "_run", fail_now_and_then)
    assert ask(core) == (expected, ends, 8)
