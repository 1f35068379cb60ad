"""Snapshots of steps, requests and blocks are accurate, and taking them changes nothing."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest

from engine.client import EngineClient
from engine.core import EngineCore
from engine.errors import EngineDead
from engine.grammar.compiler import GrammarCompiler
from engine.kv_cache.pool import BlockPool, BlockTable
from engine.monitor import MAX_ENDED, MAX_STEPS, MAX_WAITING_LISTED, RECORDING_TIMEOUT_S, map_blocks
from engine.requests import fan_out
from engine.snapshot import CACHED, HELD, RequestRecord, Snapshot
from engine.types import Grammar, Request, SamplingParams
from tests.engine.core.test_core import MAX_LEN, crowd
from tests.engine.fakes import FakeRunner, expected_output, make_config, make_info
from tests.engine.grammar.test_compiling import SlowBackend
from tests.engine.process.test_clients import collect, make_requests
from tests.engine.process.test_profile_questions import inline, subprocess


class Ticking:
    """A clock that advances by a millisecond on each read; all requests arrive before it."""

    def __init__(self) -> None:
        self.now_s = time.monotonic() + 1000.0

    def __call__(self) -> float:
        self.now_s += 0.001
        return self.now_s


def make_core(
    num_blocks: int = 120, clock: Callable[[], float] | None = None, **given
) -> EngineCore:
    grammars = given.pop("grammars", None)
    runner = FakeRunner(make_info(num_blocks, 4, MAX_LEN))
    return EngineCore(make_config(**given), runner, clock=clock or Ticking(), grammars=grammars)


def run(
    core: EngineCore, requests: list[Request], each: Callable[[Snapshot], None] = lambda _: None
) -> tuple[dict[str, list[int]], Snapshot]:
    """Run all requests with a snapshot after each step; returns the texts and the last snapshot."""
    texts: dict[str, list[int]] = {request.id: [] for request in requests}
    for request in requests:
        core.add(request)
    snapshot = core.snapshot()
    while core.has_work:
        output = core.step()
        for id_, tokens in zip(output.ids, output.token_ids, strict=True):
            texts[id_] += tokens
        snapshot = core.snapshot()
        each(snapshot)
    return texts, snapshot


def in_order(life: RequestRecord, now_s: float) -> bool:
    times = [phase.began_s for phase in life.phases]
    end_s = now_s if life.ended_s is None else life.ended_s
    return times == sorted(times) and times[-1] <= end_s <= now_s


@pytest.mark.parametrize("overlap", [False, True])
def test_lives_under_pressure_are_told_as_they_were(overlap: bool) -> None:
    """With few blocks: sequences are preempted and return, forks share, prefixes are found."""
    core = make_core(num_blocks=14, overlap=overlap, max_num_seqs=6)
    preempted: set[str] = set()

    def check(snapshot: Snapshot) -> None:
        live = [life for life in snapshot.requests if life.ended_s is None]
        assert all(in_order(life, snapshot.now_s) for life in snapshot.requests)
        for life in live:
            if life.phases[-1].kind == "preempted":
                preempted.add(life.id)
                # It may be back in a step in flight, which is not reported yet.
                assert overlap or not life.num_blocks
        running = live[: snapshot.stats.num_running]
        assert sum(life.num_blocks > 0 for life in live) == len(running)
        blocks, stats = snapshot.blocks, snapshot.stats.blocks
        assert sum(blocks.num_held) == stats.held
        assert sum(references > 1 for references in blocks.references) == stats.shared
        owners = Counter(blocks.owners)
        for place, life in enumerate(running):
            # Of a shared block, one holder is reported.
            assert owners[HELD + place] <= life.num_blocks
        assert sum(life.num_blocks for life in running) == sum(blocks.references)
        assert owners[CACHED] <= stats.cached

    requests = crowd(ignore_eos=True)
    texts, snapshot = run(core, requests, check)
    for request in requests:
        assert texts[request.id] == expected_output(request, MAX_LEN)[0]
    ended = {life.id: life for life in snapshot.requests}
    assert set(ended) == {request.id for request in requests}
    for request in requests:
        life = ended[request.id]
        assert life.num_output == len(texts[request.id])
        assert life.num_prompt == len(request.prompt_token_ids)
        assert life.finish_reason == expected_output(request, MAX_LEN)[1]
        kinds = [phase.kind for phase in life.phases]
        assert kinds[:3] == ["queued", "prefill", "decode"]
        assert kinds.count("preempted") == life.num_preemptions
    assert preempted, "nobody was preempted: the test shows too little"
    assert core.stats.num_preemptions == sum(life.num_preemptions for life in snapshot.requests)


def test_steps_add_up() -> None:
    core = make_core(max_num_seqs=4)
    requests = [
        request
        for index in range(6)
        for request in fan_out(
            f"r{index}",
            (index, 1, 2, 3, 4, 5),
            SamplingParams(seed=index, max_tokens=5, ignore_eos=True),
        )
    ]
    texts, snapshot = run(core, requests)
    assert core.stats.num_steps == len(snapshot.steps) < MAX_STEPS
    num_told = sum(map(len, texts.values()))
    for records in (snapshot.steps, snapshot.seconds):
        assert sum(record.num_output_tokens for record in records) == num_told == 30
        assert sum(record.num_prompt_tokens for record in records) == 6 * 6
    assert sum(step.num_prompts for step in snapshot.steps) == 6
    assert sum(step.num_decodes for step in snapshot.steps) == 30 - 6
    assert max(step.num_decodes + step.num_prompts for step in snapshot.steps) == 4
    assert all(0 < step.duration_s < 1 for step in snapshot.steps)
    (life, *_) = snapshot.requests
    assert life.num_steps == 5
    assert life.num_prompt_steps == 1


def test_nothing_is_recorded_before_a_look_nor_long_after_the_last() -> None:
    clock = Ticking()
    core = make_core(clock=clock)

    def some(name: str) -> list[Request]:
        return fan_out(name, (1, 2, 3), SamplingParams(seed=1, max_tokens=6, ignore_eos=True))

    core.add(*some("unseen"))
    while core.has_work:
        core.step()
    snapshot = core.snapshot()
    assert (snapshot.steps, snapshot.requests) == ((), ())
    assert snapshot.stats.num_steps == 6
    _, snapshot = run(core, some("seen"))
    assert [life.id for life in snapshot.requests] == ["seen"]

    clock.now_s += RECORDING_TIMEOUT_S + 1
    core.add(*some("later"))
    while core.has_work:
        core.step()
    assert core.snapshot().steps == ()
    core.add(*some("joined"))
    core.step()
    snapshot = core.snapshot()
    assert [(life.id, life.num_output) for life in snapshot.requests] == [("joined", 1)]


def test_who_looks_late_sees_how_far_all_have_come() -> None:
    core = make_core(max_num_seqs=2)
    for request in crowd(4):
        core.add(request)
    for _ in range(4):
        core.step()
    snapshot = core.snapshot()
    first = snapshot.requests[0]
    assert [phase.kind for phase in first.phases] == ["queued", "prefill", "decode"]
    assert first.num_output >= 2
    assert snapshot.requests[-1].phases[-1].kind == "queued"
    assert all(in_order(life, snapshot.now_s) for life in snapshot.requests)


def test_a_grammar_that_compiles_is_a_phase_of_its_own() -> None:
    backend = SlowBackend()
    core = make_core(grammars=GrammarCompiler(lambda: backend))
    held = SamplingParams(seed=1, max_tokens=2, grammar=Grammar("regex", "bad"))
    core.add(*fan_out("held", (1, 2), held))
    core.step()
    (life,) = core.snapshot().requests
    assert [phase.kind for phase in life.phases] == ["grammar"]
    backend.go.set()
    while core.has_work:
        core.step()
    (life,) = core.snapshot().requests
    assert [phase.kind for phase in life.phases] == ["grammar", "queued"]
    assert (life.finish_reason, life.error) == ("error", "InvalidParameter")


def test_a_crowd_is_told_in_part() -> None:
    core = make_core(max_num_seqs=2)
    requests = crowd(3 * MAX_WAITING_LISTED)
    for request in requests:
        core.add(request)
    core.step()
    snapshot = core.snapshot()
    assert len(snapshot.requests) == snapshot.stats.num_running + MAX_WAITING_LISTED
    assert snapshot.stats.num_waiting > MAX_WAITING_LISTED
    for request in requests:
        core.abort(request.id)
    while core.has_work:
        core.step()
    snapshot = core.snapshot()
    assert len(snapshot.requests) == MAX_ENDED
    assert {life.finish_reason for life in snapshot.requests} == {"abort"}


def test_many_blocks_are_told_in_cells() -> None:
    pool = BlockPool(10_001, 4)
    tables = [BlockTable(), BlockTable()]
    for table, count in zip(tables, (7, 5000), strict=True):
        pool.extend(table, count)
    told = map_blocks(pool, tables)
    assert told.per_cell == 3
    assert len(told.owners) == len(told.num_held) == len(told.references) == 3334
    assert sum(told.num_held) == 5007
    assert Counter(told.owners)[HELD + 1] in range(5000 // 3 - 1, 5000 // 3 + 3)
    assert set(told.owners) == {0, HELD, HELD + 1}


@pytest.mark.parametrize("make", [inline, subprocess])
async def test_a_client_may_look(tmp_path, make: Callable[..., EngineClient]) -> None:
    client = make(tmp_path)
    with pytest.raises(EngineDead):
        await client.snapshot()
    await client.start()
    try:
        assert (await client.snapshot()).requests == ()
        for stream in client.submit(make_requests(3, ignore_eos=True)):
            await collect(stream)
        snapshot = await client.snapshot()
        assert len(snapshot.requests) == 3
        assert sum(step.num_output_tokens for step in snapshot.steps) == sum(
            life.num_output for life in snapshot.requests
        )
        assert snapshot.blocks.per_cell == 1
    finally:
        await client.close()
    with pytest.raises(EngineDead):
        await client.snapshot()
