"""Scheduling decisions: the order of service, which sequences wait, and the cost of deciding."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FunctionType, ModuleType
from typing import get_args

import pytest

from engine.config import Policy, SchedulerConfig
from engine.errors import ContextLengthExceeded, Failure, InvalidParameter
from engine.kv_cache.pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler.sequence import Sequence
from engine.types import Adapter, EngineOutput, Request, SamplingParams, StepPlan, StepResult
from tests.engine.fakes import EOS


def make(num_blocks: int = 64, size: int = 4, max_len: int = 200, **config) -> Scheduler:
    pool = BlockPool(num_blocks, size)
    return Scheduler(SchedulerConfig(**config), pool, max_model_len=max_len, eos_token_ids=(EOS,))


def request(id_: str, num_prompt: int = 4, max_tokens: int | None = 8, **fields) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **fields.pop("sampling", {}))
    prompt = fields.pop("prompt", tuple(100 + position for position in range(num_prompt)))
    return Request(id=id_, prompt_token_ids=prompt, sampling=sampling, **fields)


def run(scheduler: Scheduler, token: int = 1) -> tuple[StepPlan, EngineOutput]:
    """Run one step in which every sampling row gets ``token``."""
    plan = scheduler.schedule()
    ids = tuple(row.id for row in plan.rows if row.is_sampled)
    return plan, scheduler.update(plan, StepResult(ids, ((token,),) * len(ids)))


def drain(scheduler: Scheduler) -> list[str]:
    """The ids in the order in which they end."""
    ended: list[str] = []
    while scheduler.has_work:
        _, output = run(scheduler)
        ended += output.timings
    return ended


# ---------------------------------------------------------------- order of service


@pytest.mark.parametrize(
    ("policy", "order"),
    [("fcfs", ["a", "b", "c"]), ("priority", ["c", "a", "b"]), ("sjf", ["b", "c", "a"])],
)
def test_a_policy_orders_the_queue(policy: str, order: list[str]) -> None:
    scheduler = make(policy=policy, max_num_seqs=1)
    scheduler.add(request("a", max_tokens=9, priority=1))
    scheduler.add(request("b", max_tokens=2, priority=1))
    scheduler.add(request("c", max_tokens=5, priority=0))
    assert drain(scheduler) == order


@pytest.mark.parametrize(("policy", "victim"), [("fcfs", "c"), ("priority", "a"), ("sjf", "b")])
def test_a_policy_chooses_whom_to_preempt(policy: str, victim: str) -> None:
    # Nine blocks: prompts take two each, plus one spare each; at the second block boundary one is
    # preempted.
    scheduler = make(num_blocks=9, policy=policy)
    scheduler.add(request("a", 8, 18, priority=2))
    scheduler.add(request("b", 8, 26, priority=1, prompt=(7,) * 8))
    scheduler.add(request("c", 8, 20, priority=1, prompt=(8,) * 8))
    for _ in range(20):
        plan, _ = run(scheduler)
        if plan.num_preempted:
            break
    assert set("abc") - {row.id for row in plan.rows} == {victim}
    assert scheduler.num_waiting == 1
    removed = plan.removed
    assert removed == (victim,)
    assert sorted(drain(scheduler)) == ["a", "b", "c"]


# ---------------------------------------------------------------- background requests

POLICIES = get_args(Policy)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_background_comes_last_under_every_policy(policy: str) -> None:
    scheduler = make(policy=policy, max_num_seqs=1)
    scheduler.add(request("b1", max_tokens=1, priority=-9, background=True))
    scheduler.add(request("b2", max_tokens=1, priority=-9, background=True))
    scheduler.add(request("a1", max_tokens=9, priority=1))
    scheduler.add(request("a2", max_tokens=9, priority=1))
    assert drain(scheduler) == ["a1", "a2", "b1", "b2"]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("short_of", ["places", "blocks"])
def test_the_background_gives_its_place_up_at_once(policy: str, short_of: str) -> None:
    limits = {"max_num_seqs": 2} if short_of == "places" else {"num_blocks": 8}
    scheduler = make(policy=policy, **limits)
    scheduler.add(request("b1", max_tokens=8, priority=-9, background=True))
    scheduler.add(request("b2", max_tokens=9, priority=-9, background=True))
    run(scheduler)
    scheduler.add(request("a", max_tokens=12, priority=1, prompt=(7,) * 20))
    plan, _ = run(scheduler)
    assert [row.id for row in plan.rows] == ["a", "b1"]
    assert plan.removed == ("b2",)
    assert [row.id for row in run(scheduler)[0].rows] == ["a", "b1"], "it is back too soon"
    assert sorted(drain(scheduler)) == ["a", "b1", "b2"]


def test_prompts_in_the_background_take_what_a_step_leaves() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("b", 40, background=True, prompt=tuple(range(40))))
    assert [(row.id, len(row.token_ids)) for row in run(scheduler)[0].rows] == [("b", 8)]
    scheduler.add(request("a", 13, prompt=tuple(range(50, 63))))
    rows = [[(row.id, len(row.token_ids)) for row in run(scheduler)[0].rows] for _ in range(3)]
    assert rows == [[("a", 8)], [("a", 5), ("b", 3)], [("a", 1), ("b", 7)]]


def test_who_runs_comes_before_new_prompts_and_prompts_come_in_chunks() -> None:
    scheduler = make(max_num_batched_tokens=8)
    scheduler.add(request("a", 4))
    run(scheduler)
    scheduler.add(request("b", 20, prompt=tuple(range(20, 40))))
    starts = []
    for _ in range(3):
        plan, _ = run(scheduler)
        first, second = plan.rows
        assert (first.id, len(first.token_ids), first.is_sampled) == ("a", 1, True)
        assert plan.num_tokens <= 8
        starts.append((second.start, len(second.token_ids), second.is_sampled))
    assert starts == [(0, 7, False), (7, 7, False), (14, 6, True)]


def test_what_can_never_fit_is_refused_with_a_sentence() -> None:
    scheduler = make(num_blocks=5, size=4, max_len=100)  # the pool holds 20 tokens
    scheduler.add(request("fits", 10, 10))
    scheduler.add(request("just", 20, 0))
    scheduler.add(request("open", 19, None))
    for id_, num_prompt, max_tokens in (("a", 10, 11), ("b", 20, None), ("c", 20, 1), ("d", 21, 0)):
        with pytest.raises(ContextLengthExceeded, match="maximum context length is 20 tokens"):
            scheduler.add(request(id_, num_prompt, max_tokens))
    with pytest.raises(InvalidParameter, match="at least one token"):
        scheduler.add(request("empty", 0))
    with pytest.raises(InvalidParameter, match="in use"):
        scheduler.add(request("fits"))
    assert sorted(drain(scheduler)) == ["fits", "just", "open"]


def test_a_stop_token_counts_only_after_min_tokens() -> None:
    scheduler = make()
    scheduler.add(request("a", sampling={"min_tokens": 3}))
    outputs = [run(scheduler, token=EOS)[1] for _ in range(3)]
    assert [output.finish_reasons for output in outputs] == [(None,), (None,), ("stop",)]
    assert outputs[-1].stop_token_ids == {"a": EOS}
    scheduler.add(request("b", sampling={"ignore_eos": True, "stop_token_ids": (3,)}))
    assert run(scheduler, token=EOS)[1].finish_reasons == (None,)
    assert run(scheduler, token=3)[1].finish_reasons == ("stop",)


def test_of_several_new_tokens_those_after_the_end_are_dropped() -> None:
    scheduler = make()
    scheduler.add(request("a"))
    plan = scheduler.schedule()
    output = scheduler.update(plan, StepResult(("a",), ((1, EOS, 2),)))
    assert output.token_ids == ((1, EOS),)
    assert output.finish_reasons == ("stop",)


# ---------------------------------------------------------------- forks


def test_forks_wait_for_their_prompt_alone_and_then_compute_one_token_each() -> None:
    scheduler = make(max_num_batched_tokens=8)
    prompt = tuple(range(14))
    scheduler.add(request("a", prompt=prompt))
    for index in (1, 2):
        scheduler.add(request(f"a/{index}", prompt=prompt, fork_of="a"))
    scheduler.add(request("z", 4))
    plans = [run(scheduler)[0] for _ in range(3)]
    assert [[row.id for row in plan.rows] for plan in plans] == [
        ["a"],
        ["a", "z"],  # the forks delay nothing
        ["a", "z", "a/1", "a/2"],
    ]
    forked = plans[2].rows[2:]
    assert [(row.start, row.token_ids) for row in forked] == [(13, (13,))] * 2
    # Three full blocks are shared; each fork has its own copy of the fourth, and "a" continues in
    # its own.
    leader_table = plans[0].rows[0].new_block_ids + plans[1].rows[0].new_block_ids
    assert {row.new_block_ids[:3] for row in forked} == {leader_table[:3]}
    assert {copy.source for copy in plans[2].copies} == {leader_table[3]}
    assert [copy.target for copy in plans[2].copies] == [row.new_block_ids[3] for row in forked]
    assert scheduler.stats().blocks.shared == 3


@pytest.mark.parametrize("end", ["abort", "error"])
def test_when_the_leader_ends_too_early_the_first_fork_leads(end: str) -> None:
    scheduler = make(max_num_batched_tokens=8)
    prompt = tuple(range(14))
    scheduler.add(request("a", prompt=prompt))
    for index in (1, 2):
        scheduler.add(request(f"a/{index}", prompt=prompt, fork_of="a"))
    plan = scheduler.schedule()
    failures = {}
    if end == "abort":
        scheduler.abort("a")
    else:
        failures = {"a": Failure(kind="RequestFailed", message="bad")}
    output = scheduler.update(plan, StepResult(errors=failures))
    assert dict(zip(output.ids, output.finish_reasons, strict=True)) == {"a": end}
    assert [row.id for row in run(scheduler)[0].rows] == ["a/1"]
    while not (plan := run(scheduler)[0]).copies:
        pass
    assert plan.rows[-1].id == "a/2"
    assert sorted(drain(scheduler)) == ["a/1", "a/2"]


# ---------------------------------------------------------------- the cache


def test_a_second_like_request_computes_only_what_is_new() -> None:
    scheduler = make()
    scheduler.add(request("a", 14, 1))
    run(scheduler)
    scheduler.add(request("b", 14, 2))
    plan, output = run(scheduler)
    assert (plan.rows[0].start, output.num_cached_tokens) == (12, {"b": 12})
    stats = scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (28, 12)
    scheduler.add(request("c", 14, 1, sampling={"prompt_logprobs": 0}))
    plan, _ = run(scheduler)
    assert plan.rows[-1].start == 0, "a cached position has no logits to tell of"


def test_waste_is_what_the_last_blocks_have_left_over() -> None:
    scheduler = make()
    scheduler.add(request("a", 14, 8))
    scheduler.add(request("b", 5, 8, prompt=(9,) * 5))
    run(scheduler)
    blocks = scheduler.stats().blocks
    assert (blocks.held, blocks.wasted_slots) == (6, 2 + 3)
    assert blocks.waste == 5 / 24
    drain(scheduler)
    assert scheduler.stats().blocks.wasted_slots == 0
    stats = scheduler.stats()
    assert 0 < stats.slots_wasted_sum < stats.slots_held_sum


def test_a_pool_of_a_quarter_of_the_demand_serves_all_without_thrashing() -> None:
    num_seqs, size = 16, 16
    requests = [
        request(f"r{i}", max_tokens=30 + i * 37 % 90, prompt=tuple(range(i, i + 10 + i * 23 % 70)))
        for i in range(48)
    ]
    demand = sorted(len(r.prompt_token_ids) + (r.sampling.max_tokens or 0) for r in requests)
    scheduler = make(sum(demand[-num_seqs:]) // 4 // size, size, max_num_seqs=num_seqs)
    for each in requests:
        scheduler.add(each)
    preemptions: list[int] = []
    while scheduler.has_work:
        plan, output = run(scheduler)
        assert any(row.is_sampled for row in plan.rows), "a step that brought nobody further"
        preemptions += [timings.num_preemptions for timings in output.timings.values()]
    assert len(preemptions) == len(requests)
    assert sum(preemptions) > 0
    assert max(preemptions) <= 8


# ---------------------------------------------------------------- cost


def count_lines(function: Callable[[], object]) -> int:
    """The number of Python lines that a call runs: a clock independent of machine load."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    previous = sys.gettrace()
    gc.collect()
    gc.disable()  # what it would free in between may run lines of its own
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(previous)
        gc.enable()
    return count


def reachable(root: object) -> list[object]:
    """What an object keeps in memory, other than classes, functions and modules."""
    found, waiting = {id(root): root}, [root]
    while waiting:
        for each in gc.get_referents(waiting.pop()):
            if id(each) not in found and not isinstance(each, (type, FunctionType, ModuleType)):
                found[id(each)] = each
                waiting.append(each)
    return list(found.values())


def _decoding(num_running: int, num_waiting: int = 0) -> Scheduler:
    scheduler = make(num_running * 8, 16, max_num_seqs=num_running)
    for index in range(num_running + num_waiting):
        scheduler.add(request(f"r{index}", 8, 100))
    run(scheduler)
    assert scheduler.num_running == num_running
    return scheduler


def test_a_step_costs_so_much_a_sequence() -> None:
    running = {n: _decoding(n) for n in (32, 64, 128)}
    costs = {n: count_lines(lambda s=s: run(s)) for n, s in running.items()}
    per_sequence = (costs[128] - costs[64]) / 64
    assert costs[64] - costs[32] == pytest.approx(per_sequence * 32, rel=0.1)
    assert per_sequence < 45, "the two loops that see every sequence have grown"


def test_those_who_wait_cost_nothing_a_step() -> None:
    alone, crowded = _decoding(16), _decoding(16, num_waiting=10_000)
    assert count_lines(lambda: run(crowded)) <= count_lines(lambda: run(alone)) + 20
    # Nor do sequences that left the queue unserved, nor a head that finds no room.
    for index in range(16, 10_000):
        crowded.abort(f"r{index}")
    run(crowded)
    assert len(crowded._state.waiting._heap) < 1_000
    assert count_lines(lambda: run(crowded)) <= count_lines(lambda: run(alone)) + 20


def test_the_queue_lets_go_of_those_who_are_aborted() -> None:
    scheduler = make()
    for number in range(65):
        scheduler.add(request(str(number)))
    for number in range(65):
        scheduler.abort(str(number))
    queue = scheduler._state.waiting
    assert not any(isinstance(each, Sequence) for each in reachable(queue))


def test_a_long_prompt_that_finds_no_room_is_looked_up_once() -> None:
    scheduler = make(num_blocks=160, size=4, max_len=640)
    scheduler.add(request("a", 100, 500))
    run(scheduler)
    scheduler.add(request("long", 600, 1, prompt=(1, 2) * 300))
    first, second = (count_lines(lambda: run(scheduler)) for _ in range(2))
    assert second < first / 4


def test_who_finds_no_room_is_admitted_once_its_prompt_is_computed_for_another() -> None:
    scheduler = make(num_blocks=60, size=4)
    for name in "abc":
        scheduler.add(request(name, prompt=(*range(160), ord(name)), max_tokens=30))
    assert [row.request.id for row in run(scheduler)[0].added] == ["a"]
    assert [row.request.id for row in run(scheduler)[0].added] == ["b", "c"]


@pytest.mark.parametrize("max_num_seqs", [8, 256, 1000])
def test_on_a_cpu_prompts_go_on_beside_a_full_batch(max_num_seqs):
    limits = SchedulerConfig(max_num_seqs=max_num_seqs).for_device("cpu")
    assert max_num_seqs + 64 <= limits.step_tokens <= max_num_seqs + 256
    chosen = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=7)
    assert chosen.for_device("cpu").step_tokens == chosen.for_device("cpu").step_budget(8) == 7


def test_on_a_cpu_steps_are_short_while_few_run():
    """Running sequences wait for the prompts of a step."""
    limits = SchedulerConfig(max_num_seqs=1000).for_device("cpu")
    assert [limits.step_budget(running) for running in (0, 16, 192, 256, 1000)] == [
        *(256, 256, 256, 320, 1064)
    ]
    assert SchedulerConfig().for_device("cuda:0").step_budget(1) == 2048


def test_the_adapters_in_use_are_told() -> None:
    """Of running and waiting sequences, through preemptions, ends and aborts."""
    scheduler = make(num_blocks=5, max_num_seqs=2)

    def told() -> tuple[set[str], set[str]]:
        stats = scheduler.stats()
        return set(stats.running_adapters), set(stats.waiting_adapters)

    one, two = (Adapter(id=f"{name}-1", name=name, path=name) for name in ("one", "two"))
    scheduler.add(request("a", 4, 12, adapter=one))
    scheduler.add(request("b", 4, 12, prompt=(7,) * 4, adapter=two))
    scheduler.add(request("c", 4, 12, prompt=(8,) * 4, adapter=one))
    scheduler.add(request("d", 4, 12, prompt=(9,) * 4))
    assert told() == (set(), {"one", "two"})
    run(scheduler)
    assert told() == ({"one", "two"}, {"one"})
    scheduler.abort("c")
    assert told() == ({"one", "two"}, set())
    while not run(scheduler)[0].num_preempted:
        pass
    assert told() == ({"one"}, {"two"})
    drain(scheduler)
    assert told() == (set(), set())


def test_room_that_comes_with_one_sequence_less_is_used_at_once() -> None:
    """It frees no more blocks than others have taken since, but a spare one is not needed more."""
    scheduler = make(num_blocks=20)
    scheduler.add(request("leader", 16, 40))
    scheduler.add(request("fork", 16, 12, fork_of="leader"))
    for _ in range(5):
        run(scheduler)
    scheduler.add(request("waits", prompt=(7,) * 44))
    while "fork" in scheduler.sequences:
        run(scheduler)
    assert "waits" in [row.id for row in run(scheduler)[0].rows]
