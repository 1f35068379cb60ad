"""Captured decode steps give the same text as eager ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from engine.config import CacheConfig, EngineConfig, SchedulerConfig
from engine.core import EngineCore
from engine.models.decoder import Decoder
from engine.runner import graphs, load_runner
from engine.runner.graphs import Capture, DecodeGraph, DecodeGraphs, Replay, capture_sizes
from engine.types import Request, SamplingParams
from tests import tiny_models
from tests.called_again import called_again

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


def texts(
    directory: str, *, overlap: bool, capture: Capture | None = None
) -> tuple[dict[str, list], int]:
    """The texts, and how many steps were replayed."""
    config = EngineConfig(
        model=directory,
        attention_backend="triton",
        num_threads=1,
        cache=CacheConfig(block_size=16, num_blocks=24),
        scheduler=SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=64, overlap=overlap),
    )
    runner = load_runner(config)
    found: list[DecodeGraph | None] = []
    if capture is not None:
        args = (runner._model, runner._cache, runner._kernels, runner._spec, runner._rows)
        runner._graphs = kept = DecodeGraphs(*args, 3, capture)
        while runner.prepare():
            pass
        find = kept.find
        kept.find = lambda *args, **more: found.append(find(*args, **more)) or found[-1]
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
    return told, sum(graph is not None for graph in found)


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(tiny_models.save("qwen3", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def expected(directory: str) -> dict[str, list]:
    return texts(directory, overlap=False)[0]


def test_text_is_that_of_the_steps_that_are_not_captured(directory: str, expected) -> None:
    captured, num_replays = texts(directory, overlap=True, capture=called_again)
    assert captured == expected
    assert set(captured["4"]) <= {30, 31, 90}, "masked rows go another way"
    assert num_replays >= 4


@pytest.mark.slow
@pytest.mark.parametrize("own_bytes", [0, 1 << 20])
def test_logits_wait_as_the_head_has_rounded_them(directory: str, own_bytes: int, monkeypatch):
    """In separate memory, or in a buffer shared by all sizes."""
    unrounded = Decoder.raw_logits
    monkeypatch.setattr(graphs, "_OWN_LOGITS_BYTES", own_bytes)
    monkeypatch.setattr(Decoder, "raw_logits", lambda *given: unrounded(*given).bfloat16())
    expected = texts(directory, overlap=False)[0]
    told, num_replays = texts(directory, overlap=True, capture=called_again)
    assert told == expected
    assert num_replays >= 4


def test_what_cannot_be_captured_runs_as_it_is(directory: str, expected, caplog) -> None:
    """Each size is captured in two parts; the second one runs out of memory."""
    num_captured = 0

    def until_full(function: Callable[[], Any]) -> tuple[Replay, Any]:
        nonlocal num_captured
        num_captured += 1
        if num_captured == 4:
            raise torch.OutOfMemoryError("CUDA out of memory.\n(many lines)")
        return called_again(function)

    told, num_replays = texts(directory, overlap=True, capture=until_full)
    assert "steps of 2 rows and fewer are not captured: CUDA out of memory." in caplog.text
    assert num_captured == 4
    assert num_replays > 0, "those of three rows are"
    assert told == expected


def test_the_ladder_ends_with_the_most_there_can_be() -> None:
    assert capture_sizes(1) == [1]
    assert capture_sizes(5) == [1, 2, 4, 5]
    assert capture_sizes(24) == [1, 2, 4, 8, 16, 24]
    assert capture_sizes(30) == [1, 2, 4, 8, 16, 24, 30]
