"""The engine around the scheduler: faults, timing, the batching window, rejected requests."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable

import msgspec
import pytest

from engine.config import CacheConfig
from engine.core import EngineCore
from engine.errors import EngineDead, Failure, InvalidParameter, OutOfMemory
from engine.requests import fan_out
from engine.runner.protocol import LaunchedStep
from engine.scheduler import Scheduler
from engine.types import Adapter, EngineInfo, EngineOutput, Request, SamplingParams, StepPlan
from tests.engine.fakes import FakeRunner, FaultyRunner, expected_output, make_config, make_info
from tests.engine.scheduler.lives import BrokenContract, Life
from tests.engine.stateful_fakes import StatefulFaulty

MAX_LEN = 100
Fault = Callable[[StepPlan], dict[str, Failure] | None]


class _Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture(params=[False, True], ids=["stepwise", "overlapped"])
def overlap(request: pytest.FixtureRequest) -> bool:
    return request.param


def make_core(fault: Fault | None = None, num_blocks: int = 120, **scheduler) -> EngineCore:
    info = make_info(num_blocks, 4, MAX_LEN)
    runner = FakeRunner(info) if fault is None else FaultyRunner(info, fault)
    return EngineCore(make_config(**scheduler), runner, clock=_Clock())


def crowd(n: int = 12, **fields) -> list[Request]:
    """Requests with shared prefixes, some of them forked."""
    requests: list[Request] = []
    for index in range(n):
        prompt = (*(1, 2, 3, 4, 5, 1, 2, 3)[: 3 + index % 5], index % 7)
        sampling = SamplingParams(seed=index, max_tokens=14, n=1 + 2 * (index % 3 == 0), **fields)
        requests += fan_out(f"r{index}", prompt, sampling)
    return requests


def drain(core: EngineCore, requests: Iterable[Request]) -> tuple[dict[str, list[int]], dict]:
    """All texts, and how each request ended."""
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    ends: dict[str, object] = {}
    while core.has_work:
        output: EngineOutput = core.step()
        for id_, tokens, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            texts[id_] += tokens
            if reason is not None:
                assert id_ not in ends, "ended twice"
                ends[id_] = output.errors.get(id_, reason)
    assert core.check() == []
    assert core.stats.blocks.held == 0
    return texts, ends


def check_all_but(bad: set[str], core: EngineCore, requests: list[Request]) -> dict:
    for request in requests:
        core.add(request)
    texts, ends = drain(core, requests)
    assert set(ends) == {request.id for request in requests}, "a request without an answer"
    for request in requests:
        if request.id not in bad:
            assert (texts[request.id], ends[request.id]) == expected_output(request, MAX_LEN)
    return ends


# ---------------------------------------------------------------- faults


@pytest.mark.parametrize("bad", [["r4"], ["r0"], ["r0/1", "r7", "r11"]], ids=" ".join)
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("bad row"), "RequestFailed"),
        (MemoryError(), "OutOfMemory"),
        (OutOfMemory("device"), "OutOfMemory"),
    ],
    ids=["fault", "memory", "device-memory"],
)
def test_only_the_rows_that_make_a_step_raise_fail(
    bad: list[str], error, kind: str, overlap: bool
) -> None:
    def fault(plan: StepPlan) -> None:
        if any(row.id in bad for row in plan.rows):
            raise error

    requests = crowd()
    ends = check_all_but(set(bad), make_core(fault, overlap=overlap), requests)
    assert {ends[id_].kind for id_ in bad} == {kind}


def test_a_row_fails_in_the_middle_of_its_text_and_its_mates_do_not_notice(overlap: bool) -> None:
    def fault(plan: StepPlan) -> None:
        if any(row.id == "r5" and row.start >= 12 for row in plan.rows):
            raise FloatingPointError

    requests = crowd(ignore_eos=True)
    core = make_core(fault, overlap=overlap)
    for request in requests:
        core.add(request)
    texts, ends = drain(core, requests)
    assert ends["r5"].message == "FloatingPointError: "
    wanted, _ = expected_output(next(r for r in requests if r.id == "r5"), MAX_LEN)
    assert texts["r5"] == wanted[: len(texts["r5"])] != []


def test_a_step_that_only_fails_as_a_whole_fails_nobody(overlap: bool) -> None:
    def fault(plan: StepPlan) -> None:
        if len(plan.rows) > 5:
            raise MemoryError

    assert "error" not in check_all_but(set(), make_core(fault, overlap=overlap), crowd()).values()


def test_rows_that_the_runner_reports_fail_alone(overlap: bool) -> None:
    failure = Failure(kind="RequestFailed", message="the logits are not finite")

    def fault(plan: StepPlan) -> dict[str, Failure]:
        return {row.id: failure for row in plan.rows if row.id in ("r3", "r6")}

    ends = check_all_but({"r3", "r6"}, make_core(fault), crowd())
    assert ends["r3"] == ends["r6"] == failure


def test_a_lost_device_ends_the_engine() -> None:
    def fault(plan: StepPlan) -> None:
        raise EngineDead("the device is lost")

    core = make_core(fault)
    core.add(crowd()[0])
    with pytest.raises(EngineDead):
        core.step()


class _FaultyLife(Life):
    """A life whose steps fail at random after doing their damage, at launch or when read."""

    def _make_runner(self, info: EngineInfo) -> FaultyRunner:
        self.chance = random.Random(self.num_blocks)
        kind = StatefulFaulty if self.keeps_states else FaultyRunner
        return kind(info, self._fault, late=lambda: self.chance.random() < 0.5)

    def _fault(self, plan: StepPlan) -> None:
        chance = 0.3 if len(plan.rows) > 1 else 0.0  # a single row that fails is to blame
        if self.chance.random() < chance:
            self.seen["faults"] += 1
            raise RuntimeError("a passing fault")


def test_passing_faults_change_no_text(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    num_faults = 0
    for seed in range(1000, 1100):
        life = _FaultyLife(seed)
        life.run()
        num_faults += life.seen["faults"]
    assert num_faults > 500


def test_a_state_is_computed_again_where_there_are_no_lines_to_spare(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The step fails before it has removed the row in whose place the other one comes."""
    caplog.set_level(logging.CRITICAL)
    runner = StatefulFaulty(make_info(40, 4, MAX_LEN, num_states=1, num_snapshots=2), lambda _: {})
    core = EngineCore(make_config(max_num_seqs=1), runner)
    launch, num_failed = runner.launch, 0

    def launch_or_fail(plan: StepPlan) -> LaunchedStep:
        nonlocal num_failed
        if plan.restores and not num_failed:
            num_failed += 1
            raise RuntimeError("a passing fault")
        return launch(plan)

    runner.launch = launch_or_fail
    sampling = SamplingParams(max_tokens=5, ignore_eos=True)
    check_all_but(
        set(),
        core,
        [Request(id=id_, prompt_token_ids=(1, 2) * 6, sampling=sampling) for id_ in "ab"],
    )
    assert num_failed == 1


def test_a_chunk_that_runs_again_though_its_prompt_has_begun_anew() -> None:
    """In a pipeline: it fails after its sequence was preempted, and admitted with other blocks."""
    num_blocks = 35  # of one token
    chunks: list[str] = []

    def fault(plan: StepPlan) -> None:
        chunks.extend(id_ for id_ in plan.rows.ids if id_ == "long")
        if "long" in plan.rows.ids and len(chunks) == 8:
            raise RuntimeError("a passing fault")

    cache = CacheConfig(block_size=1, enable_prefix_caching=False)
    config = make_config(max_num_batched_tokens=3, cache=cache)
    core = EngineCore(
        msgspec.structs.replace(config, pipeline_parallel_size=3),
        FaultyRunner(make_info(num_blocks, 1, num_blocks), fault, late=lambda: True),
    )
    prompts = {"short": (1, 2), "leaves": (1, 2), "long": (1, 2, 3) * 7}
    sampling = SamplingParams(max_tokens=12, ignore_eos=True)
    requests = [
        Request(id=name, prompt_token_ids=prompt, sampling=sampling)
        for name, prompt in prompts.items()
    ]
    *others, long = requests
    for arriving in (others, [long]):
        for request in arriving:
            core.add(request)
        for _ in range(8):
            core.step()
    assert core._scheduler.sequences["long"].num_preemptions == 1
    core.abort("leaves")  # there is room again
    texts, ends = drain(core, requests)
    assert (texts["long"], ends["long"]) == expected_output(long, num_blocks)
    assert len(chunks) > 8


def _believe_its_offloads(scheduler: Scheduler) -> StepPlan:
    return StepPlan(loads=scheduler._planned[0].plan.loads)


def _forget_its_loads(scheduler: Scheduler, fail=Scheduler.mark_failed) -> StepPlan:
    fail(scheduler)
    return StepPlan()


@pytest.mark.parametrize("wrong", [_believe_its_offloads, _forget_its_loads])
def test_the_lives_notice_what_a_failed_step_has_not_copied(
    wrong: Callable[[Scheduler], StepPlan],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Scheduler, "mark_failed", wrong)
    lives = (_FaultyLife(seed) for seed in range(1000, 1080))
    with pytest.raises(BrokenContract, match="reads foreign KV"):
        list(map(_FaultyLife.run, (life for life in lives if not life.keeps_states)))


def test_the_lives_notice_a_snapshot_that_a_failed_step_has_not_made(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(Scheduler, "mark_failed", _believe_its_offloads)
    lives = (_FaultyLife(seed) for seed in range(1000, 1080))
    with pytest.raises(BrokenContract, match="has another's state"):
        list(map(_FaultyLife.run, (life for life in lives if life.keeps_states)))


def test_the_check_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    core = make_core()
    core._pool._free.popitem()
    assert core.check()
    assert any(record.levelno == logging.CRITICAL for record in caplog.records)


# ---------------------------------------------------------------- timing


def test_timings_say_when_things_happened() -> None:
    core = make_core()
    clock = core._clock
    assert isinstance(clock, _Clock)
    sampling = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    core.add(Request(id="a", prompt_token_ids=(1,), sampling=sampling, arrival_s=99.0))
    timings = None
    while core.has_work:
        clock.now_s += 1.0
        timings = core.step().timings.get("a", timings)
    assert timings is not None
    told = (timings.arrival_s, timings.scheduled_s, timings.first_token_s, timings.finished_s)
    assert told == (99.0, 101.0, 101.0, 103.0)


def test_the_batching_window_gathers_prompts_until_time_or_number_is_up() -> None:
    core = make_core(batching_window_ms=50, batching_window_prompts=3)
    clock = core._clock
    assert isinstance(clock, _Clock)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [Request(id=f"r{i}", prompt_token_ids=(1, i), sampling=sampling) for i in range(7)]
    core.add(requests[0])
    assert core.step().stats.num_running == 0
    clock.now_s += 0.02
    core.add(requests[1])
    assert core.idle_s == pytest.approx(0.03), "the window opens with the first prompt"
    assert core.step().stats.num_running == 0
    clock.now_s += 0.031
    assert core.idle_s == 0
    assert core.step().stats.num_running == 2
    core.add(requests[2])
    before = core.step().stats
    assert (before.num_running, before.num_waiting) == (2, 1), "the next prompt waits again"
    core.add(requests[3])
    core.add(requests[4])
    assert core.step().stats.num_running == 5, "three prompts need no more time"
    core.add(requests[5])
    core.abort("r0")
    assert core.idle_s == 0, "there is something to tell"
    core.step()
    clock.now_s += 0.051
    drain(core, requests)


# ---------------------------------------------------------------- rejected requests


@pytest.mark.parametrize(
    ("prompt", "sampling", "param"),
    [
        ((1, 7), {}, "prompt"),
        ((-1, 2), {}, "prompt"),
        ((1,), {"stop_token_ids": (7,)}, "stop_token_ids"),
        ((1,), {"logit_bias": {7: 1.0}}, "logit_bias"),
        ((), {}, "prompt"),
    ],
)
def test_tokens_that_the_model_does_not_have_are_refused(prompt, sampling, param: str) -> None:
    core = make_core()
    with pytest.raises(InvalidParameter) as caught:
        core.add(Request(id="a", prompt_token_ids=prompt, sampling=SamplingParams(**sampling)))
    assert caught.value.param == param
    assert not core.has_work


def test_the_first_adapter_is_prepared_for_though_all_else_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What it is captured for comes with it."""
    core = make_core()
    (plain,) = fan_out("plain", (1, 2, 3), SamplingParams(max_tokens=2))
    core.add(plain)
    drain(core, [plain])
    remaining: list[str] = ["plain"]
    monkeypatch.setattr(core._runner, "prepare", lambda: bool(remaining and remaining.pop()))
    while core.prepare():
        pass
    remaining.append("with adapters")
    assert not core.prepare()
    monkeypatch.setattr(core._runner, "load_adapter", lambda adapter: None, raising=False)
    adapter = Adapter(id="a", name="a", path="a")
    (adapted,) = fan_out("adapted", (1, 2, 3), SamplingParams(max_tokens=2), adapter=adapter)
    core.add(adapted)
    drain(core, [adapted])
    assert core.prepare()
    assert not remaining
