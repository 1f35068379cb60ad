"""Beam search gives the same results as Hugging Face's ``generate`` on the same weights."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from engine import LLM, BeamParams, SamplingParams
from engine.beam_search import BeamSearch
from engine.beam_streams import submit_beams
from engine.config import CacheConfig, EngineConfig
from engine.core import EngineCore
from engine.driver import Driver
from engine.errors import ContextLengthExceeded, InvalidParameter
from engine.inline import InlineClient
from engine.offline.beam_search import search_all
from engine.paths import default_model_dir
from engine.process import SubprocessClient
from engine.requests import fan_out
from engine.results import RequestResult
from engine.text.tokenizer import Tokenizer
from engine.types import TokenLogprobs
from tests import tiny_models

PROMPTS = ([5, 17, 42, 99, 3, 77, 120, 8, 64], [31, 7], [150, 9, 9, 12, 90, 33])


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny checkpoint, and Hugging Face's model of it."""
    directory = tmp_path_factory.mktemp("beams")
    model = tiny_models.build("llama")
    model.generation_config.pad_token_id = 0
    model.save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="module")
def driver(twin: tuple[Path, Any]) -> Iterator[Driver]:
    driver = Driver(EngineCore.load(make_config(twin[0])), tokenizer())
    yield driver
    assert driver.core.stats.blocks.held == 0, "blocks did not come back"
    driver.close()


def make_config(directory: Path) -> EngineConfig:
    return EngineConfig(
        model=str(directory),
        dtype="float32",
        num_threads=1,
        cache=CacheConfig(block_size=4, num_blocks=200),
    )


def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(default_model_dir())


def search(driver: Driver, beams: BeamParams, **sampling: Any) -> list[RequestResult]:
    params = SamplingParams(**sampling)
    return search_all(driver, tokenizer(), PROMPTS, [None] * len(PROMPTS), beams, params)


@pytest.mark.parametrize("early_stopping", [True, False, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.0, -0.5])
@pytest.mark.parametrize("width", [2, 5])
def test_it_finds_what_hugging_face_finds(
    driver: Driver, twin: tuple[Path, Any], width: int, length_penalty: float, early_stopping: Any
) -> None:
    ends = [2, 11, 58, 103, 144]  # several, so that texts of all lengths end
    beams = BeamParams(width=width, length_penalty=length_penalty, early_stopping=early_stopping)
    results = search(driver, beams, max_tokens=12, stop_token_ids=tuple(ends))
    for prompt, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            expected = twin[1].generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=12,
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=ends,
                pad_token_id=0,
                return_dict_in_generate=True,
                output_scores=True,
            )
        ours = [completion.token_ids for completion in result.outputs]
        theirs = [tuple(until_end(row[len(prompt) :].tolist(), ends)) for row in expected.sequences]
        assert ours == theirs
        scores = [completion.score for completion in result.outputs]
        assert scores == pytest.approx(expected.sequences_scores.tolist(), abs=1e-4)
        for completion in result.outputs:
            ended = completion.token_ids[-1] in ends
            assert completion.finish_reason == ("stop" if ended else "length")
            assert completion.stop_reason == (completion.token_ids[-1] if ended else None)


def until_end(tokens: list[int], ends: list[int]) -> Iterator[int]:
    """The tokens up to the first end token, inclusive; the rest is padding."""
    for token in tokens:
        yield token
        if token in ends:
            return


def test_the_logprobs_are_those_of_the_tokens(driver: Driver) -> None:
    beams = BeamParams(width=3, length_penalty=0.0)
    for result in search(driver, beams, max_tokens=6, ignore_eos=True, logprobs=2):
        scores = [completion.score or 0.0 for completion in result.outputs]
        assert scores == sorted(scores, reverse=True)
        for completion in result.outputs:
            told = completion.logprobs or ()
            assert [entry.token_id for entry in told] == list(completion.token_ids)
            assert sum(entry.logprob or 0.0 for entry in told) == pytest.approx(completion.score)
            assert all(len(entry.top) == 2 for entry in told)
            assert all(entry.rank != 1 or entry.logprob == entry.top[0].logprob for entry in told)


def test_a_stop_string_does_not_apply(driver: Driver) -> None:
    beams = BeamParams(width=3)
    expected = search(driver, beams, max_tokens=6)
    texts = [completion.text for result in expected for completion in result.outputs]
    assert all(texts)
    stops = tuple({text[-1] for text in texts})
    assert search(driver, beams, max_tokens=6, stop=stops) == expected


async def test_through_a_client_it_finds_the_same(driver: Driver, twin: tuple[Path, Any]) -> None:
    beams = BeamParams(width=4)
    params = SamplingParams(max_tokens=10, n=4, stop_token_ids=(11, 58), logprobs=0)
    expected = search(driver, beams, max_tokens=10, stop_token_ids=(11, 58), logprobs=0)
    client = InlineClient(make_config(twin[0]))
    await client.start()
    try:
        groups = [
            submit_beams(client, fan_out(f"r{index}", prompt, params), beams)
            for index, prompt in enumerate(PROMPTS)
        ]
        for group, result in zip(groups, expected, strict=True):
            outputs = [await stream.next() for stream in group]
            assert [output.token_ids for output in outputs] == [
                completion.token_ids for completion in result.outputs
            ]
            for stream in group:
                with pytest.raises(StopAsyncIteration):
                    await stream.next()

        # An abandoned search frees all of its blocks.
        endless = SamplingParams(n=4, ignore_eos=True)
        group = submit_beams(client, fan_out("dropped", PROMPTS[0], endless), beams)
        waiting = asyncio.create_task(group[0].next())
        await asyncio.sleep(0)
        for stream in group:
            stream.abort()
        assert (await waiting).finish_reason == "abort"
        idle = asyncio.Event()
        client.on_output(lambda output: None if output.stats.blocks.held else idle.set())
        for stream in client.submit(fan_out("last", [5], SamplingParams(max_tokens=1))):
            await stream.next()
        await idle.wait()
        refused = fan_out("long", [5] * 127, SamplingParams(n=4, max_tokens=9))
        for stream in submit_beams(client, refused, beams):
            with pytest.raises(ContextLengthExceeded):
                await stream.next()
    finally:
        await client.close()


@pytest.mark.slow
async def test_a_search_outlives_the_engine(
    driver: Driver, twin: tuple[Path, Any], capfd: pytest.CaptureFixture[str]
) -> None:
    fields = {"max_tokens": 100, "ignore_eos": True}
    beams = BeamParams(width=3)
    prompt, expected = PROMPTS[0], search(driver, beams, **fields)[0]
    client = SubprocessClient(make_config(twin[0]))
    await client.start()
    try:
        group = submit_beams(client, fan_out("r", prompt, SamplingParams(n=3, **fields)), beams)
        some = asyncio.Event()
        client.on_output(lambda output: some.set() if output.stats.num_steps > 20 else None)
        await some.wait()
        assert client.pid is not None
        os.kill(client.pid, signal.SIGKILL)
        outputs = [await stream.next() for stream in group]
        assert client.num_restarts == 1
        assert [output.token_ids for output in outputs] == [
            completion.token_ids for completion in expected.outputs
        ]
    finally:
        await client.close()


@pytest.mark.usefixtures("only_new_objects_collected")
async def test_a_search_in_whose_midst_weights_are_exchanged_is_made_by_the_new(
    twin: tuple[Path, Any], tmp_path: Path
) -> None:
    other = tiny_models.save("llama", tmp_path / "other", seed=2)
    beams, prompt = BeamParams(width=3), tuple(PROMPTS[0])
    requests = fan_out("r", prompt, SamplingParams(n=3, max_tokens=40, ignore_eos=True))
    client = InlineClient(make_config(twin[0]))
    await client.start()
    try:
        some = asyncio.Event()
        client.on_output(lambda output: some.set() if output.stats.num_steps > 10 else None)
        group = submit_beams(client, requests, beams)
        await some.wait()
        await client.reload(str(other), 30.0)
        told = [await stream.next() for stream in group]
        again = [await stream.next() for stream in submit_beams(client, requests, beams)]
    finally:
        await client.close()
    assert [output.token_ids for output in told] == [output.token_ids for output in again]


def test_a_beam_search_of_the_embedded_model() -> None:
    with LLM(num_threads=1, use_tqdm=False) as llm:
        params = SamplingParams(max_tokens=8)
        (result,) = llm.beam_search("The capital of France is", BeamParams(width=3), params)
        assert len(result.outputs) == 3
        assert result.prompt == "The capital of France is"
        assert len({completion.text for completion in result.outputs}) == 3
        with pytest.raises(InvalidParameter):
            llm.beam_search("x", params=SamplingParams(max_tokens=0))


@pytest.mark.parametrize("fields", [{"width": 0}, {"width": 65}, {"length_penalty": 10.5}])
def test_what_cannot_be_searched_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidParameter):
        BeamParams(**fields)


def test_beams_go_on_when_the_likeliest_all_end() -> None:
    search = BeamSearch(BeamParams(width=2), 5, {7, 8})
    assert search.num_logprobs == 4
    told = TokenLogprobs(7, -0.1, 1, (7, 8, 1, 2), (-0.1, -0.2, -3.0, -4.0))
    search.advance([told])
    assert [found.stop_token_id for found in search.best] == [7, 8]
    assert [beam.token_ids for beam in search.beams] == [(1,), (2,)]
    assert search.is_done, "nothing that goes on can be better than both"
