"""Texts of a model in pipeline stages equal those of one process, with several steps in flight."""

from __future__ import annotations

import queue
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import torch

from engine.config import EngineConfig, SpeculationConfig
from engine.errors import EngineDead, ModelLoadError
from engine.grammar.backend import BatchMatchResult
from engine.requests import fan_out
from engine.runner import load_runner
from engine.types import Grammar, SamplingParams
from tests.engine.handmade import request
from tests.engine.lora.test_lora import ADAPTERS, make_served, requests_of, run
from tests.engine.parallel.test_shared_texts import (  # noqa: F401
    NUM_OUTPUT,
    checkpoint,
    engine,
    texts_of,
)

SCHEDULES = {
    "chunks of five": {"max_num_batched_tokens": 5},
    "one step at a time": {"overlap": False},
    "few at once": {"max_num_seqs": 2},
    "preempted": {"num_blocks": 16},
    "swapped": {"num_blocks": 16, "offload_bytes": 2**16},
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_OUTPUT, ignore_eos=True)


def staged(directory, stages, size=1, **settings):
    return engine(directory, size, stages, **settings)


@pytest.mark.parametrize(
    ("stages", "size"), [(2, 1), pytest.param(3, 1, marks=pytest.mark.slow), (3, 2)]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_greedy_texts_equal_hugging_face_under_any_schedule(checkpoint, name, stages, size):  # noqa: F811
    directory, prompts, expected = checkpoint
    core, runner = staged(directory, stages, size, **SCHEDULES[name])
    for again in range(2):  # the second round finds the first one's prefixes
        for index, prompt in enumerate(prompts):
            core.add(request(f"{again}/{index}", prompt, GREEDY))
        texts = texts_of(core)
        assert [texts[f"{again}/{index}"] for index in range(len(prompts))] == expected
    is_short = name in ("preempted", "swapped")
    assert (core.stats.num_preemptions > 0) == is_short
    assert core.stats.prefix_cache_hits > 0 or is_short
    assert (core.stats.tier.num_loaded > 0) == (name == "swapped")
    assert core.check() == []
    runner._team.close()


class Flights:
    """What a runner has in flight: the rows of steps, and the maximum number at once."""

    def __init__(self, runner, monkeypatch) -> None:
        self.under_way: list[set[str]] = []
        self.most = 0
        self.num_rows: list[int] = []
        launch = runner.launch

        def watched(plan):
            ids = set(plan.rows.ids)
            sampling = ids - {plan.rows.ids[place] for place in plan.rows.unsampled}
            assert not any(ids & others for others in self.under_way), "planned before its token"
            launched = launch(plan)
            self.under_way.append(sampling)
            self.most = max(self.most, len(self.under_way))
            self.num_rows.append(len(ids))
            return SimpleNamespace(result=lambda: (self.under_way.pop(0), launched.result())[1])

        monkeypatch.setattr(runner, "launch", watched)


@pytest.mark.parametrize("stages", [2, 3])
def test_each_stage_has_a_step_of_other_sequences(checkpoint, monkeypatch, stages):  # noqa: F811
    """While one step is in flight the next ones start, each with a fair share of the sequences."""
    directory, prompts, _ = checkpoint
    core, runner = staged(directory, stages)
    flights = Flights(runner, monkeypatch)
    handed: list[int] = []  # how many steps rank 0 had passed on when it read a result
    hand_on, fetch = runner._pipeline.send, runner._pipeline.receive_result
    num_handed = 0

    def count(x):
        nonlocal num_handed
        num_handed += 1
        hand_on(x)

    def look(num_rows):
        handed.append(num_handed - len(handed))
        return fetch(num_rows)

    monkeypatch.setattr(runner._pipeline, "send", count)
    monkeypatch.setattr(runner._pipeline, "receive_result", look)
    sampling = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for index in range(6):
        core.add(request(str(index), prompts[index % len(prompts)], sampling))
    texts_of(core)
    assert flights.most == stages
    steady = slice(2 * stages, -2 * stages)
    assert set(handed[steady]) == {stages}
    assert set(flights.num_rows[steady]) == {6 // stages}
    runner._team.close()


def test_chunks_of_a_prompt_follow_one_another(checkpoint, monkeypatch):  # noqa: F811
    """The next chunk starts before the previous one has passed all stages."""
    directory, prompts, expected = checkpoint
    core, runner = staged(directory, 3, max_num_batched_tokens=4)
    flights = Flights(runner, monkeypatch)
    core.add(request("a", prompts[4], GREEDY))
    assert texts_of(core)["a"] == expected[4]
    assert flights.most == 3
    runner._team.close()


def test_seeded_choices_and_told_logprobs_are_those_of_one_process(checkpoint):  # noqa: F811
    directory, prompts, _ = checkpoint
    sampling = SamplingParams(
        n=3,
        seed=7,
        max_tokens=NUM_OUTPUT,
        ignore_eos=True,
        logprobs=2,
        prompt_logprobs=1,
        frequency_penalty=0.5,
        logit_bias={5: 3.0},
        bad_token_ids=((9,), (11, 12)),
    )
    told = []
    for stages in (1, 3):
        core, runner = staged(directory, stages)
        for name, prompt in (("x", prompts[2]), ("y", prompts[4])):
            for child in fan_out(name, tuple(prompt), sampling):
                core.add(child)
        tokens: dict[str, list[int]] = {}
        logprobs: dict[str, list[float]] = {}
        while core.has_work:
            output = core.step()
            assert not output.errors
            for row_id, ids in zip(output.ids, output.token_ids, strict=True):
                tokens.setdefault(row_id, []).extend(ids)
            for column in (output.prompt_logprobs, output.logprobs):
                for row_id, entries in column.items():
                    entries = (entry.logprob for entry in entries)
                    logprobs.setdefault(row_id, []).extend(entries)
        told.append((tokens, logprobs))
        if stages > 1:
            runner._team.close()
    (alone, ours), (shared, theirs) = told
    assert shared == alone
    assert len({tuple(text) for text in alone.values()}) > 3
    for row_id in ours:
        np.testing.assert_allclose(theirs[row_id], ours[row_id], atol=1e-4)


def test_a_place_is_not_given_on_while_a_step_has_it(checkpoint):  # noqa: F811
    """Sequences end while their steps are in flight, and others arrive at once.

    The successor in a slot is sampled with its own seed, penalties and biases.
    """
    directory, prompts, _ = checkpoint

    def sampling(index: int) -> SamplingParams:
        return SamplingParams(
            seed=index,
            max_tokens=8 + index % 5,
            ignore_eos=True,
            frequency_penalty=1.5 * (index % 2),
            logit_bias={20 + index: 6.0},
            logprobs=1 if index % 3 else None,
        )

    requests = [request(f"r{i}", prompts[i % 5], sampling(i)) for i in range(16)]
    core, _ = staged(directory, 1)
    for each in requests:
        core.add(each)
    expected = texts_of(core)

    core, runner = staged(directory, 3, max_num_seqs=4)
    texts: dict[str, list[int]] = {}
    for each in requests:
        core.add(each)
    aborted = 0
    while core.has_work:
        for request_id in ("r1", "r4", "r6", "r9"):
            if len(texts.get(request_id, ())) == 3 and core._in_flight:
                core.abort(request_id)
                aborted += 1
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            texts.setdefault(row_id, []).extend(tokens)
    assert aborted >= 4
    for row_id, text in texts.items():
        assert text == expected[row_id][: len(text)], row_id
        assert len(text) == len(expected[row_id]) or row_id in ("r1", "r4", "r6", "r9")
    assert len(runner._rows._held) == len(runner._rows._removed) == 0
    runner._team.close()


class Decades:
    """A grammar whose n-th token is one of 10n to 10n + 9. All its masks wait for the logits."""

    num_bytes = 1
    is_complete = False

    def __init__(self) -> None:
        self.next = 1
        self.batch_matcher = self

    def matcher(self) -> Decades:
        return Decades()

    def advance_and_fill(self, rows, masks) -> BatchMatchResult:
        for matcher, token_ids, *_ in rows:
            matcher.next += len(token_ids)
        return BatchMatchResult({}, list(range(len(rows))))

    def allows(self, token_id: int) -> bool:
        return token_id // 10 == self.next

    def fill(self, mask: np.ndarray) -> None:
        flags = np.zeros(mask.size * 32, np.uint8)
        flags[10 * self.next : 10 * self.next + 10] = 1
        mask[:] = np.packbits(flags, bitorder="little").view(np.int32)

    def record_deferral(self, *, wasted: bool) -> None:
        pass


def test_a_mask_that_waits_is_heeded_though_rows_join_meanwhile(checkpoint):  # noqa: F811
    """More rows than there are lines of masks: these move while a step is in flight."""
    directory, prompts, _ = checkpoint
    core, runner = staged(directory, 2)
    params = SamplingParams(temperature=0.0, max_tokens=13, grammar=Grammar("json_object"))
    texts: dict[str, list[int]] = {}
    for index in range(9):
        held = request(str(index), prompts[index % 5], params)
        core._scheduler.add(held, Decades())
        for _ in range(2 if index < 8 else 99):
            output = core.step()
            for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
                texts.setdefault(row_id, []).extend(tokens)
    assert not core.has_work
    assert len(texts) == 9
    for text in texts.values():
        assert [token // 10 for token in text] == list(range(1, 14))
    runner._team.close()


@pytest.mark.parametrize(("kind", "size"), [("llama", 1), ("gpt2", 2), ("qwen2_moe", 1)])
def test_each_row_has_its_adapter_in_every_stage(kind, size, tmp_path):
    two = {name: ADAPTERS[name] for name in ("all", "root")}
    base, adapters, prompts, texts = make_served(kind, tmp_path, two)
    core, runner = staged(base, 3, size, num_blocks=512, max_num_batched_tokens=17)
    order = [(name, i) for i in range(len(prompts)) for name in (None, *adapters)]
    tokens = run(core, requests_of(adapters, prompts, order))
    runner._team.close()
    for name, i in order:
        assert tokens[f"{name}-{i}"] == texts[name][i], (name, i)


def test_a_stage_has_its_layers_of_weights_and_cache(checkpoint):  # noqa: F811
    directory, _, _ = checkpoint
    infos = []
    for stages in (1, 3):
        _, runner = staged(directory, stages)
        infos.append(runner.info)
        if stages > 1:
            runner._team.close()
    alone, shared = (info.memory for info in infos)
    assert shared.bytes_per_token * 3 == alone.bytes_per_token
    assert shared.kv_cache_bytes * 3 == alone.kv_cache_bytes
    assert shared.weights_bytes < 0.6 * alone.weights_bytes  # embeddings and head are not divided
    assert infos[0].num_parameters == infos[1].num_parameters


def test_as_many_blocks_as_the_stage_with_the_most_layers_has_room_for(checkpoint):  # noqa: F811
    """Blocks have the same numbers in all stages, and on the host."""
    directory, _, _ = checkpoint
    config = EngineConfig(model=str(directory), dtype="float32", num_threads=1)
    cache = msgspec.structs.replace(
        config.cache, memory_bytes=2**18, offload_bytes=2**18, block_size=4
    )
    runner = load_runner(msgspec.structs.replace(config, cache=cache, pipeline_parallel_size=2))
    memory = runner.info.memory
    runner._team.close()
    per_layer = memory.bytes_per_token  # the first stage has one layer of three
    assert memory.num_blocks == 2**18 // (2 * per_layer * 4)
    assert memory.num_host_blocks == 2**18 // 2 // (2 * per_layer * 4)
    assert memory.kv_cache_bytes == memory.num_blocks * per_layer * 4


@pytest.mark.parametrize("stages", [2, 3])
def test_a_lost_stage_is_the_end_of_the_engine(checkpoint, stages):  # noqa: F811
    directory, prompts, _ = checkpoint
    core, runner = staged(directory, stages)
    told: queue.SimpleQueue[str] = queue.SimpleQueue()
    runner.on_loss(told.put)
    for index in range(3):
        sampling = SamplingParams(max_tokens=60, ignore_eos=True)
        core.add(request(str(index), prompts[index], sampling))
    core.step()
    runner._team._ranks[0]._child.hang_up()
    with pytest.raises(EngineDead, match="rank 1"):
        texts_of(core)
    assert "rank 1 (process" in told.get(timeout=30)
    runner._team.close()


REFUSED = {
    "'mtp'": {"speculation": SpeculationConfig(method="mtp")},
    "the stub has no model": {"load_format": "stub"},
    "the model has 3 layers": {"pipeline_parallel_size": 4},
}


@pytest.mark.parametrize("problem", REFUSED)
def test_what_cannot_be_staged_is_refused_in_one_line(checkpoint, problem):  # noqa: F811
    directory, _, _ = checkpoint
    settings = {"model": str(directory), "pipeline_parallel_size": 2, **REFUSED[problem]}
    with pytest.raises(ModelLoadError, match=r"^pipeline_parallel_size.*[^\n]$") as caught:
        load_runner(EngineConfig(**settings))
    assert problem in str(caught.value)


def test_a_stage_that_cannot_load_tells_why(checkpoint, monkeypatch):  # noqa: F811
    directory, _, _ = checkpoint
    from engine.parallel import follower

    def refuse(*_):
        raise ModelLoadError("its GPU has no room")

    monkeypatch.setattr(follower, "read_weights", refuse)
    with pytest.raises(ModelLoadError, match="rank 1: its GPU has no room"):
        staged(directory, 2)


def test_scores_that_are_not_finite_cost_one_request(checkpoint, monkeypatch):  # noqa: F811
    directory, prompts, expected = checkpoint
    core, runner = staged(directory, 2)
    fetch = runner._pipeline.receive_result

    def spoiled(num_rows):
        states = fetch(num_rows)
        if num_rows > 1 and not spoiled_once:
            spoiled_once.append(True)
            states[0] = torch.nan
        return states

    spoiled_once: list[bool] = []
    monkeypatch.setattr(runner._pipeline, "receive_result", spoiled)
    for index, prompt in enumerate(prompts):
        core.add(request(str(index), prompt, GREEDY))
    errors: set[str] = set()
    texts: dict[str, list[int]] = {}
    while core.has_work:
        output = core.step()
        errors |= set(output.errors)
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            texts.setdefault(row_id, []).extend(tokens)
    assert len(errors) == 1
    others = [index for index in range(len(prompts)) if str(index) not in errors]
    assert [texts[str(index)] for index in others] == [expected[index] for index in others]
    runner._team.close()
