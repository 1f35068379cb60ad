"""Engines die of a request: that request fails, and its neighbours do not."""

from __future__ import annotations

import asyncio
import json

import pytest

from engine import suspects
from engine.client import RequestStream
from engine.errors import RequestFailed
from engine.process import SubprocessClient
from engine.requests import fan_out
from engine.streams import Stream, StreamTable
from engine.types import EngineOutput, Request, SamplingParams
from tests.engine import fakes
from tests.engine.process.test_clients import MAX_LEN, collect, tokens_of


def deadly_client(*, max_num_seqs: int = 16, **options: object) -> SubprocessClient:
    config = fakes.make_config(json.dumps(options), max_num_seqs=max_num_seqs)
    return SubprocessClient(config, runner="tests.engine.deadly_fakes:load")


def requests(name: str, count: int, max_tokens: int = 40) -> list[Request]:
    """Requests with different prompts."""
    return [
        Request(
            id=f"{name}{index}",
            prompt_token_ids=(*map(int, f"{index:03b}"), *map(ord_of, name)),
            sampling=SamplingParams(seed=index, max_tokens=max_tokens, ignore_eos=True),
        )
        for index in range(count)
    ]


def ord_of(letter: str) -> int:
    return ord(letter) % fakes.VOCAB


async def check(asked: list[Request], streams: list[RequestStream]) -> None:
    """Each has its whole text, each token once."""
    for request, outputs in zip(asked, await asyncio.gather(*map(collect, streams)), strict=True):
        text = (tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)


async def check_failed(streams: list[RequestStream]) -> None:
    for stream in streams:
        with pytest.raises(RequestFailed, match="died too often"):
            await collect(stream)


@pytest.mark.parametrize("at", [0, 20], ids=["at once", "later"])
async def test_neighbours_of_a_request_that_kills_engines_go_on(
    at: int, capfd: pytest.CaptureFixture
) -> None:
    client = deadly_client(poison="poison", at=at, step_s=0.001)
    await client.start()
    running = requests("r", 7)
    streams = client.submit(running)
    await asyncio.gather(*(stream.next() for stream in streams))  # all are running
    # What they have got so far has been taken.
    told = [list(stream._token_ids[: stream._num_read]) for stream in map(as_stream, streams)]
    poison = client.submit(requests("poison", 1))
    await check_failed(poison)
    for request, before, outputs in zip(
        running, told, await asyncio.gather(*map(collect, streams)), strict=True
    ):
        text = (before + tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)
    assert (client.num_restarts, client.alive) == (2, True)
    await client.close()


def as_stream(stream: RequestStream) -> Stream:
    assert isinstance(stream, Stream)
    return stream


async def test_who_only_waits_while_engines_die_is_not_suspected(
    capfd: pytest.CaptureFixture,
) -> None:
    client = deadly_client(poison="poison", max_num_seqs=1)
    await client.start()
    poison, *waiting = requests("poison", 1) + requests("r", 5)
    first, *others = client.submit([poison, *waiting])
    await check_failed([first])
    assert not any(as_stream(stream).is_suspect for stream in others)
    await check(waiting, others)
    await client.close()


async def test_all_continuations_of_a_prompt_that_kills_engines_fail_together(
    capfd: pytest.CaptureFixture,
) -> None:
    """Else each would cost engines of its own, and the third is the last."""
    client = deadly_client(poison="poison", step_s=0.001)
    await client.start()
    others = requests("r", 6)
    sampling = SamplingParams(n=3, seed=1, max_tokens=40, ignore_eos=True)
    twin = Request(id="poison-too", prompt_token_ids=(6, 6, 6), sampling=sampling)
    killers = [*fan_out("poison", (6, 6, 6), sampling), twin]
    streams = client.submit([*others[:3], *killers, *others[3:]])
    await check_failed(streams[3:7])
    await check(others, [*streams[:3], *streams[7:]])
    assert client.num_restarts == 2
    await client.close()


# ---------------------------------------------------------------- without processes


def a_table(*ids: str) -> tuple[StreamTable, list[Stream]]:
    table = StreamTable(lambda request_id: None)
    prompts = {request_id: (number,) for number, request_id in enumerate(ids)}
    return table, table.open([Request(id=id_, prompt_token_ids=prompts[id_]) for id_ in ids])


def restart(table: StreamTable, ids: str) -> list[Request]:
    """Let an engine die that has begun ``ids``; what the next one is sent."""
    table.begin(list(ids))
    return table.adopt(table.pop_all())


def test_suspects_are_sent_first_and_those_that_got_furthest_last() -> None:
    table, _ = a_table(*"abcd")
    output = EngineOutput(ids=("b",), token_ids=((1, 2, 3),), finish_reasons=(None,))
    table.dispatch(output)
    sent = restart(table, "bc")
    assert [(request.id, request.is_suspect) for request in sent] == [
        *(("c", True), ("b", True)),
        *(("a", False), ("d", False)),
    ]


def test_a_suspect_that_has_not_been_begun_again_remains_one() -> None:
    table, (a, b, _) = a_table(*"abc")
    restart(table, "ab")
    assert restart(table, "c")[-1].is_suspect
    assert (a.is_suspect, b.is_suspect) == (True, True)
    restart(table, "b")
    with pytest.raises(RequestFailed):
        asyncio.run(b.next())
    assert not a.is_suspect, "acquitted"


def test_one_that_was_preempted_only_waits() -> None:
    table, (a, b) = a_table(*"ab")
    table.begin(["a", "b"])
    table.begin(["b"], ["a"])
    table.adopt(table.pop_all())
    assert (a.is_suspect, b.is_suspect) == (False, True)


def test_progress_clears_of_suspicion() -> None:
    table, (a,) = a_table("a")
    for _ in range(4):
        (request,) = restart(table, "a")
        assert request.is_suspect
        tokens = tuple(range(suspects.LEAST_PROGRESS))
        table.dispatch(EngineOutput(ids=("a",), token_ids=(tokens,), finish_reasons=(None,)))
    assert not a.is_unproven
