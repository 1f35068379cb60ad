"""Prompt progress: reported only on request, in order, to the end, and at intervals."""

from __future__ import annotations

import msgspec
import pytest

from engine.core import EngineCore
from engine.prompt_progress import PromptProgress
from engine.types import Request, SamplingParams
from tests.engine.fakes import FakeRunner, expected_output, make_config, make_info

MAX_LEN = 200
PROMPT = tuple(index % 5 for index in range(60))


class Clock:
    """A clock that advances by ``step_s`` on each read."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 100.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def make(step_s: float = 1.0, num_blocks: int = 100, **scheduler) -> EngineCore:
    scheduler = {"max_num_batched_tokens": 8, **scheduler}
    runner = FakeRunner(make_info(num_blocks, 4, MAX_LEN))
    return EngineCore(make_config(**scheduler), runner, clock=Clock(step_s))


def request(id_: str = "a", prompt: tuple[int, ...] = PROMPT, **fields) -> Request:
    sampling = SamplingParams(seed=1, max_tokens=5)
    fields = {"report_progress": True, **fields}
    return Request(id=id_, prompt_token_ids=prompt, sampling=sampling, **fields)


def run(core: EngineCore, *requests: Request) -> dict[str, list[PromptProgress]]:
    """The reports of each request; none come after its first token or its end."""
    told: dict[str, list[PromptProgress]] = {item.id: [] for item in requests}
    texts: dict[str, list[int]] = {item.id: [] for item in requests}
    ended: set[str] = set()
    for item in requests:
        core.add(item)
    while core.has_work:
        output = core.step()
        assert len(set(output.ids)) == len(output.ids)
        for id_, progress in output.progress.items():
            assert not texts[id_], "told behind the first token"
            assert id_ not in ended
            assert id_ in output.ids
            told[id_].append(progress)
        for id_, tokens, reason in zip(
            output.ids, output.token_ids, output.finish_reasons, strict=True
        ):
            texts[id_] += tokens
            ended |= {id_} if reason else set()
    for item in requests:
        assert texts[item.id] == expected_output(item, MAX_LEN)[0]
    return told


@pytest.mark.parametrize("overlap", [False, True])
def test_it_rises_from_chunk_to_chunk_to_the_whole_prompt(overlap: bool) -> None:
    told = run(make(overlap=overlap), request())["a"]
    assert [progress.processed for progress in told] == [8, 16, 24, 32, 40, 48, 56, 60]
    assert {(progress.total, progress.cached) for progress in told} == {(60, 0)}
    times = [progress.elapsed_s for progress in told]
    assert times == sorted(times)
    assert {progress.queue_position for progress in told} == {None}


def test_what_was_cached_counts_from_the_beginning() -> None:
    core = make()
    run(core, request())
    told = run(core, request("b"))["b"]
    assert told[0].cached == 56
    assert all(progress.processed >= 56 for progress in told)
    assert told[-1].processed == 60


def test_who_waits_is_told_its_place() -> None:
    requests = [request(name, (index, *PROMPT)) for index, name in enumerate("abcd")]
    told = run(make(max_num_seqs=1), *requests)
    for index, name in enumerate("abcd"):
        places = [progress.queue_position for progress in told[name]]
        waited = [place for place in places if place is not None]
        assert sorted(set(waited), reverse=True) == list(range(index - 1, -1, -1))
        assert waited == sorted(waited, reverse=True)
        assert places[len(waited) :] == [None] * (len(places) - len(waited))
        assert len(places) > len(waited)
    assert {progress.elapsed_s for progress in told["d"] if progress.queue_position} == {0.0}


def test_only_who_asks_is_told() -> None:
    silent = msgspec.structs.replace(request("b", (3, *PROMPT)), report_progress=False)
    told = run(make(), request(), silent)
    assert told["a"]
    assert not told["b"]


def test_who_goes_on_in_another_engine_has_been_told() -> None:
    whole = expected_output(request(), MAX_LEN)[0]
    core = make()
    core.add(request(resumed_token_ids=tuple(whole[:2])))
    tokens: list[int] = []
    while core.has_work:
        output = core.step()
        assert not output.progress
        tokens += [token for given in output.token_ids for token in given]
    assert whole[:2] + tokens == whole


def test_it_is_told_a_few_times_a_second_and_at_its_end() -> None:
    core = make(step_s=0.0)
    assert [progress.processed for progress in run(core, request())["a"]] == [8, 60]
    both = run(core, request("b", (4, *PROMPT)), request("c", (3, *PROMPT)))
    assert [[progress.processed for progress in both[name]] for name in "bc"] == [[8, 61], [0, 61]]
    assert not core._scheduler._state.progress._reports


def test_a_place_by_what_was_given_is_not_known() -> None:
    requests = [request(name, (index, *PROMPT)) for index, name in enumerate("ab")]
    told = run(make(max_num_seqs=1, policy="fair"), *requests)
    assert {progress.queue_position for progress in told["b"]} == {None}
    assert told["b"][0].processed == 0


def test_who_is_preempted_begins_again_and_comes_to_the_end() -> None:
    requests = [request(name, (index, *PROMPT)) for index, name in enumerate("abc")]
    core = make(num_blocks=24, max_num_batched_tokens=24)
    told = run(core, *requests)
    for name in "abc":
        assert told[name][-1].processed == 61
        assert all(progress.processed <= progress.total for progress in told[name])
    core.add(request("gone"))
    core.step()
    core.abort("gone")
    core.step()
    assert not core._scheduler._state.progress._reports
