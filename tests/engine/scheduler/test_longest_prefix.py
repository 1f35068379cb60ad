"""Longest cached prefix first: the order of admission, its savings, and no starvation."""

from __future__ import annotations

import random

import pytest

from engine.kv_cache.pool import BlockPool
from engine.scheduler import Scheduler
from engine.scheduler.longest_prefix import LongestPrefixPolicy
from engine.scheduler.sequence import Sequence, Status, make_sequence
from tests.engine.scheduler.test_scheduler import count_lines, drain, make, request, run

WINDOW = 64  # the sequences waiting longest, which are looked up
MOST_PASSED_OVER = 64


def prompt(group: int, own: int, num_shared: int = 40) -> tuple[int, ...]:
    """A prompt that starts with its group's tokens."""
    return (*(1000 * group + place for place in range(num_shared)), 500 + own, 7, 8)


def send_groups(scheduler: Scheduler, num_groups: int, num_each: int) -> None:
    """Send one request of each group in turn, so that no two of a group are adjacent."""
    for own in range(num_each):
        for group in range(1, num_groups + 1):
            scheduler.add(request(f"{group}.{own}", max_tokens=2, prompt=prompt(group, own)))


def num_computed(scheduler: Scheduler) -> int:
    """The number of tokens computed until all have ended."""
    total = 0
    while scheduler.has_work:
        plan, _ = run(scheduler)
        total += sum(len(row.token_ids) for row in plan.rows)
    return total


def test_whose_prompt_is_cached_furthest_comes_first() -> None:
    scheduler = make(policy="lpm", max_num_seqs=1)
    scheduler.add(request("first", max_tokens=1, prompt=prompt(1, 0)))
    drain(scheduler)
    scheduler.add(request("none", max_tokens=1, prompt=prompt(2, 0)))
    scheduler.add(request("half", max_tokens=1, prompt=(*prompt(1, 0)[:20], 3, 4, 5)))
    scheduler.add(request("all", max_tokens=1, prompt=prompt(1, 1)))
    scheduler.add(request("late", max_tokens=1, prompt=prompt(1, 2)))
    assert drain(scheduler) == ["all", "late", "half", "none"]


def test_prefixes_that_do_not_fit_side_by_side_are_computed_once_each() -> None:
    # Room for one group's prefix and a sequence: in order of arrival, each request evicts the
    # prefix that the next one needs.
    by_arrival = make(num_blocks=14, policy="fcfs", max_num_seqs=1)
    by_prefix = make(num_blocks=14, policy="lpm", max_num_seqs=1)
    for scheduler in (by_arrival, by_prefix):
        send_groups(scheduler, num_groups=4, num_each=6)
    assert num_computed(by_arrival) == 24 * 44
    assert num_computed(by_prefix) == 24 * 44 - 4 * 5 * 40


def test_who_shares_a_prompt_comes_once_it_is_computed_though_another_found_no_room() -> None:
    scheduler = make(num_blocks=60, size=4, policy="lpm")
    for name, group in (("first", 1), ("other", 2), ("like first", 1)):
        scheduler.add(request(name, max_tokens=20, prompt=prompt(group, len(name), 160)))
    assert [row.request.id for row in run(scheduler)[0].added] == ["first"]
    assert [row.request.id for row in run(scheduler)[0].added] == ["like first"]


def test_who_wants_prompt_logprobs_finds_nothing() -> None:
    """Its prompt is computed anyway, so others go first."""
    scheduler = make(policy="lpm", max_num_seqs=1)
    scheduler.add(request("first", max_tokens=1, prompt=prompt(1, 0)))
    drain(scheduler)
    judged = {"prompt_logprobs": 1}
    scheduler.add(request("judged", max_tokens=1, prompt=prompt(1, 0), sampling=judged))
    scheduler.add(request("half", max_tokens=1, prompt=(*prompt(1, 0)[:20], 3, 4, 5)))
    assert drain(scheduler) == ["half", "judged"]


def test_who_has_no_cached_prefix_is_passed_over_so_often_and_no_oftener() -> None:
    scheduler = make(policy="lpm", max_num_seqs=1)
    scheduler.add(request("first", max_tokens=1, prompt=prompt(1, 0)))
    drain(scheduler)
    scheduler.add(request("none", max_tokens=1, prompt=prompt(2, 0)))
    ended: list[str] = []
    for number in range(2 * MOST_PASSED_OVER):
        scheduler.add(request(f"{number}", max_tokens=1, prompt=prompt(1, number + 1)))
        ended += run(scheduler)[1].timings
    assert ended.index("none") == MOST_PASSED_OVER


def test_a_step_that_admits_nobody_looks_nothing_up() -> None:
    def lines(num_waiting: int) -> int:
        scheduler = make(num_blocks=400, policy="lpm", max_num_seqs=1)
        scheduler.add(request("runs", max_tokens=100))
        for number in range(num_waiting):
            scheduler.add(request(f"{number}", prompt=prompt(number % 7, number)))
        run(scheduler)
        run(scheduler)
        return count_lines(lambda: run(scheduler))

    assert lines(1000) == lines(1)


@pytest.mark.parametrize("seed", range(20))
def test_all_who_wait_come_up_once_with_the_longest_prefix_of_the_window(seed: int) -> None:
    """Random arrivals, departures and preemptions, more than the window holds."""
    rng = random.Random(seed)
    pool = BlockPool(8, 4)
    cached: dict[str, int] = {}
    waiting: list[Sequence] = []
    admitted: list[Sequence] = []
    policy = LongestPrefixPolicy(lambda seq: cached[seq.id], lambda: len(admitted))
    queue = policy.new_queue()

    def sequence(order: int) -> Sequence:
        new = request(f"{order}", background=rng.random() < 0.2)
        return make_sequence(new, order, pool.chain(""), 100, frozenset())

    def in_line() -> list[Sequence]:
        return sorted(waiting, key=lambda seq: (seq.request.background, seq.order))

    num_made = num_in_row = 0
    while num_made < 300 or waiting:
        draw = rng.random()
        if num_made < 300 and draw < 0.6:
            seq = sequence(num_made)
            cached[seq.id] = rng.choice((0, 0, rng.randrange(100)))
            waiting.append(seq)
            queue.push(seq)
            num_made += 1
        elif waiting and draw < 0.7:
            seq = rng.choice(waiting)
            num_in_row *= seq is not in_line()[0]
            waiting.remove(seq)
            queue.discard(seq)
            seq.status = Status.FINISHED
        elif admitted and draw < 0.73:
            seq = admitted.pop(rng.randrange(len(admitted)))
            seq.status = Status.WAITING
            waiting.append(seq)
            queue.push(seq)
        elif waiting and draw < 0.85:
            first, *_ = line = in_line()
            head = queue.head()
            assert head is not None
            assert head is queue.head()
            assert head in line[:WINDOW]
            assert head.request.background == first.request.background
            if num_in_row == MOST_PASSED_OVER:
                assert head is first
            else:
                found = [cached[seq.id] for seq in line[:WINDOW] if not _later(seq, first)]
                assert cached[head.id] == max(found)
            queue.pop(head)
            head.status = Status.RUNNING
            waiting.remove(head)
            admitted.append(head)
            num_in_row = 0 if head is first else num_in_row + 1
    assert queue.head() is None


def _later(seq: Sequence, first: Sequence) -> bool:
    return seq.request.background != first.request.background
