"""The fair policy: the service that each tenant gets, whatever the others send."""

from __future__ import annotations

from collections import Counter

import pytest

from engine.scheduler import Scheduler
from engine.types import StepPlan, StepResult
from tests.engine.scheduler.test_scheduler import count_lines, make, request, run


def fair(**limits: int) -> Scheduler:
    return make(limits.pop("num_blocks", 400), policy="fair", max_len=400, **limits)


def send(
    scheduler: Scheduler, tenant: str, count: int, weight: float = 1.0, **fields: int
) -> list[str]:
    """Add requests of a tenant; returns their ids, which begin with its name."""
    num_prompt, max_tokens = fields.get("num_prompt", 8), fields.get("max_tokens", 20)
    ids = []
    for _ in range(count):
        number = scheduler._num_added
        ids.append(f"{tenant}{number}")
        # No prompts share a prefix, so that the cache hides no computation.
        prompt = (1000 + number, *range(1, num_prompt))
        scheduler.add(
            request(ids[-1], max_tokens=max_tokens, prompt=prompt, tenant=tenant, weight=weight)
        )
    return ids


def served(plan: StepPlan, tokens: Counter[str]) -> None:
    """Add up the service of a step by tenant, the id's first letter; an output token costs two."""
    for row in plan.rows:
        is_decode = len(row.token_ids) == 1 and row.is_sampled
        tokens[row.id[0]] += 2 if is_decode else len(row.token_ids) + 2 * row.is_sampled


@pytest.mark.parametrize("weights", [(1.0, 1.0), (1.0, 3.0), (2.0, 0.5)])
@pytest.mark.parametrize("lengths", [((8, 20), (8, 20)), ((4, 40), (60, 2))])
def test_who_always_has_work_is_served_by_weight(
    weights: tuple[float, float], lengths: tuple[tuple[int, int], tuple[int, int]]
) -> None:
    scheduler = fair(max_num_seqs=8, max_num_batched_tokens=32)
    tokens: Counter[str] = Counter()
    for step in range(600):
        for tenant, weight, (num_prompt, max_tokens) in zip("ab", weights, lengths, strict=True):
            waiting = sum(1 for id in scheduler._state.sequences if id[0] == tenant)
            fields = {"num_prompt": num_prompt, "max_tokens": max_tokens}
            send(scheduler, tenant, max(0, 12 - waiting), weight, **fields)
        plan, _ = run(scheduler)
        if step >= 100:
            served(plan, tokens)
    ratio = tokens["a"] / tokens["b"]
    assert ratio == pytest.approx(weights[0] / weights[1], rel=0.15), tokens


def test_one_alone_is_given_everything() -> None:
    scheduler = fair(max_num_seqs=8)
    send(scheduler, "a", 20)
    run(scheduler)
    assert scheduler.num_running == 8


def first_token(scheduler: Scheduler, id: str, limit: int = 50) -> int:
    """The number of steps until ``id`` has its first token."""
    for step in range(1, limit):
        _, output = run(scheduler)
        if id in output.ids and output.token_ids[output.ids.index(id)]:
            return step
    raise AssertionError(f"{id} was not served")


@pytest.mark.parametrize(
    "limits",
    [{"max_num_seqs": 4}, {"num_blocks": 24}, {"max_num_batched_tokens": 40}],
    ids=["places", "blocks", "tokens"],
)
def test_a_full_machine_makes_room_for_who_has_less(limits: dict[str, int]) -> None:
    scheduler = fair(**limits)
    send(scheduler, "a", 40, num_prompt=12, max_tokens=60)
    for _ in range(12):
        run(scheduler)
    (id,) = send(scheduler, "b", 1, max_tokens=3)
    assert first_token(scheduler, id) == 1
    # The displaced sequence also finishes, as do all others.
    while scheduler.has_work:
        run(scheduler)


def test_a_long_prompt_does_not_hold_up_a_short_one_of_another() -> None:
    scheduler = fair(max_num_batched_tokens=16)
    (long,) = send(scheduler, "a", 1, num_prompt=300, max_tokens=2)
    run(scheduler)
    (short,) = send(scheduler, "b", 1, num_prompt=8, max_tokens=2)
    assert first_token(scheduler, short) == 1
    assert first_token(scheduler, long) > 10


def prompt_tokens(plan: StepPlan) -> Counter[str]:
    """The prompt tokens that a step computes, by tenant."""
    counts: Counter[str] = Counter()
    for row in plan.rows:
        if len(row.token_ids) > 1:
            counts[row.id[0]] += len(row.token_ids)
    return counts


def test_steps_stay_short_while_another_may_come() -> None:
    scheduler = fair(num_blocks=2000, max_num_seqs=8, max_num_batched_tokens=80)
    send(scheduler, "a", 30, num_prompt=40, max_tokens=1)
    plan, _ = run(scheduler)
    assert prompt_tokens(plan)["a"] > 60  # no other tenant is known
    send(scheduler, "b", 1, num_prompt=8, max_tokens=1)
    plan, _ = run(scheduler)
    assert prompt_tokens(plan) == {"b": 8}  # it has the step to itself
    for _ in range(10):
        plan, _ = run(scheduler)
        assert 13 < prompt_tokens(plan)["a"] <= 26
    for _ in range(1200):  # nobody is waited for indefinitely
        live = Counter(id[0] for id in scheduler._state.sequences)
        send(scheduler, "a", max(0, 20 - live["a"]), num_prompt=40, max_tokens=1)
        run(scheduler)
    assert sum(prompt_tokens(run(scheduler)[0])["a"] for _ in range(6)) > 6 * 60


def test_who_yields_comes_to_its_end_all_the_same() -> None:
    scheduler = fair(max_num_seqs=4, max_num_batched_tokens=2)
    many = send(scheduler, "a", 6, num_prompt=20, max_tokens=3)
    for _ in range(800):
        live = Counter(id[0] for id in scheduler._state.sequences)
        send(scheduler, "b", 1 - live["b"], num_prompt=4, max_tokens=1)
        run(scheduler)
    assert not set(many) & set(scheduler._state.sequences)


def test_who_holds_no_more_than_its_share_is_left_alone() -> None:
    scheduler = fair(max_num_seqs=4)
    send(scheduler, "a", 2, max_tokens=50)
    send(scheduler, "b", 20, max_tokens=50)
    for _ in range(20):
        plan, _ = run(scheduler)
        assert not plan.num_preempted
        assert {row.id[0] for row in plan.rows} == {"a", "b"}


def places(scheduler: Scheduler) -> Counter[str]:
    """How many sequences of each tenant run."""
    return Counter(seq.id[0] for seq in scheduler.running)


@pytest.mark.parametrize("end", ["admitted", "aborted"])
def test_who_does_not_wait_any_more_takes_no_share_from_others(end: str) -> None:
    scheduler = fair(max_num_seqs=4)
    send(scheduler, "c", 1, num_prompt=300 if end == "aborted" else 2, max_tokens=1)
    run(scheduler)
    send(scheduler, "a", 8, max_tokens=300)
    for _ in range(5):
        run(scheduler)
    (last,) = send(scheduler, "c", 1, num_prompt=300, max_tokens=1)
    if end == "aborted":
        run(scheduler)
        assert last in scheduler.sequences
        scheduler.abort(last)
    else:
        assert first_token(scheduler, last) == 1
    assert last not in scheduler.sequences
    send(scheduler, "b", 8, max_tokens=300)
    for _ in range(5):
        run(scheduler)
    assert places(scheduler) == {"a": 2, "b": 2}


def test_nobody_is_made_room_for_beyond_its_share_in_one_step() -> None:
    """What the rest of its requests would take is a third tenant's, which has to wait longer."""
    scheduler = fair(max_num_seqs=6)
    send(scheduler, "c", 1, num_prompt=300, max_tokens=1)
    run(scheduler)
    send(scheduler, "a", 12, max_tokens=300)
    run(scheduler)
    send(scheduler, "c", 6, max_tokens=300)
    for _ in range(10):
        run(scheduler)
    assert places(scheduler) == {"a": 6}
    send(scheduler, "b", 6, max_tokens=300)
    run(scheduler)
    assert places(scheduler) == {"a": 4, "b": 2}


def test_a_pause_saves_up_no_more_than_a_burst() -> None:
    scheduler = fair(max_num_seqs=2, max_num_batched_tokens=16)
    halves = Counter[str](), Counter[str]()
    for step in range(5000):
        live = Counter(id[0] for id in scheduler._state.sequences)
        send(scheduler, "a", max(0, 6 - live["a"]))
        if step >= 1000:  # after a long time without any service
            send(scheduler, "b", max(0, 6 - live["b"]))
        plan, _ = run(scheduler)
        if step >= 1000:
            served(plan, halves[step >= 3000])
    first, second = halves
    assert 3500 < first["b"] - first["a"] < 4700
    assert second["a"] / second["b"] == pytest.approx(1.0, rel=0.1)


def test_a_burst_of_who_uses_a_part_of_its_share_does_not_wait() -> None:
    scheduler = fair(max_num_seqs=8)
    send(scheduler, "a", 200, max_tokens=40)
    for _ in range(300):
        run(scheduler)
    burst = send(scheduler, "b", 4, max_tokens=10)
    plan, _ = run(scheduler)
    assert set(burst) <= {row.id for row in plan.rows}
    assert plan.num_preempted <= 4


def test_tenants_that_wait_cost_nothing_a_step() -> None:
    def crowd(num_tenants: int) -> Scheduler:
        scheduler = make(600, max_num_seqs=4, policy="fair")
        for index in range(num_tenants):
            id = f"{index}-"
            scheduler.add(request(id, 8, 100, prompt=(index % 97, *range(7)), tenant=id))
        for _ in range(10):
            run(scheduler)
        return scheduler

    few, many = crowd(20), crowd(5_000)
    assert count_lines(lambda: run(many)) <= count_lines(lambda: run(few)) * 1.2


def test_a_newcomer_that_makes_room_within_its_first_step_is_in_no_part_of_the_plan() -> None:
    """It is admitted before a long prompt that lacks blocks, and has had more service since."""
    scheduler = fair(num_blocks=11, max_num_batched_tokens=16)
    (long,) = send(scheduler, "a", 1, num_prompt=39, max_tokens=1)
    run(scheduler)
    run(scheduler)
    (late,) = send(scheduler, "b", 1, weight=0.1, num_prompt=8, max_tokens=1)
    plan, output = run(scheduler)
    assert plan.num_preempted == 1
    assert [row.id for row in plan.rows] == list(output.timings) == [long]
    assert plan.added == ()
    plan, _ = run(scheduler)
    assert [added.request.id for added in plan.added] == [late]


def test_nobody_makes_room_of_whose_block_the_same_step_makes_a_copy() -> None:
    """What the newcomer loads or copies would go to the very block that is being copied."""
    scheduler = fair(max_num_seqs=3)
    send(scheduler, "b", 1, num_prompt=11, max_tokens=1)
    run(scheduler)
    (first,) = send(scheduler, "a", 1, num_prompt=2)
    fields = {"prompt": (1, 2, 3, 4, 5, 6), "tenant": "a"}
    scheduler.add(request("leader", **fields))
    scheduler.add(request("fork", fork_of="leader", **fields))
    run(scheduler)
    (late,) = send(scheduler, "b", 1)
    plan, _ = run(scheduler)  # with the fork, a has had no less service than b
    (copy,) = plan.copies
    assert copy.source in scheduler.sequences["leader"].table.block_ids
    assert plan.num_preempted == 1
    assert plan.rows.ids == ["leader", "fork", late]
    assert first in scheduler.sequences


def test_a_text_goes_on_beside_a_long_prompt_that_began_before_it() -> None:
    """The short one is admitted before the rest of the long one, and then runs behind it."""
    scheduler = make(num_blocks=800, max_len=3000, policy="fair", max_num_batched_tokens=64)
    scheduler.add(request("long", 2000, tenant="t"))
    run(scheduler)
    scheduler.add(request("short", max_tokens=20, prompt=(1,) * 10, tenant="u"))
    lengths = [{row.id: len(row.token_ids) for row in run(scheduler)[0].rows} for _ in range(20)]
    assert lengths == [{"short": 10, "long": 54}, *[{"short": 1, "long": 63}] * 19]


def test_who_made_room_for_a_long_prompt_does_not_return_before_there_is_room_for_both() -> None:
    """A prompt is computed in chunks, and has its blocks only with the last one."""
    scheduler = make(num_blocks=24, size=1, policy="fair")

    def step() -> tuple[str, ...]:
        plan = scheduler.schedule(max_prompt_tokens=1)
        ids = tuple(row.id for row in plan.rows if row.is_sampled)
        scheduler.update(plan, StepResult(ids, ((1,),) * len(ids)))
        return tuple(row.id for row in plan.rows)

    scheduler.add(request("early", 14, 6, tenant="t"))
    step()
    scheduler.add(request("late", prompt=(1,) * 12, max_tokens=2, tenant="u"))
    assert step() == ("late",), "a tenant whose share is half of the blocks makes room, and waits"
    while "early" not in step():
        pass
    assert "late" not in scheduler.sequences
    assert scheduler.stats().num_preemptions == 1


@pytest.mark.parametrize(
    ("policy", "tenant"), [("fair", "u"), ("fair", "t"), ("priority", "t"), ("priority", "u")]
)
def test_a_long_prompt_in_progress_does_not_delay_one_of_several_steps(
    policy: str, tenant: str
) -> None:
    """Of a tenant that has received less, or of higher priority."""
    scheduler = make(num_blocks=800, max_len=3000, policy=policy, max_num_batched_tokens=64)
    scheduler.add(request("long", 2000, tenant="t", priority=1))
    run(scheduler)
    scheduler.add(request("short", prompt=(1,) * 200, tenant=tenant))
    lengths = [{row.id: len(row.token_ids) for row in run(scheduler)[0].rows} for _ in range(5)]
    assert lengths == [*[{"short": 64}] * 3, {"short": 8, "long": 56}, {"short": 1, "long": 63}]


def test_under_priority_a_long_prompt_is_continued_before_others_that_are_no_more_urgent() -> None:
    scheduler = make(num_blocks=800, max_len=3000, policy="priority", max_num_batched_tokens=64)
    scheduler.add(request("long", 300, priority=1))
    run(scheduler)
    for name, priority in (("equal", 1), ("later", 2)):
        scheduler.add(request(name, prompt=(1, priority) * 30, priority=priority))
    rows = [run(scheduler)[0].rows for _ in range(4)]
    assert [[row.id for row in step] for step in rows] == [
        *[["long"]] * 3,
        ["long", "equal"],
    ]
