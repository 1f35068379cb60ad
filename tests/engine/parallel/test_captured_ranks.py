"""Captured steps of several ranks: all capture the same ones, and texts stay what they are."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine.config import LoraConfig, SpeculationConfig
from engine.core import EngineCore
from engine.errors import EngineDead
from engine.lora import batch
from engine.parallel import follower_worker, group
from engine.parallel.follower_graphs import FollowerGraphs
from engine.runner import load
from engine.runner.graphs import Replay
from engine.runner.load_plan import LoadPlan
from engine.runner.model_runner import ModelRunner
from engine.runner.step_peers import NotCapturedError
from engine.types import Request, SamplingParams
from kernels.cpu.backend import CpuAttention
from kernels.cpu.native import build
from kernels.lora import adapter_rows
from tests import tiny_models, tiny_vision
from tests.called_again import called_again
from tests.engine.lora.test_lora import ADAPTERS, make_served, requests_of, run
from tests.engine.parallel.test_shared_images import LAYERS
from tests.engine.parallel.test_shared_images import requests_of as image_requests
from tests.engine.parallel.test_shared_texts import engine, texts_of

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")

SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=8),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=6),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, logprobs=2, max_tokens=7),
    SamplingParams(temperature=0.7, seed=5, logit_bias={30: 4.0}, max_tokens=5),
)


@pytest.fixture(autouse=True)
def _calls_again(monkeypatch):
    """Every rank captures, by calling again; the CPU's kernels serve padded batches."""
    monkeypatch.setattr(LoadPlan, "captures_steps", property(lambda plan: plan.is_capturable))
    monkeypatch.setattr(load, "CudaCapture", lambda: called_again)
    monkeypatch.setattr(follower_worker, "CudaCapture", lambda: called_again)
    monkeypatch.setattr(
        CpuAttention, "can_replay", lambda _, bounds, batch, spec: batch.num_rows <= bounds.num_rows
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_models.save("qwen3", tmp_path_factory.mktemp("qwen3"))


@pytest.fixture
def replays(monkeypatch) -> Counter[str]:
    """How often the other ranks have replayed steps, by kind."""
    counted: Counter[str] = Counter()
    replay = FollowerGraphs.replay

    def counting(self, key, *given) -> None:
        kind = "decode" if key.num_tokens is None else "prompts"
        counted[kind + ", adapted" * key.adapted] += 1
        replay(self, key, *given)

    monkeypatch.setattr(FollowerGraphs, "replay", counting)
    return counted


def _plan_adapters_on_device(monkeypatch) -> None:
    """Derive rows' adapters from the slots where a graph reads them, as a GPU's kernels do."""

    def of_step(self, slots: torch.Tensor) -> batch.StepAdapters:
        store = self._store
        rows = adapter_rows(slots.numpy().astype(np.int64), store.num_slots, store.device)
        return batch.StepAdapters(store, rows, self._operations)

    monkeypatch.setattr(batch.CapturedAdapters, "_of_step", of_step)


def start(directory: Path, size: int = 2, **settings: Any) -> tuple[EngineCore, ModelRunner]:
    core, runner = engine(directory, size, max_num_batched_tokens=40, max_num_seqs=3, **settings)
    assert isinstance(runner, ModelRunner)
    return core, runner


def told(core: EngineCore) -> dict[str, list[int]]:
    """The texts of some requests, three at a time."""
    rng = random.Random(7)
    for index, (length, sampling) in enumerate(zip((3, 50, 1, 18), SAMPLINGS, strict=True)):
        prompt = tuple(rng.randrange(3, 90) for _ in range(length))
        core.add(Request(id=str(index), prompt_token_ids=prompt, sampling=sampling))
    return texts_of(core)


def prepare(runner: ModelRunner) -> None:
    while runner.prepare():
        pass


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {}),
        ("gemma3", {}),
        ("gemma4_shared", {"num_key_value_heads": 2}),
        ("deepseek_v3", {}),
        ("qwen3_next", {}),
        ("falcon_mamba", {}),
    ],
)
def test_captured_steps_give_the_texts_of_launched_ones(tmp_path, kind, changes, replays):
    core, runner = start(tiny_models.save(kind, tmp_path, **changes))
    expected = told(core)
    assert not replays, "nothing is captured before there is time for it"
    prepare(runner)
    assert told(core) == expected
    assert replays.keys() == {"decode", "prompts"}


@pytest.mark.parametrize(
    "settings",
    [
        {"overlap": True},
        {"max_step_passes": 4},
        {"speculation": SpeculationConfig(method="ngram", num_draft_tokens=2)},
        {"num_blocks": 20},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_any_schedule_is_replayed(model, settings, replays):
    core, runner = start(model, **settings)
    expected = told(core)
    prepare(runner)
    assert told(core) == expected
    assert replays["decode"]
    assert core.check() == []


def test_three_ranks_with_a_head_of_their_own_each(tmp_path, replays):
    """The vocabulary of 160 is not divided by three."""
    shape = {"num_attention_heads": 6, "num_key_value_heads": 3, "intermediate_size": 96}
    directory = tiny_models.save("llama", tmp_path, **shape)
    core, runner = start(directory, size=3)
    expected = told(core)
    prepare(runner)
    assert told(core) == expected
    for count in (replays["decode"], replays["prompts"]):
        assert count
        assert count % 2 == 0, "two others replay the same"


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_5"])
def test_texts_behind_images_turn_where_the_images_moved_them(tmp_path, kind, replays):
    """Rotary positions are three-dimensional; steps with image tokens are launched."""
    changes = dict(LAYERS)
    if kind == "qwen3_5":
        changes["layer_types"] = ["linear_attention", "full_attention"] * 2
    tiny_vision.save(kind, tmp_path, text=changes)
    core, runner = start(tmp_path)
    texts = []
    for _ in range(2):
        for each in image_requests(tmp_path):
            core.add(each)
        texts.append(texts_of(core))
        prepare(runner)
    assert texts[0] == texts[1]
    assert replays["decode"] >= 8


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_rows_with_adapters_are_captured(kind, tmp_path, replays, monkeypatch):
    """The second adapter makes all of them move in memory."""
    _plan_adapters_on_device(monkeypatch)
    names = ("all", "attention")
    base, adapters, prompts, texts = make_served(kind, tmp_path, {n: ADAPTERS[n] for n in names})
    core, runner = start(base, lora=LoraConfig(max_loaded=2, max_on_host=2))

    def check(*used: str | None) -> None:
        order = [(name, i) for i in range(len(prompts)) for name in used]
        tokens = run(core, requests_of(adapters, prompts, order))
        assert {key: tokens[f"{key[0]}-{key[1]}"] for key in order} == {
            (name, i): texts[name][i] for name, i in order
        }

    for used in (("all",), (None, *names)):
        check(*used)
        prepare(runner)
        before = replays["decode, adapted"]
        check(*used)
        assert replays["decode, adapted"] > before
    assert replays["prompts, adapted"]
    before = replays.copy()
    check(None)
    assert replays["decode"], "rows without adapters have graphs of their own"
    assert replays["decode, adapted"] == before["decode, adapted"]


def test_a_rank_whose_adapters_have_moved_launches_what_others_replay(
    tmp_path, replays, monkeypatch
):
    """They move on a rank alone when a step had failed on rank 0 before it was sent."""
    _plan_adapters_on_device(monkeypatch)
    base, adapters, prompts, texts = make_served("llama", tmp_path, {"all": ADAPTERS["all"]})
    core, runner = start(base, lora=LoraConfig(max_loaded=1, max_on_host=1))
    order = [("all", i) for i in range(len(prompts))]
    run(core, requests_of(adapters, prompts, order))
    prepare(runner)
    moved: list[FollowerGraphs] = []
    replay = FollowerGraphs.replay

    def reads_what_is_gone() -> None:
        raise AssertionError("replayed")

    def moving(self, key, *given) -> None:
        if not moved:
            moved.append(self)
            self._adapters._grow(self._adapters.num_slots + 1)
            for each, graph in self._graphs.items():
                if each.adapted:
                    self._graphs[each] = graph._replace(forward=reads_what_is_gone)
        replay(self, key, *given)

    monkeypatch.setattr(FollowerGraphs, "replay", moving)
    tokens = run(core, requests_of(adapters, prompts, order))
    assert moved
    assert replays["decode, adapted"]
    assert [tokens[f"all-{i}"] for _, i in order] == [texts["all"][i] for _, i in order]


def test_rows_whose_adapters_change_latent_attention_are_launched(
    tmp_path, replays, monkeypatch, caplog
):
    """Their part in what is absorbed depends on the rows; no rank begins to capture it."""
    _plan_adapters_on_device(monkeypatch)
    base, adapters, prompts, texts = make_served("deepseek_v3", tmp_path, {"all": ADAPTERS["all"]})
    core, runner = start(base, lora=LoraConfig(max_loaded=2, max_on_host=2))
    order = [(name, i) for i in range(len(prompts)) for name in ("all", None)]
    for _ in range(2):
        tokens = run(core, requests_of(adapters, prompts, order))
        assert [tokens[f"{name}-{i}"] for name, i in order] == [texts[name][i] for name, i in order]
        prepare(runner)
    assert "with adapters of 3 rows and fewer are not captured" in caplog.text
    assert not replays["decode, adapted"]
    check = run(core, requests_of(adapters, prompts, [(None, 0)]))
    assert check["None-0"] == texts[None][0]
    assert replays["decode"]


def test_logits_that_fail_on_one_rank_end_the_engine_at_once(model, monkeypatch):
    """The others wait for them, and would take the next pass for these."""
    monkeypatch.setattr(group, "TIMEOUT_S", 2.0)  # a thread, unlike a process, cannot be killed
    core, _ = start(model)
    gather = group.Group.gather

    def fails(self, tensor: torch.Tensor) -> object:
        if self.rank == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return gather(self, tensor)

    monkeypatch.setattr(group.Group, "gather", fails)
    core.add(Request(id="0", prompt_token_ids=(5, 6), sampling=SAMPLINGS[0]))
    with pytest.raises(EngineDead, match="OutOfMemoryError in a pass that ranks share"):
        core.step()


def test_after_a_rest_steps_are_captured_again(model, replays):
    core, runner = start(model)
    prepare(runner)
    expected = told(core)
    before = replays.copy()
    core.sleep(1)
    core.wake()
    assert told(core) == expected
    assert replays == before, "the graphs went with the cache"
    prepare(core._runner)
    assert told(core) == expected
    assert replays.total() > before.total()


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_cannot_capture_all_launch(model, rank, replays, monkeypatch, caplog):
    """The second size of decode steps, and with it the smaller ones; prompts are captured."""
    num_captured = 0

    def until_full(function: Callable[[], Any]) -> tuple[Replay, Any]:
        nonlocal num_captured
        num_captured += 1
        replay = called_again(function)
        # Rank 0 also captures the sampling of each size.
        if num_captured == (3 if rank == 0 else 2):
            raise NotCapturedError("CUDA out of memory")
        return replay

    module = load if rank == 0 else follower_worker
    monkeypatch.setattr(module, "CudaCapture", lambda: until_full)
    core, runner = start(model)
    expected = told(core)
    prepare(runner)
    where = "" if rank == 0 else "rank 1: "
    assert f"decode steps of 2 rows and fewer are not captured: {where}CUDA out" in caplog.text
    assert told(core) == expected
    assert replays["decode"], "three rows are captured"
    assert replays["prompts"]


def test_a_rank_whose_kernels_cannot_be_captured_keeps_all_from_it(model, replays, monkeypatch):
    own = property(lambda plan: plan.is_capturable and plan.shard.number == 0)
    monkeypatch.setattr(LoadPlan, "captures_steps", own)
    core, runner = start(model)
    prepare(runner)
    assert all(told(core).values())
    assert not replays


def test_a_rank_out_of_step_ends_the_engine(model, monkeypatch):
    """It fails before its capture begins, where the others communicate with it."""

    def fails(function: Callable[[], Any]) -> tuple[Replay, Any]:
        raise RuntimeError("a kernel failed")

    monkeypatch.setattr(load, "CudaCapture", lambda: fails)
    monkeypatch.setattr(group, "TIMEOUT_S", 2.0)  # a thread, unlike a process, cannot be killed
    _, runner = start(model)
    with pytest.raises(EngineDead, match="RuntimeError in a pass that ranks share"):
        prepare(runner)
