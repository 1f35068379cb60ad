"""The runner's contract, and greedy text that equals Hugging Face's under any schedule."""

from __future__ import annotations

import functools
import random

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.errors import OutOfMemory
from engine.runner import load_runner
from engine.types import BlockCopy, SamplingParams, StepPlan
from tests import tiny_models
from tests.engine.handmade import BLOCK_SIZE, GREEDY, Hand, load, request

NUM_OUTPUT = 12


# Dense, and with a state.
IN_FULL = {"llama", "qwen3_next"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Makes (directory, prompts, greedy continuations by Hugging Face's generate) of a family."""

    @functools.cache
    def make(family: str):
        model = tiny_models.build(family)
        directory = tmp_path_factory.mktemp(family)
        model.save_pretrained(directory)
        rng = random.Random(4)
        shared = [rng.randrange(3, 160) for _ in range(22)]
        prompts = [shared[:18] + [rng.randrange(3, 160) for _ in range(n)] for n in (1, 9, 17)]
        prompts += [[rng.randrange(3, 160) for _ in range(n)] for n in (1, 5, 33)]
        found = [tiny_models.greedy_tokens(model, prompt, NUM_OUTPUT) for prompt in prompts]
        return directory, prompts, found

    return make


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_models.save("llama", tmp_path_factory.mktemp("tiny"))


SCHEDULES = {
    "whole prompts": {"max_num_batched_tokens": 512},
    "chunks of five": {"max_num_batched_tokens": 5},
    "one token a step": {"max_num_batched_tokens": 1},
    "few at once": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 16},
    "no prefix cache": {"enable_prefix_caching": False, "max_num_batched_tokens": 16},
    "blocks of one": {"block_size": 1, "num_blocks": 256},
}


# Every family meets every schedule, both ways of taking steps. Of those that are not in full each
# family meets one schedule at once, one of the two ways, and the rest is slow.
def is_quick(number: int, place: int, overlap: bool) -> bool:
    return number % len(SCHEDULES) == place and number // len(SCHEDULES) % 2 == overlap


SCHEDULED = [
    pytest.param(
        family,
        name,
        overlap,
        id=f"{family}-{name}-{'overlapped' if overlap else 'stepwise'}",
        marks=() if family in IN_FULL or is_quick(number, place, overlap) else pytest.mark.slow,
    )
    for number, family in enumerate(tiny_models.FAMILIES)
    for place, name in enumerate(SCHEDULES)
    for overlap in (False, True)
]


@pytest.mark.parametrize(("family", "name", "overlap"), SCHEDULED)
def test_greedy_text_equals_hugging_face_under_any_schedule(checkpoint, family, name, overlap):
    directory, prompts, continuations = checkpoint(family)
    settings = {"num_blocks": 128, "block_size": BLOCK_SIZE, **SCHEDULES[name]}
    fields = ("num_blocks", "block_size", "enable_prefix_caching")
    cache = {key: settings.pop(key) for key in fields if key in settings}
    config = EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(**cache),
        scheduler=SchedulerConfig(overlap=overlap, **settings),
    )
    runner = load_runner(config)
    core = EngineCore(config, runner)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)
    # Twice in different orders: the second round finds the first one's prefixes.
    for seed in range(2):
        order = random.Random(seed).sample(range(len(prompts)), len(prompts))
        for index in order:
            core.add(request(f"{seed}/{index}", prompts[index], sampling))
        texts: dict[str, list[int]] = {}
        while core.has_work:
            output = core.step()
            assert not output.errors
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                texts.setdefault(row_id, []).extend(tokens)
        for index, expected in enumerate(continuations):
            assert texts[f"{seed}/{index}"] == expected
    stats = core.stats
    assert stats.blocks.held == 0
    if name != "preempted" or runner.info.window is None:  # else blocks may be freed in time
        assert (stats.num_preemptions > 0) == (name == "preempted")
    if cache.get("enable_prefix_caching", True) and name != "preempted":
        assert stats.prefix_cache_hits > 0


def test_a_copied_block_continues_as_the_original(tiny):
    """A fork: full blocks are shared, the partial one is copied, and the two diverge."""
    prompt = list(range(20, 31))
    told = SamplingParams(temperature=0.0, logprobs=0)
    hand = Hand(load(tiny))
    hand.add(request("solo", prompt, told))
    expected = hand.step({"solo": 11}).logprobs[0]
    hand.decode("solo", 8)
    hand.add(request("parent", prompt))
    hand.step({"parent": 11})
    source = hand.blocks["parent"][2]
    target = hand._free.pop()
    hand.add(request("child", prompt, told), shared_blocks=(*hand.blocks["parent"][:2], target))
    hand.computed["child"] = 10
    result = hand.step({"parent": 1, "child": 1}, copies=[BlockCopy(source, target)])
    # The copy preceded the child's attention, and did not overwrite the child's tokens.
    child = result.logprobs[1]
    assert expected is not None
    assert child is not None
    assert child[0].logprob == pytest.approx(expected[0].logprob, abs=1e-5)
    assert hand.decode("parent", 6) == hand.tokens["solo"][13:19]
    assert hand.decode("child", 7) == hand.tokens["solo"][12:19]


@pytest.mark.parametrize("pending", [False, True])
def test_output_is_counted_once_for_rows_with_penalties(tiny, pending):
    """Also when it is computed again in chunks, or the scheduler has not seen it yet."""
    penalties = SamplingParams(temperature=0, frequency_penalty=1.0)
    hand = Hand(load(tiny))
    hand.add(request("a", [27, 28, 29], penalties), output=(25, 25))
    hand.add(request("b", [27]))
    hand.step({"a": 3, "b": 1})
    hand.step({"a": 2, "b": 1})
    for _ in range(4):
        hand.step({"b": 1, "a": 1}, pending=pending)
    lines = hand.runner._rows.sampling._lines
    output = hand.tokens["a"][3:]
    assert len(output) == 7
    expected = torch.bincount(torch.tensor(output), minlength=lines.counts.output.shape[1])
    assert torch.equal(lines.counts.output[0], expected.int())
    assert lines.counts.prompt[0].nonzero().flatten().tolist() == [27, 28, 29]
    hand.runner.launch(StepPlan(removed=("a",))).result()
    assert len(lines) == 0


def test_the_newest_token_need_not_be_told(tiny):
    """A pending token is the one that the row sampled last; the text is the same."""
    hand = Hand(load(tiny))
    for row_id in ("told", "pending"):
        hand.add(request(row_id, range(20, 31), SamplingParams(temperature=0.8, seed=1)))
        hand.step({row_id: 11})
    hand.add(request("mate", range(20, 40)))
    for _ in range(8):
        hand.step({"told": 1, "mate": 2})
    for _ in range(8):
        hand.step({"pending": 1}, pending=True)
    assert hand.tokens["pending"] == hand.tokens["told"]


def test_removed_rows_are_forgotten_and_may_come_back_in_the_same_plan(tiny):
    """Including their counts: a penalised row continues as if it had never been removed."""
    penalties = SamplingParams(temperature=0, frequency_penalty=2.0, repetition_penalty=3.0)
    hand = Hand(load(tiny))
    texts = []
    for row_id, sampling in (("plain", GREEDY), ("penalised", penalties)):
        hand.add(request(row_id, range(20, 31), sampling))
        text = hand.decode(row_id, 10)
        hand.add(request(row_id, range(20, 31), sampling), output=text[:4])
        result = hand.step({row_id: 15}, removed=[row_id, "never added"])
        assert result.token_ids == ((text[4],),)
        assert hand.decode(row_id, 5) == text[5:]
        texts.append(text)
    assert texts[0] != texts[1]
    hand.runner.launch(StepPlan(removed=("plain", "penalised"))).result()
    assert len(hand.runner._rows) == 0


def test_more_rows_than_there_is_room_for_are_an_error(tiny):
    hand = Hand(load(tiny))  # room for twelve
    for i in range(12):
        hand.add(request(str(i), [20 + i] * (i + 1)))
    hand.step({str(i): i + 1 for i in range(12)})
    hand.add(request("one too many", [20]))
    with pytest.raises(ValueError, match="more than 12 rows"):
        hand.step({"one too many": 1})


def test_seeded_text_is_the_same_alone_in_a_crowd_and_resumed(tiny):
    sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=7, repetition_penalty=1.1)
    hand = Hand(load(tiny))
    hand.add(request("alone", range(20, 37), sampling))
    text = hand.decode("alone", 10)
    for i in range(3):
        hand.add(request(f"mate{i}", range(40 + i, 60), SamplingParams(temperature=0.9, seed=i)))
    hand.add(request("crowd", range(20, 37), sampling))
    hand.step({"mate0": 20, "crowd": 3})
    hand.step({"mate1": 5, "crowd": 14, "mate2": 18})
    for _ in range(9):
        hand.step({"mate0": 1, "crowd": 1})
    assert hand.tokens["crowd"][17:] == text
    hand.add(request("resumed", range(20, 37), sampling), output=text[:6])
    assert hand.decode("resumed", 4) == text[6:]


def test_prompt_logprobs_are_the_same_in_chunks(tiny):
    prompt = list(range(20, 45))
    sampling = SamplingParams(temperature=0, prompt_logprobs=2, logprobs=2)
    whole = Hand(load(tiny))
    whole.add(request("a", prompt, sampling))
    result = whole.step({"a": 25})
    entries = result.prompt_logprobs["a"]
    assert [entry.token_id for entry in entries] == prompt[1:]
    assert all(len(entry.top_ids) == 2 for entry in entries)
    assert result.logprobs[0] is not None
    assert result.logprobs[0][0].top_ids[0] == result.token_ids[0][0]
    chunked = Hand(load(tiny))
    chunked.add(request("a", prompt, sampling))
    pieces = [entry for n in (1, 9, 15) for entry in chunked.step({"a": n}).prompt_logprobs["a"]]
    assert [entry.token_id for entry in pieces] == prompt[1:]
    for piece, entry in zip(pieces, entries, strict=True):
        assert piece.top_ids == entry.top_ids
        assert piece.logprob == pytest.approx(entry.logprob, abs=1e-4)
    # Nothing is scored once the prompt is over.
    assert not chunked.step({"a": 1}).prompt_logprobs


def test_a_broken_row_fails_alone_and_its_blocks_harm_nobody(tiny):
    """nan in one row's cache: only that row fails, not others or later users of its blocks."""
    runner = load(tiny, num_blocks=16)
    solo = Hand(runner)
    solo.add(request("x", range(20, 30)))
    expected = solo.decode("x", 5)
    hand = Hand(runner)
    hand.add(request("bad", range(60, 71)))
    hand.add(request("good", range(20, 30)))
    hand.step({"bad": 11, "good": 10}, removed=["x"])
    for layer in runner._cache.layers:
        layer.values[hand.blocks["bad"]] = float("nan")
        layer.keys[hand.blocks["bad"]] = float("nan")
    result = hand.step({"good": 1, "bad": 1})
    assert result.ids == ("good",)
    assert list(result.errors) == ["bad"]
    assert result.errors["bad"].kind == "RequestFailed"
    assert hand.decode("good", 3) == expected[2:]
    # The poisoned blocks go to a row that fills them only partly.
    heir = Hand(runner)
    heir._free = hand.blocks["bad"][::-1] + heir._free[:1]
    heir.add(request("heir", range(20, 30)))
    assert heir.decode("heir", 5) == expected


def test_running_out_of_memory_has_its_own_error(tiny, monkeypatch):
    runner = load(tiny)
    hand = Hand(runner)
    hand.add(request("a", range(20, 30)))

    def out_of_memory(*_):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 PB")

    with monkeypatch.context() as patch:
        patch.setattr(runner._model, "forward", out_of_memory)
        with pytest.raises(OutOfMemory):
            hand.step({"a": 10})
    # As the engine does after a fault: the row is added again and gives the right result.
    again = Hand(runner)
    again.add(request("a", range(20, 30)))
    again.step({"a": 10}, removed=["a"])
    fresh = Hand(load(tiny))
    fresh.add(request("a", range(20, 30)))
    assert again.tokens["a"][10:] == fresh.decode("a", 1)


def test_the_cache_takes_memory_only_when_written(tiny):
    """A plan of gigabytes starts at once and uses little memory."""
    import resource

    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    before = peak()
    runner = load(tiny, num_blocks=2**30 // (BLOCK_SIZE * 2 * 3 * 2 * 8 * 4))
    assert runner.info.memory.kv_cache_bytes > 0.99 * 2**30
    hand = Hand(runner)
    hand.add(request("a", range(20, 30)))
    hand.decode("a", 3)
    assert peak() - before < 64 * 2**20
