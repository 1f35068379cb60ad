"""How many prompt tokens a step computes beside decoding sequences."""

from __future__ import annotations

import msgspec
import pytest

from engine.core import EngineCore
from engine.runner.protocol import LaunchedStep
from engine.types import Request, SamplingParams, StepPlan, StepResult
from tests.engine.fakes import FaultyRunner, make_config, make_info

MAX_LEN = 20_000


class Machine:
    """An engine with given step times, and the prompt tokens of its steps.

    A step on a GPU begins when the one before it has ended, and is awaited by whoever needs it.
    """

    def __init__(self, step_s: float, token_s: float, device: str = "cpu", **scheduler) -> None:
        self.now_s = self.idle_s = 100.0
        self.step_s, self.token_s = step_s, token_s
        self.seconds: list[float] = []
        self.prompts: list[int] = []
        scheduler.setdefault("max_num_batched_tokens", None)
        info = msgspec.structs.replace(make_info(8000, 16, MAX_LEN), device=device)
        runner = (FaultyRunner if device == "cpu" else AwaitedRunner)(info, self._take_time)
        self._is_awaited = device != "cpu"
        if isinstance(runner, AwaitedRunner):
            runner.machine = self
        self.core = EngineCore(make_config(**scheduler), runner, clock=lambda: self.now_s)
        self._num_made = 0

    def _take_time(self, plan: StepPlan) -> None:
        seconds = self.step_s + self.token_s * plan.rows.num_tokens
        self.idle_s = max(self.idle_s, self.now_s) + seconds
        if not self._is_awaited:
            self.now_s = self.idle_s
        self.seconds.append(seconds)
        lengths = map(len, plan.rows.token_ids)
        self.prompts.append(sum(length for length in lengths if length > 1))

    def add(self, num_prompt: int, max_tokens: int = 1000) -> None:
        self._num_made += 1
        params = SamplingParams(seed=self._num_made, max_tokens=max_tokens, ignore_eos=True)
        prompt = tuple((self._num_made * (at + 1)) % 7 for at in range(num_prompt))
        self.core.add(Request(id=f"{self._num_made}", prompt_token_ids=prompt, sampling=params))

    def step(self, times: int) -> tuple[list[float], list[int]]:
        """The seconds of the next steps, and their prompt tokens."""
        self.seconds.clear()
        self.prompts.clear()
        for _ in range(times):
            self.core.step()
        return list(self.seconds), list(self.prompts)

    def decode_beside_a_prompt(self, num_texts: int = 15) -> None:
        for _ in range(num_texts):
            self.add(2)
        self.step(2)
        self.add(15_000)


class AwaitedRunner(FaultyRunner):
    machine: Machine

    def launch(self, plan: StepPlan) -> LaunchedStep:
        launched = super().launch(plan)
        return AwaitedStep(launched, self.machine, self.machine.idle_s)


class AwaitedStep:
    def __init__(self, launched: LaunchedStep, machine: Machine, end_s: float) -> None:
        self._launched, self._machine, self._end_s = launched, machine, end_s

    def result(self) -> StepResult:
        self._machine.now_s = max(self._machine.now_s, self._end_s)
        return self._launched.result()


@pytest.mark.parametrize(
    ("step_s", "token_s"), [(0.02, 0.00125), (0.05, 0.0016), (0.08, 0.001), (0.01, 0.002)]
)
def test_a_step_with_prompts_comes_to_last_a_fifth_of_a_second(step_s, token_s) -> None:
    machine = Machine(step_s, token_s)
    machine.decode_beside_a_prompt()
    seconds, _ = machine.step(30)
    assert seconds[0] > 0.25, "nothing is known yet"
    assert all(0.15 < taken <= 0.21 for taken in seconds[10:])


@pytest.mark.parametrize("overlap", [False, True])
def test_on_a_gpu_it_comes_to_last_a_tenth_of_a_second(overlap: bool) -> None:
    """Of its own time: a step that overlaps with another is launched long before its turn."""
    machine = Machine(0.01, 0.00025, "cuda:0", overlap=overlap)
    machine.decode_beside_a_prompt()
    seconds, prompts = machine.step(25)
    assert max(prompts) == 2048 - 15, "nothing is known yet"
    assert all(0.09 < taken <= 0.105 for taken in seconds[10:])


def test_where_steps_are_quick_they_have_all_the_tokens_there_are() -> None:
    machine = Machine(0.01, 0.0005)
    machine.decode_beside_a_prompt()
    _, prompts = machine.step(20)
    assert set(prompts) == {256 - 15}


def test_however_slow_a_machine_is_prompts_go_on() -> None:
    machine = Machine(0.5, 0.05)
    machine.decode_beside_a_prompt()
    _, prompts = machine.step(20)
    assert prompts[-1] == 64


def test_a_machine_that_has_become_quicker_is_noticed() -> None:
    machine = Machine(0.05, 0.004)
    machine.decode_beside_a_prompt()
    _, slow = machine.step(12)
    machine.step_s, machine.token_s = 0.01, 0.0005
    _, quick = machine.step(12)
    assert slow[-1] < 100
    assert quick[-1] == 256 - 15


def test_a_prompt_for_which_nobody_waits_has_whole_steps() -> None:
    machine = Machine(0.05, 0.004)
    machine.add(10_000)
    _, prompts = machine.step(10)
    assert prompts == [256] * 10


def test_a_number_of_tokens_that_was_asked_for_is_what_a_step_has() -> None:
    machine = Machine(0.05, 0.004, max_num_batched_tokens=500)
    machine.decode_beside_a_prompt()
    _, prompts = machine.step(10)
    assert prompts == [485] * 10
