"""Ctrl-C, and streams that are dropped, in the middle of a step of the offline LLM."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from engine import LLM, SamplingParams
from engine.errors import EngineDead

PROMPTS = ["The capital of", "Hello", "List three colours:"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def _load() -> LLM:
    return LLM(num_threads=1, max_model_len=512, num_gpu_blocks_override=256, use_tqdm=False)


@pytest.fixture(autouse=True)
def ctrl_c() -> Iterator[None]:
    """Ctrl-C raises KeyboardInterrupt; shells have it ignored in what runs in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with _load() as loaded:
        yield loaded


def _texts(llm: LLM) -> list[str]:
    return [result.outputs[0].text for result in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def _before(thing: Any, name: str, nth: int, act: Callable[[], None]) -> pytest.MonkeyPatch:
    """Do something just before the ``nth`` call of a method."""
    patch, called, count = pytest.MonkeyPatch(), getattr(thing, name), 0

    def instead(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        if count == nth:
            act()
        return called(*args, **options)

    patch.setattr(thing, name, instead)
    return patch


def _interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


# Where a step is, and where a prompt is queued; the last is in the middle of one prompt's choices.
@pytest.mark.parametrize(
    ("part", "method", "nth"),
    [
        ("_runner", "launch", 1),
        ("_runner", "launch", 3),
        ("_scheduler", "schedule", 2),
        ("_scheduler", "update", 2),
        ("_intake", "add", 2),
    ],
)
def test_an_llm_that_is_interrupted_can_be_used_again(
    llm: LLM, part: str, method: str, nth: int
) -> None:
    expected = _texts(llm)
    handler = signal.getsignal(signal.SIGINT)
    patch = _before(getattr(llm._driver.core, part), method, nth, _interrupt)
    with patch.context(), pytest.raises(KeyboardInterrupt):
        llm.generate(PROMPTS, SamplingParams(n=2, max_tokens=12, ignore_eos=True), use_tqdm=False)
    patch.undo()
    assert signal.getsignal(signal.SIGINT) is handler
    engine = llm.stats().engine
    assert (engine.num_running, engine.num_waiting, engine.blocks.held) == (0, 0, 0)
    assert _texts(llm) == expected


def test_a_stream_beside_a_call_that_is_interrupted_loses_nothing(llm: LLM) -> None:
    expected = [delta.text for delta in llm.stream(PROMPTS[0], GREEDY)]
    with llm.stream(PROMPTS[0], GREEDY) as stream:
        texts = [next(stream).text]
        patch = _before(llm._driver.core._scheduler, "update", 3, _interrupt)
        with pytest.raises(KeyboardInterrupt):
            _texts(llm)
        patch.undo()
        texts += [delta.text for delta in stream]
    assert "".join(texts) == "".join(expected)


def test_a_second_interrupt_ends_a_step_that_may_never_end() -> None:
    with _load() as llm:
        handler = signal.getsignal(signal.SIGINT)
        patch = _before(llm._driver.core._runner, "launch", 2, lambda: (_interrupt(), _interrupt()))
        with pytest.raises(KeyboardInterrupt):
            _texts(llm)
        patch.undo()
        assert signal.getsignal(signal.SIGINT) is handler
        with pytest.raises(EngineDead, match="interrupted in the middle of a step"):
            _texts(llm)


def test_other_threads_defer_nothing(llm: LLM) -> None:
    told: list[list[str]] = []
    thread = threading.Thread(target=lambda: told.append(_texts(llm)))
    thread.start()
    thread.join()
    assert told == [_texts(llm)]


def test_a_stream_that_the_collector_finds_within_a_step_ends_after_it(llm: LLM) -> None:
    expected = _texts(llm)
    stream: Any = llm.stream("Once", SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.itself = stream
    del stream
    planner = llm._driver.core._scheduler._planner
    planned = planner.plan

    def plan(*args: Any) -> Any:
        step = planned(*args)
        gc.collect()  # the step has a row of the stream's
        return step

    with pytest.MonkeyPatch().context() as patch:
        patch.setattr(planner, "plan", plan)
        assert _texts(llm) == expected
    assert llm.stats().engine.blocks.held == 0
