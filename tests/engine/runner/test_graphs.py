"""Captured steps give the same text as eager ones.

Here a function that is called again stands for a graph, and the CPU's kernels serve padded batches;
``tests/pretended_gpu`` captures as a GPU does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.models.checkpoint import read_config
from engine.models.decoder import Decoder
from engine.runner import graphs, load_runner
from engine.runner.captured_batches import pad_prompt
from engine.runner.graphs import Capture, DecodeGraphs, Replay, capture_sizes
from engine.runner.inputs import HostBatch
from engine.runner.mrope import MRopePositions
from engine.runner.prompt_graphs import PromptGraphs, _rotary_positions, prompt_sizes
from engine.types import Request, SamplingParams
from kernels.cpu.backend import CpuAttention
from kernels.cpu.native import build
from tests import tiny_models
from tests.called_again import called_again
from tools.bench import shapes

pytestmark = pytest.mark.skipif(build.load() is None, reason="no native kernels here")

SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.9, seed=3, top_p=0.9, max_tokens=4),
    SamplingParams(temperature=0.0, frequency_penalty=1.5, max_tokens=5),
    SamplingParams(temperature=0.7, seed=5, logit_bias={30: 4.0}, logprobs=2, max_tokens=3),
    SamplingParams(
        temperature=0.8,
        seed=7,
        allowed_token_ids=(30, 31, 90),
        bad_token_ids=((30, 31), (31, 30)),
        max_tokens=4,
    ),
)


class Replays(NamedTuple):
    """Numbers of steps that were replayed."""

    decode: int
    prompts: int


def texts(
    directory: str, *, overlap: bool, capture: Capture | None = None
) -> tuple[dict[str, list], Replays]:
    """The texts, and how many steps were replayed."""
    config = EngineConfig(
        model=directory,
        attention_backend="cpu",
        num_threads=1,
        cache=CacheConfig(block_size=16, num_blocks=24),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, overlap=overlap),
    )
    runner = load_runner(config)
    found, loaded = [], []
    if capture is not None:
        args = (runner._model, runner._cache, runner._kernels, runner._builder._spec, runner._rows)
        runner._graphs = kept = DecodeGraphs(*args, 3, capture)
        runner._prompt_graphs = prompts = PromptGraphs(*args, 3, 32, capture)
        while runner.prepare():
            pass
        find, load = kept.find, prompts.load
        kept.find = lambda *args, **more: found.append(find(*args, **more)) or found[-1]
        prompts.load = lambda *args: loaded.append(load(*args)) or loaded[-1]
    core = EngineCore(config, runner)
    told: dict[str, list] = {}
    for index, sampling in enumerate(SAMPLINGS):
        prompt = tuple(20 + (7 * index + i) % 90 for i in range(3 + 5 * index))
        core.add(Request(id=str(index), prompt_token_ids=prompt, sampling=sampling))
    while core.has_work:
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            told.setdefault(row_id, []).extend(tokens)
            told[row_id] += [entry.top_ids for entry in output.logprobs.get(row_id, ())]
    assert core.stats.blocks.held == 0
    return told, Replays(*(sum(each is not None for each in tried) for tried in (found, loaded)))


@pytest.fixture(autouse=True)
def _serves_padded_batches(monkeypatch):
    monkeypatch.setattr(
        CpuAttention, "can_replay", lambda _, bounds, batch, spec: batch.num_rows <= bounds.num_rows
    )


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tiny_models.save("qwen3", tmp_path_factory.mktemp("model"), num_hidden_layers=1))


@pytest.fixture(scope="module")
def expected(directory: str) -> dict[str, list]:
    return texts(directory, overlap=False)[0]


def test_text_is_that_of_the_steps_that_are_not_captured(directory: str, expected) -> None:
    captured, replays = texts(directory, overlap=True, capture=called_again)
    assert captured == expected
    assert set(captured["4"]) <= {30, 31, 90}, "masked rows go another way"
    assert replays.decode >= 4
    assert replays.prompts >= 2, "prompts with texts beside them, and without"


@pytest.mark.parametrize("own_bytes", [0, 1 << 20])
def test_logits_wait_as_the_head_has_rounded_them(directory: str, own_bytes: int, monkeypatch):
    """In separate memory, or in a buffer shared by all sizes."""
    unrounded = Decoder.raw_logits
    monkeypatch.setattr(graphs, "_OWN_LOGITS_BYTES", own_bytes)
    monkeypatch.setattr(Decoder, "raw_logits", lambda *given: unrounded(*given).bfloat16())
    expected = texts(directory, overlap=False)[0]
    told, replays = texts(directory, overlap=True, capture=called_again)
    assert told == expected
    assert replays.decode >= 4


def test_what_cannot_be_captured_runs_as_it_is(directory: str, expected, caplog) -> None:
    """Each size of decode steps is captured in two parts; the second one runs out of memory, and
    so does the second size of steps with prompts."""
    num_captured = 0

    def until_full(function: Callable[[], Any]) -> tuple[Replay, Any]:
        nonlocal num_captured
        num_captured += 1
        if num_captured in (4, 6):
            raise torch.OutOfMemoryError("CUDA out of memory.\n(many lines)")
        return called_again(function)

    told, replays = texts(directory, overlap=True, capture=until_full)
    assert "steps of 2 rows and fewer are not captured: CUDA out of memory." in caplog.text
    assert "prompts of 16 tokens and fewer are not captured: CUDA out of memory." in caplog.text
    assert num_captured == 6
    assert replays.decode > 0, "those of three rows are"
    assert replays.prompts > 0, "those of 17 to 32 tokens are, and all that fit"
    assert told == expected


def test_the_ladder_ends_with_the_most_there_can_be() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(5) == [1, 2, 4, 5]
    assert capture_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert capture_sizes(30) == [1, 2, 4, 8, 16, 24, 30]


def test_text_is_moved_by_the_images_before_it_alone() -> None:
    """Not by those behind it, in the same prompt; padding is moved by nothing."""
    shapes = {"height": 3, "width": 4, "num_tokens": 12, "video": None}
    images = [SimpleNamespace(start=start, **shapes) for start in (2, 34)]
    mrope = MRopePositions(5, 1)
    mrope.add(2, SimpleNamespace(prompt_token_ids=range(60), images=images))
    between = range(14, 34)
    batch = HostBatch(
        slots=np.array([1, 2], np.int32),
        query_start=np.array([0, 1, 1 + len(between)], np.int32),
        starts=np.array([50, between.start], np.int32),
        token_ids=np.zeros(1 + len(between), np.int32),
        sampling_rows=np.arange(1, dtype=np.int32),
    )
    found = _rotary_positions(batch, pad_prompt(batch, 4, batch.token_ids.size + 3, 4), mrope)
    moved_by = 4 - 12  # an image moves text by its larger side, not by its number of tokens
    assert found.tolist() == [50, *(place + moved_by for place in between), -3, -2, -1]
    assert mrope.deltas[2] == 2 * moved_by, "the second one moves what is behind it"


def test_small_models_have_larger_steps_with_prompts_captured(tmp_path: Path) -> None:
    """Those of a large one compute for longer than they take to launch."""
    small, large = (
        read_config(str(shapes.write_config(name, tmp_path / name))).spec
        for name in ("qwen3-0.6b", "llama-3.1-8b")
    )
    assert prompt_sizes(small, 8192)[-1] == 2048
    assert prompt_sizes(small, 300)[-1] == 256
    assert prompt_sizes(large, 8192)[-1] == 256
    assert prompt_sizes(large, 8192, has_codes=True)[-1] == 512
    assert prompt_sizes(large, 8) == []
