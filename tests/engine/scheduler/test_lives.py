"""The fake-cache property: under any schedule, each request gets its own text.

The second half plants bugs in the engine and checks that the first half detects them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from engine.kv_cache import prefix
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.pool import BlockPool, BlockTable
from engine.pooling import PoolingParams
from engine.scheduler import drafts, passes, planner, results, reuse
from engine.scheduler.drafts import rollback_rejected
from engine.scheduler.passes import rollback_passes
from engine.scheduler.planner import Planner
from engine.scheduler.results import ResultProcessor
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.sequence import Sequence, Status
from engine.scheduler.state import SchedulerState
from engine.scheduler.step import StepBuilder
from tests.engine.scheduler.lives import BrokenContract, Life

NUM_LIVES = 400


def test_no_schedule_changes_a_text_or_loses_a_block() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_LIVES):
        life = Life(seed)
        life.run()
        seen += life.seen
        stats = life.scheduler.stats()
        seen["hits"] += stats.prefix_cache_hits
        seen["accepted"] += stats.drafts.num_accepted_tokens
        seen["refused"] += stats.drafts.num_draft_tokens - stats.drafts.num_accepted_tokens
    events = (
        "preemptions",
        "copies",
        "chunks",
        "shared",
        "hits",
        "resumed",
        "pending",
        "following",
        "embeddings",
        "accepted",
        "refused",
        "passed",
        "passes",
        "offloads",
        "loads",
        "shared out",
        "restores",
        "saves",
    )
    assert all(seen[event] >= 100 for event in (*events, "abort", "error", "stop", "length")), seen
    assert seen["displaced"] >= 50, seen


class _PicturedLife(Life):
    has_images = True


def test_prompts_with_other_images_share_what_comes_before_these_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hits = 0
    for seed in range(60):
        life = _PicturedLife(seed)
        life.run()
        hits += life.scheduler.stats().prefix_cache_hits
    assert hits >= 100
    monkeypatch.setattr(prefix.PrefixChain, "_media_digests", lambda *_: b"")
    lives = (_PicturedLife(seed) for seed in range(60))
    # The blocks of another image or, in stateful models, the snapshot under their name.
    with pytest.raises(BrokenContract, match=r"reads foreign KV|has another's state"):
        any(life.run() for life in lives)


class _WholeLife(_PicturedLife):
    has_whole_images = True


def test_an_image_whose_tokens_see_each_other_is_computed_by_one_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunks = 0
    for seed in range(120):
        life = _WholeLife(seed)
        life.run()
        chunks += life.seen["chunks"]
    assert chunks >= 100
    monkeypatch.setattr(Sequence, "adjust_chunk_end", lambda _, end: end)
    lives = (_WholeLife(seed) for seed in range(120))
    with pytest.raises(BrokenContract, match="sees a part of an image"):
        any(life.run() for life in lives)


# ---------------------------------------------------------------- planted bugs

Plant = Callable[[pytest.MonkeyPatch], None]
PLANTS: list[Plant] = []


def planted(plant: Plant) -> Plant:
    PLANTS.append(plant)
    return plant


@planted
def match_last_token(patch: pytest.MonkeyPatch) -> None:
    match = BlockPool.match
    patch.setattr(BlockPool, "match", lambda self, chain, ids, w: match(self, chain, [*ids, 0], w))


@planted
def keep_stale_digest(patch: pytest.MonkeyPatch) -> None:
    def take_free(self: BlockPool) -> int:
        block = self._next_free()
        self._references[block] = 1
        return block

    patch.setattr(BlockPool, "_take_free", take_free)


@planted
def leak_a_block(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def leak(self: BlockPool, table: BlockTable) -> None:
        release(self, table)
        self._free.pop(5, None)

    patch.setattr(BlockPool, "release", leak)


@planted
def share_what_is_free(patch: pytest.MonkeyPatch) -> None:
    def share(self: BlockPool, table: BlockTable, block_ids: list[int]) -> None:
        for block in block_ids:
            self._references[block] += 1
        self._append(table, block_ids)

    patch.setattr(BlockPool, "share", share)


@planted
def ignore_salt(patch: pytest.MonkeyPatch) -> None:
    chain = BlockPool.chain
    patch.setattr(BlockPool, "chain", lambda self, salt, *others: chain(self, "", *others))


@planted
def forget_parent_in_digest(patch: pytest.MonkeyPatch) -> None:
    digest = prefix._digest
    patch.setattr(prefix, "_digest", lambda key, parent, contents: digest(key, b"", contents))


@planted
def publish_before_it_is_computed(patch: pytest.MonkeyPatch) -> None:
    publish = BlockPool.publish

    def too_much(self, chain, token_ids, table, start, end) -> None:
        publish(self, chain, token_ids, table, start, min(table.capacity, len(token_ids)))

    patch.setattr(BlockPool, "publish", too_much)


@planted
def republish_twins(patch: pytest.MonkeyPatch) -> None:
    def publish(self, chain, token_ids, table, start, end) -> None:
        digests = chain.digests(token_ids, end // self.block_size)
        for index in range(start // self.block_size, end // self.block_size):
            self._digest_of[table.block_ids[index]] = digests[index]
            self._block_of[digests[index]] = table.block_ids[index]

    patch.setattr(BlockPool, "publish", publish)


@planted
def fork_without_copy(patch: pytest.MonkeyPatch) -> None:
    fork = BlockPool.fork
    patch.setattr(BlockPool, "fork", lambda self, table, n: (fork(self, table, n)[0], None))


@planted
def fork_shares_the_last_block(patch: pytest.MonkeyPatch) -> None:
    def fork(self: BlockPool, table: BlockTable, num_tokens: int):
        new = BlockTable()
        self.share(new, table.block_ids[: self.blocks_for(num_tokens)])
        return new, None

    patch.setattr(BlockPool, "fork", fork)


@planted
def fork_before_the_prompt_is_computed(patch: pytest.MonkeyPatch) -> None:
    def usable(state: SchedulerState, seq: Sequence):
        return seq.leader if seq.leader is not None and seq.leader.table.block_ids else None

    patch.setattr(planner, "usable_leader", usable)


@planted
def preemption_keeps_progress(patch: pytest.MonkeyPatch) -> None:
    preempt, start = SchedulerState.preempt, SchedulerState.start
    progress: dict[Sequence, int] = {}

    def keep(self: SchedulerState, seq: Sequence, num_withdrawn: int = 0) -> None:
        progress[seq] = seq.num_computed
        preempt(self, seq, num_withdrawn)

    def resume(self: SchedulerState, seq: Sequence) -> None:
        start(self, seq)
        seq.num_computed = max(seq.num_computed, progress.get(seq, 0) - 1)

    patch.setattr(SchedulerState, "preempt", keep)
    patch.setattr(SchedulerState, "start", resume)


@planted
def preemption_keeps_its_row(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(StepBuilder, "remove_row", lambda self, seq: 0)


@planted
def preemption_is_not_told(patch: pytest.MonkeyPatch) -> None:
    release = SchedulerState._release

    def silent(self: SchedulerState, seq: Sequence) -> None:
        seq.known_to_runner = False
        release(self, seq)

    patch.setattr(SchedulerState, "_release", silent)


@planted
def finish_keeps_blocks(patch: pytest.MonkeyPatch) -> None:
    finish = SchedulerState.finish

    def keep(self: SchedulerState, seq: Sequence, now_s: float) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self.pool, "release", lambda table: None)
            finish(self, seq, now_s)

    patch.setattr(SchedulerState, "finish", keep)


@planted
def output_is_repeated_after_preemption(patch: pytest.MonkeyPatch) -> None:
    take = ResultProcessor._take_prompt_logprobs

    def again(self: ResultProcessor, plan, seqs, result) -> None:
        for seq in seqs:
            seq.num_prompt_logprobs = 0
        take(self, plan, seqs, result)

    patch.setattr(ResultProcessor, "_take_prompt_logprobs", again)


@planted
def vectors_skip_what_is_cached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PoolingParams, "needs_all_positions", False)


@planted
def stop_one_token_late(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def late(self: Scheduler, request, grammar=None) -> None:
        add(self, request, grammar)
        self._state.sequences[request.id].max_num_tokens += 1

    patch.setattr(Scheduler, "add", late)


@planted
def one_more_token_is_planned_behind_the_last(patch: pytest.MonkeyPatch) -> None:
    plan = Planner._plan_running

    def plan_too_much(self: Planner, step: StepBuilder, running: list[Sequence]) -> None:
        for seq in running:
            seq.max_num_tokens += 1
        plan(self, step, running)
        for seq in running:
            seq.max_num_tokens -= 1

    patch.setattr(Planner, "_plan_running", plan_too_much)


@planted
def nobody_is_held_back_whose_mask_is_not_known(patch: pytest.MonkeyPatch) -> None:
    add = Scheduler.add

    def blind(self: Scheduler, request, grammar=None) -> None:
        add(self, request, grammar)
        self._state.sequences[request.id].depends_on_output = False

    patch.setattr(Scheduler, "add", blind)


@planted
def blocks_of_the_aborted_are_released_twice(patch: pytest.MonkeyPatch) -> None:
    take = ResultProcessor.process

    def again(self: ResultProcessor, plan, planned, result, now_s):
        for seq in planned.seqs:
            if seq.status is Status.FINISHED and seq.table.block_ids == []:
                self._state.pool._free[0] = None
        return take(self, plan, planned, result, now_s)

    patch.setattr(ResultProcessor, "process", again)


@planted
def the_window_is_a_token_short(patch: pytest.MonkeyPatch) -> None:
    pass_by = BlockPool.free_leading_blocks
    patch.setattr(
        BlockPool, "free_leading_blocks", lambda self, table, n: pass_by(self, table, n + 1)
    )


@planted
def a_prefix_is_found_without_the_first_block_of_its_window(patch: pytest.MonkeyPatch) -> None:
    match = BlockPool.match

    def short(self: BlockPool, chain, token_ids, window):
        return match(self, chain, token_ids, window and max(1, window - self.block_size))

    patch.setattr(BlockPool, "match", short)


@planted
def a_fork_misses_what_its_leader_gave_back(patch: pytest.MonkeyPatch) -> None:
    def blind(state: SchedulerState, seq: Sequence):
        window, state.window = state.window, None
        try:
            return reuse.usable_leader(state, seq)
        finally:
            state.window = window

    patch.setattr(planner, "usable_leader", blind)


@planted
def blocks_are_given_back_twice(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def again(self: BlockPool, table: BlockTable) -> None:
        table.num_freed = 0
        release(self, table)

    patch.setattr(BlockPool, "release", again)


@planted
def refused_drafts_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    def keep(seq, new_tokens, state, speculator) -> None:
        num_drafts = len(seq.draft_ids) - len(new_tokens) + 1
        rollback_rejected(seq, new_tokens, state, speculator)
        if seq.status is Status.RUNNING:
            seq.num_computed += num_drafts
            state.num_wasted -= num_drafts

    patch.setattr(results, "rollback_rejected", keep)


@planted
def a_sequence_goes_on_before_its_drafts_are_judged(patch: pytest.MonkeyPatch) -> None:
    count = drafts._allocate_draft_blocks

    def forget(seq, ids, state):
        blocks = count(seq, ids, state)
        seq.num_computed -= len(ids)
        state.num_wasted += len(ids)
        seq.draft_ids = ()
        return blocks

    patch.setattr(drafts, "_allocate_draft_blocks", forget)


def _for_longer_texts(plan: Callable[..., Any]) -> Callable[..., Any]:
    """``plan``, as if each text of the step could have three more tokens."""

    def plan_too_many(step, *given):
        for seq in step.seqs:
            seq.max_num_tokens += 3
        planned = plan(step, *given)
        for seq in step.seqs:
            seq.max_num_tokens -= 3
        return planned

    return plan_too_many


@planted
def drafts_go_beyond_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "plan_drafts", _for_longer_texts(drafts.plan_drafts))


@planted
def passes_that_were_not_made_count_as_computed(patch: pytest.MonkeyPatch) -> None:
    def keep(seq, num_made, state) -> None:
        num_missing = seq.num_extra_passes - num_made + 1
        rollback_passes(seq, num_made, state)
        seq.num_computed += num_missing
        state.num_wasted -= num_missing

    patch.setattr(results, "rollback_passes", keep)


@planted
def passes_go_beyond_the_last_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(planner, "plan_passes", _for_longer_texts(passes.plan_passes))


@planted
def somebody_waits_for_passes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(passes, "_allows_more_passes", lambda seq: seq.is_plain and seq.num_pending == 1)


@planted
def the_host_takes_one_block_for_another(patch: pytest.MonkeyPatch) -> None:
    def forget(self: HostTier) -> int:
        return self._evictable.popitem(last=False)[0]

    patch.setattr(HostTier, "_evict_oldest", forget)
    patch.setattr(HostTier, "check", lambda self: [])


@planted
def a_slot_of_the_host_is_overwritten_before_it_is_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "hold", lambda self, slots: None)
    patch.setattr(HostTier, "release", lambda self, slots, loaded=True: None)


@planted
def what_the_host_has_is_not_loaded(patch: pytest.MonkeyPatch) -> None:
    adopt = BlockPool.adopt

    def lose(self: BlockPool, table: BlockTable, prefix) -> list:
        loads = adopt(self, table, prefix)
        if self.tier is not None:
            self.tier.release(load.source for load in loads)
        return []

    patch.setattr(BlockPool, "adopt", lose)


@planted
def slots_of_the_host_are_held_for_good(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HostTier, "release", lambda self, slots, loaded=True: None)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_noticed(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    for seed in range(5 * NUM_LIVES):  # the rarest appears in one life of 150
        try:
            Life(seed).run()
        except (BrokenContract, AssertionError, LookupError, ValueError):
            return
    pytest.fail("no life noticed the bug")
