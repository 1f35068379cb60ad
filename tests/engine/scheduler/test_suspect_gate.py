"""Requests that an engine may have died of are admitted a few at a time."""

from __future__ import annotations

from collections import Counter

from msgspec import structs

from engine.core import EngineCore
from engine.suspects import LEAST_PROGRESS
from engine.types import Adapter, Request, SamplingParams
from tests.engine.fakes import FakeRunner, expected_output, make_config, make_info
from tests.engine.scheduler.lives import Life
from tests.engine.scheduler.test_scheduler import drain, make, request, run


def suspect(number: int, **fields) -> Request:
    prompt = fields.pop("prompt", (1, 2, number))
    fields = {"max_tokens": 60, **fields}
    return request(f"s{number}", prompt=prompt, is_suspect=True, **fields)


def test_a_suspect_is_admitted_when_the_one_before_has_made_progress() -> None:
    scheduler = make()
    for number in range(3):
        scheduler.add(suspect(number))
    scheduler.add(request("behind", max_tokens=60))
    running = [{row.id for row in run(scheduler)[0].rows} for _ in range(3 * LEAST_PROGRESS + 1)]
    assert running[0] == running[LEAST_PROGRESS - 1] == {"s0"}
    assert running[LEAST_PROGRESS] == {"s0", "s1"}
    assert running[2 * LEAST_PROGRESS] == {"s0", "s1", "s2", "behind"}
    assert len(drain(scheduler)) == 4


def test_the_more_have_made_progress_the_more_are_admitted_at_once() -> None:
    scheduler = make(num_blocks=2000, max_num_seqs=100)
    for number in range(60):
        scheduler.add(suspect(number, max_tokens=None))
    num_tokens: Counter[str] = Counter()
    num_steps = 0
    while scheduler.num_waiting:
        plan, _ = run(scheduler)
        num_steps += 1
        unproven = [row.id for row in plan.rows if num_tokens[row.id] < LEAST_PROGRESS]
        num_proven = sum(count >= LEAST_PROGRESS for count in num_tokens.values())
        assert len(unproven) <= max(1, num_proven // 4)
        num_tokens.update(row.id for row in plan.rows)
    assert num_steps < 20 * LEAST_PROGRESS


def test_those_with_one_prompt_are_admitted_together_and_those_that_end_make_room() -> None:
    scheduler = make()
    for number in range(4):
        scheduler.add(suspect(number, prompt=(1, 2, number // 2), max_tokens=2))
    assert [row.id for row in run(scheduler)[0].rows] == ["s0", "s1"]
    run(scheduler)
    assert [row.id for row in run(scheduler)[0].rows] == ["s2", "s3"]
    run(scheduler)
    assert not scheduler.has_work


def test_an_aborted_suspect_makes_room() -> None:
    scheduler = make()
    scheduler.add(suspect(0))
    scheduler.add(suspect(1))
    run(scheduler)
    scheduler.abort("s0")
    assert [row.id for row in run(scheduler)[0].rows] == ["s1"]


class _AfterDeath(Life):
    def _add(self, request: Request) -> None:
        is_suspect = len(self.told) % 3 != 2
        super()._add(structs.replace(request, is_suspect=is_suspect))


def test_suspects_get_the_same_texts_and_all_of_them_end() -> None:
    for seed in range(150):
        _AfterDeath(seed).run()


class _WithAdapters(FakeRunner):
    def __init__(self) -> None:
        super().__init__(make_info(64, 4, 200))
        self.loaded: list[str] = []

    def load_adapter(self, adapter: Adapter) -> None:
        self.loaded.append(adapter.name)


def test_nothing_is_done_for_a_suspect_before_its_turn() -> None:
    """Its adapter might be what kills engines; so might its grammar or its images."""
    runner = _WithAdapters()
    core = EngineCore(make_config(), runner)
    told: list[tuple[list[str], list[str]]] = []
    core.on_begin = lambda begun, ended: told.append((list(begun), list(ended)))
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    requests = [
        Request(
            id=name,
            prompt_token_ids=(1, 2, number),
            sampling=sampling,
            adapter=Adapter(id=name, name=name, path=""),
            is_suspect=True,
        )
        for number, name in enumerate("ab")
    ]
    for each in requests:
        core.add(each)
    assert (runner.loaded, told) == ([], [])
    texts: dict[str, list[int]] = {"a": [], "b": []}
    while core.has_work:
        assert not core.idle_s
        assert "b" not in runner.loaded or len(texts["a"]) >= LEAST_PROGRESS
        output = core.step()
        for id_, tokens in zip(output.ids, output.token_ids, strict=True):
            texts[id_] += tokens
    assert texts == {each.id: expected_output(each, 200)[0] for each in requests}
    alone = [([name], []) if is_begun else ([], [name]) for name in "ab" for is_begun in (1, 0, 1)]
    assert told == alone, "before and after its adapter is loaded, and before its first step"


def test_a_suspect_keeps_its_place_while_it_waits_for_its_turn() -> None:
    """Else each would wait behind all who came since, one after the other."""
    core = EngineCore(make_config(max_num_seqs=2), _WithAdapters())
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    adapter = Adapter(id="a", name="a", path="")
    for number in range(4):
        prompt = (1, 2, number)
        core.add(
            Request(
                id=f"s{number}",
                prompt_token_ids=prompt,
                sampling=sampling,
                adapter=adapter,
                is_suspect=True,
            )
        )
    for number in range(20):
        core.add(Request(id=f"behind{number}", prompt_token_ids=(3,), sampling=sampling))
    ended: list[str] = []
    while core.has_work:
        output = core.step()
        reasons = zip(output.ids, output.finish_reasons, strict=True)
        ended += [id_ for id_, reason in reasons if reason is not None]
    assert {"s0", "s1", "s2", "s3"} <= set(ended[:8])
    assert len(ended) == 24


def test_a_suspect_that_waits_for_its_turn_is_not_spared_its_deadline() -> None:
    now_s = 0.0
    core = EngineCore(make_config(), _WithAdapters(), clock=lambda: now_s)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    adapter = Adapter(id="a", name="a", path="")
    for name, deadline_s in (("first", None), ("late", 5.0)):
        core.add(
            Request(
                id=name,
                prompt_token_ids=(1,),
                sampling=sampling,
                adapter=adapter,
                is_suspect=True,
                deadline_s=deadline_s,
            )
        )
    core.step()
    now_s = 6.0
    assert core.step().errors["late"].kind == "DeadlineExceeded"


def test_a_suspect_that_waits_for_its_turn_can_be_aborted_and_can_fail() -> None:
    core = EngineCore(make_config(), FakeRunner(make_info(64, 4, 200)))  # adapters are refused
    for name in "abc":
        adapter = Adapter(id=name, name=name, path="")
        core.add(Request(id=name, prompt_token_ids=(1,), adapter=adapter, is_suspect=True))
    core.abort("b")
    ended: dict[str, str | None] = {}
    while core.has_work:
        output = core.step()
        ended |= dict(zip(output.ids, output.finish_reasons, strict=True))
    assert ended == {"a": "error", "b": "abort", "c": "error"}
