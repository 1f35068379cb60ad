"""When a step makes several passes, how many, and when it does not."""

from __future__ import annotations

import pytest

from engine.core import EngineCore
from engine.types import Request, SamplingParams, StepPlan
from tests.engine.fakes import FaultyRunner, make_config, make_info

MAX_LEN = 100


class Engine:
    """A core with given pass times on its own clock, and the plans of its steps."""

    def __init__(self, pass_s: float = 0.0, *, num_blocks: int = 120, **scheduler) -> None:
        self.now_s = 100.0
        self.plans: list[StepPlan] = []

        def take_time(plan: StepPlan) -> None:
            self.now_s += pass_s * plan.num_passes
            self.plans.append(plan)

        scheduler.setdefault("max_step_passes", None)
        runner = FaultyRunner(make_info(num_blocks, 4, MAX_LEN), take_time)
        self.core = EngineCore(make_config(**scheduler), runner, clock=lambda: self.now_s)

    def add(self, name: str, max_tokens: int = 90, **sampling) -> None:
        params = SamplingParams(seed=1, max_tokens=max_tokens, ignore_eos=True, **sampling)
        self.core.add(Request(id=name, prompt_token_ids=(1, 2, 3), sampling=params))

    def step(self, times: int = 1) -> list[int]:
        """The numbers of passes of the next steps."""
        self.plans.clear()
        for _ in range(times):
            self.core.step()
        return [plan.num_passes for plan in self.plans]


@pytest.mark.parametrize(
    ("pass_s", "passes"), [(0.0001, 8), (0.002, 8), (0.005, 3), (0.0105, 2), (0.011, 1), (1.0, 1)]
)
def test_a_step_is_done_in_about_sixteen_milliseconds(pass_s: float, passes: int) -> None:
    engine = Engine(pass_s)
    engine.add("a")
    assert engine.step(3) == [1, 1, 1], "before it is known what a pass takes"
    assert engine.step(3) == [passes] * 3


@pytest.mark.parametrize(
    ("pass_s", "passes"), [(0.004, 8), (0.0055, 6), (0.021, 2), (0.022, 1), (0.1, 1)]
)
def test_a_step_of_many_is_done_in_about_thirty_two(pass_s: float, passes: int) -> None:
    engine = Engine(pass_s, num_blocks=1500, max_num_seqs=48, max_num_batched_tokens=512)
    for number in range(48):
        engine.add(f"row {number}")
    assert engine.step(6)[-1] == passes


def test_a_pass_that_the_machine_delays_changes_nothing() -> None:
    engine = Engine(0.001)
    engine.add("a")
    engine.step(4)
    engine.now_s, clock = 0.0, engine.core._clock
    times = iter([0.0] * 4 + [1.0] * 9)
    engine.core._clock = lambda: next(times)
    engine.step()
    engine.core._clock = clock
    assert engine.step(2) == [8, 8]


@pytest.mark.parametrize(("most", "passes"), [(1, 1), (3, 3), (50, 50)])
def test_there_are_no_more_passes_than_are_set(most: int, passes: int) -> None:
    engine = Engine(max_step_passes=most)
    engine.add("a")
    assert engine.step(4)[-1] == passes


def test_steps_that_are_planned_ahead_make_one_pass() -> None:
    engine = Engine(overlap=True)
    engine.add("a")
    assert set(engine.step(20)) == {1}


def test_who_comes_is_told_a_first_token_before_there_are_passes_again() -> None:
    engine = Engine()
    engine.add("a")
    assert engine.step(4)[-1] == 8
    engine.add("b")
    assert engine.step() == [1]
    # Two rows are a new batch size: the time of its passes is measured first.
    assert engine.step(3) == [1, 1, 8]


def test_there_is_one_pass_while_somebody_waits_for_a_place() -> None:
    engine = Engine(max_num_seqs=1)
    engine.add("a")
    assert engine.step(4)[-1] == 8
    engine.add("b", max_tokens=3)
    assert set(engine.step(5)) == {1}
    engine.core.abort("b")
    engine.core.step()
    assert engine.step(2)[-1] == 8


@pytest.mark.parametrize(
    "sampling",
    [
        *({"logprobs": 0}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}),
        *({"repetition_penalty": 1.1}, {"logit_bias": {3: 1.0}}, {"min_tokens": 1}),
        *({"bad_token_ids": ((3,),)}, {"allowed_token_ids": (3, 4)}),
    ],
    ids=lambda sampling: next(iter(sampling)),
)
def test_one_row_that_is_not_plain_keeps_all_to_one_pass(sampling: dict) -> None:
    engine = Engine()
    engine.add("a")
    assert engine.step(4)[-1] == 8
    engine.add("b", max_tokens=6, **sampling)
    assert set(engine.step(6)) == {1}
    assert engine.step(2)[-1] == 8


def test_rows_end_in_the_pass_of_their_last_token() -> None:
    engine = Engine()
    engine.add("long")
    engine.add("short", max_tokens=6)  # the prompt's step and two others yield three of them
    engine.step(3)
    engine.step()
    assert [row.num_passes for row in engine.plans[0].rows] == [8, 3]
    assert engine.core.stats.num_running == 1


@pytest.mark.parametrize("num_rows", [1, 16, 64])
def test_any_number_of_rows_makes_several_passes(num_rows: int) -> None:
    engine = Engine(num_blocks=1500, max_num_seqs=64, max_num_batched_tokens=512, max_step_passes=4)
    for number in range(num_rows):
        engine.add(f"row {number}")
    assert engine.step(6)[-1] == 4


def test_passes_fit_the_tokens_of_a_step() -> None:
    engine = Engine(max_num_batched_tokens=16)
    for name in "abc":
        engine.add(name)
    assert engine.step(5)[-1] == 5
    assert engine.plans[-1].num_tokens == 15


def test_passes_leave_a_block_to_each_that_runs() -> None:
    """No sequence is preempted early because others have computed ahead."""
    engine = Engine(num_blocks=6, max_step_passes=8)  # blocks of four tokens
    for name in "ab":
        engine.add(name, max_tokens=9)  # twelve tokens each: all blocks
    for _ in range(40):
        engine.step()
        if not engine.core.has_work:
            break
    assert not engine.core.has_work
    assert engine.core.stats.num_preemptions == 0
