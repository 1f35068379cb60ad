"""Snapshots of states: random use of the bookkeeping, and bugs that the lives must detect."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from engine.config import SchedulerConfig
from engine.kv_cache.pool import BlockPool
from engine.kv_cache.snapshots import SnapshotPool
from engine.scheduler import Scheduler, planner, results, reuse, snapshots
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import StepBuilder
from engine.types import StateCopy
from tests.engine.fakes import FakeRunner
from tests.engine.scheduler.lives import BrokenContract, Life
from tests.engine.scheduler.test_scheduler import request, run
from tests.engine.stateful_fakes import _Stateful

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: list[Plant] = []


def planted(plant: Plant) -> Plant:
    PLANTS.append(plant)
    return plant


@planted
def a_snapshot_is_found_before_it_is_made(patch: pytest.MonkeyPatch) -> None:
    take = SnapshotPool.reserve

    def at_once(self: SnapshotPool, digest: bytes, *, low_priority: bool) -> int | None:
        line = take(self, digest, low_priority=low_priority)
        if line is not None:
            self.complete((line,))
        return line

    patch.setattr(SnapshotPool, "reserve", at_once)
    patch.setattr(SnapshotPool, "cancel", lambda self, lines: None)
    land = SnapshotPool.complete
    patch.setattr(
        SnapshotPool, "complete", lambda self, lines: land(self, set(lines) & set(self._pending))
    )


@planted
def blocks_without_a_state_are_gone_on_from(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots, "prefix_with_snapshot", lambda pool, seq, prefix: prefix)
    patch.setattr(snapshots, "plan_restore", lambda pool, step, seq: None)


@planted
def a_fork_takes_its_leaders_blocks(patch: pytest.MonkeyPatch) -> None:
    def blind(state: SchedulerState, seq):
        kept, state.pool.snapshots = state.pool.snapshots, None
        try:
            return reuse.usable_leader(state, seq)
        finally:
            state.pool.snapshots = kept

    patch.setattr(planner, "usable_leader", blind)


@planted
def who_is_taken_out_of_a_step_still_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(snapshots, "cancel_copies", lambda pool, step, seq: None)


@planted
def a_state_is_copied_a_block_early(patch: pytest.MonkeyPatch) -> None:
    plan_save = snapshots.plan_save

    def early(pool: BlockPool, step: StepBuilder, seq, end: int) -> None:
        plan_save(pool, step, seq, end - pool.block_size)

    patch.setattr(snapshots, "plan_save", early)


@planted
def what_makes_room_keeps_its_name(patch: pytest.MonkeyPatch) -> None:
    def next_line(self: SnapshotPool, *, low_priority: bool) -> int | None:
        if self._free:
            return self._free.pop()
        return next(iter(self._line_of.values()), None)

    patch.setattr(SnapshotPool, "_next_line", next_line)


@planted
def a_step_never_lands(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SnapshotPool, "complete", lambda self, lines: None)


@planted
def a_state_is_copied_behind_drafts(patch: pytest.MonkeyPatch) -> None:
    lay = planner.plan_drafts

    def lay_and_save(step: StepBuilder, state, speculator) -> None:
        lay(step, state, speculator)
        for seq in step.seqs:
            if seq.draft_ids and state.pool.snapshots is not None and seq.id not in step.saves:
                digest = seq.chain.digests(seq.token_ids, 1)[:1]
                if digest and (line := state.pool.snapshots.reserve(digest[0], low_priority=True)):
                    step.saves[seq.id] = StateCopy(seq.id, line)

    patch.setattr(planner, "plan_drafts", lay_and_save)


@planted
def a_kept_token_is_computed_again(patch: pytest.MonkeyPatch) -> None:
    settle = results.rollback_rejected

    def short(seq, new_tokens, state, speculator) -> None:
        num_refused = len(seq.draft_ids) + 1 - len(new_tokens)
        settle(seq, new_tokens, state, speculator)
        if num_refused and seq.num_computed > seq.num_prompt:
            seq.num_computed -= 1  # and is computed again: keys and values are the same

    patch.setattr(results, "rollback_rejected", short)


@planted
def a_refused_draft_stays_in_the_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Stateful, "_choose", FakeRunner._choose)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    lives = (Life(seed) for seed in range(3000))
    for life in lives:
        if life.keeps_states and life.pool.snapshots is not None:
            try:
                life.run()
            except (BrokenContract, AssertionError, LookupError, ValueError):
                return
    pytest.fail("no life noticed the bug")


def test_the_books_are_whole_and_names_lead_to_what_was_made() -> None:
    """Compared with a plain record of what each line holds."""
    for seed in range(200):
        rng = random.Random(seed)
        pool = SnapshotPool(rng.randint(1, 6))
        holds: dict[int, bytes] = {}
        steps: list[dict[int, bytes]] = []
        for _ in range(200):
            digest = bytes([rng.randrange(12)])
            what = rng.random()
            if what < 0.5:
                line = pool.reserve(digest, low_priority=rng.random() < 0.5)
                if line is not None:
                    assert all(line not in step for step in steps), "taken twice"
                    holds.pop(line, None)
                    steps.append({line: digest})
            elif what < 0.75 and steps:
                step = steps.pop(0)
                pool.complete(step)
                holds |= step
            elif what < 0.85 and steps:
                pool.cancel(steps.pop(rng.randrange(len(steps))))
            elif pool.longest_prefix([digest], 1):
                assert holds[pool.use(digest)] == digest
            assert pool.check() == []
            assert pool.num_usable == len(holds)
            assert all(pool.longest_prefix([held], 1) for held in holds.values())


def make(pool: SnapshotPool, digest: bytes, *, low_priority: bool = False) -> int | None:
    line = pool.reserve(digest, low_priority=low_priority)
    if line is not None:
        pool.complete((line,))
    return line


def test_the_oldest_makes_room_and_what_was_used_is_young() -> None:
    pool = SnapshotPool(2)
    first, second = make(pool, b"a"), make(pool, b"b")
    assert pool.use(b"a") == first
    assert make(pool, b"c") == second
    assert [bool(pool.longest_prefix([name], 1)) for name in (b"a", b"b", b"c")] == [
        True,
        False,
        True,
    ]


def test_snapshots_in_passing_displace_none_but_each_other() -> None:
    pool = SnapshotPool(2)
    make(pool, b"kept")
    line = make(pool, b"1", low_priority=True)
    assert make(pool, b"2", low_priority=True) == line
    assert pool.longest_prefix([b"kept"], 1)
    assert pool.use(b"2") == line  # a sequence has continued from it
    assert make(pool, b"3", low_priority=True) is None
    assert make(pool, b"new") is not None
    assert not pool.longest_prefix([b"kept"], 1)


def test_the_longest_prefix_with_a_snapshot_is_found() -> None:
    pool = SnapshotPool(4)
    text = [b"1", b"2", b"3", b"4"]
    assert pool.longest_prefix(text, 4) == 0
    make(pool, b"1")
    make(pool, b"3")
    assert [pool.longest_prefix(text, count) for count in (0, 1, 2, 3, 4)] == [0, 1, 1, 3, 3]
    pool.clear()
    assert pool.longest_prefix(text, 4) == 0
    assert pool.check() == []


def test_a_line_comes_back_with_a_step_that_is_not_run() -> None:
    """A prompt's chunk is planned with its snapshot, and preempted for a text behind it."""
    pool = BlockPool(6, 4, snapshots=SnapshotPool(3))
    config = SchedulerConfig(policy="sjf", max_num_batched_tokens=6)
    scheduler = Scheduler(config, pool, max_model_len=24, recurrent=True)
    scheduler.add(request("prompt", 21, 3))
    run(scheduler)
    scheduler.add(request("text", prompt=(1, 2), max_tokens=4))
    plans = [run(scheduler)[0] for _ in range(4)]
    assert [bool(plan.saves) for plan in plans] == [True, True, True, False]
    assert plans[-1].removed == ("prompt",)
    while scheduler.has_work:
        assert pool.check(scheduler.tables) == []
        run(scheduler)
    assert pool.check([]) == []
