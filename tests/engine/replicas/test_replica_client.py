"""Several engine processes behind one client: the same texts, whichever of them dies."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engine.errors import EngineAsleep, EngineDead, InvalidParameter, RequestFailed
from engine.process import SubprocessClient
from engine.replicas.client import ReplicaClient
from engine.requests import fan_out
from engine.shared import SharedClient
from engine.types import Adapter, Request, RequestOutput, SamplingParams
from tests.engine import fakes
from tests.engine.process.test_clients import MAX_LEN, collect, make_requests, tokens_of, until
from tests.engine.process.test_crashes import check_told_once
from tests.engine.process.test_shared_engine import own_requests, shared_engine

NEW = json.dumps({"new": "weights"})


@asynccontextmanager
async def replicas(
    count: int = 2, per_engine: Callable[[int], dict[str, object]] = lambda index: {}, **options
) -> AsyncIterator[ReplicaClient]:
    """Load several engines for the duration of the block."""
    client = ReplicaClient(
        [
            SubprocessClient(
                fakes.make_config(json.dumps({**options, **per_engine(index)})),
                runner="tests.engine.fakes:load",
            )
            for index in range(count)
        ]
    )
    try:
        await client.start()
        yield client
    finally:
        await client.close()


def kill(client: ReplicaClient, index: int) -> None:
    member = client.members[index]
    assert isinstance(member, SubprocessClient)
    assert member.pid is not None
    os.kill(member.pid, signal.SIGKILL)


def check(requests: list[Request], told: list[list[RequestOutput]]) -> None:
    for request, outputs in zip(requests, told, strict=True):
        text = (tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)
        check_told_once(request.sampling, outputs, len(request.prompt_token_ids))


def held(client: ReplicaClient) -> list[int]:
    """The tokens that each engine holds."""
    return [member.num_tokens for member in client._replicas]


def ask(client: ReplicaClient, requests: list[Request]) -> list[asyncio.Task[list[RequestOutput]]]:
    return [asyncio.create_task(collect(stream)) for stream in client.submit(requests)]


async def test_requests_are_shared_out_and_each_gets_its_own_text() -> None:
    async with replicas(step_s=0.002) as client:
        requests = make_requests(10, 40, logprobs=0, prompt_logprobs=0, ignore_eos=True)
        requests += fan_out("many", (1, 2, 3, 4, 5), SamplingParams(n=4, seed=5, max_tokens=9))
        readers = ask(client, requests)
        assert min(held(client)) >= 4 * 4
        homes = [set(member._streams._streams) for member in client._replicas]
        forks = {"many", "many/1", "many/2", "many/3"}
        assert forks <= homes[0] or forks <= homes[1], "who shares blocks stays together"
        check(requests, await asyncio.gather(*readers))
        assert held(client) == [0, 0]
        assert client.stats.num_running == 0


async def test_of_requests_with_an_id_in_use_none_is_queued_on_any_engine() -> None:
    async with replicas(step_s=0.002) as client:
        requests = make_requests(6, 100, ignore_eos=True)
        told = [collect(stream) for stream in client.submit(requests[:1])]
        before = held(client)
        for refused in (requests[1:4] + requests[:1], requests[1:5] + requests[1:2]):
            with pytest.raises(ValueError, match="in use"):
                client.submit(refused)
        assert held(client) == before
        told += [collect(stream) for stream in client.submit(requests[1:])]
        check(requests, await asyncio.gather(*told))


async def test_a_prompt_goes_where_its_beginning_is_cached() -> None:
    async with replicas(3) as client:
        for number in range(6):
            prefix = tuple(number // 4**k % 4 for k in range(4)) * 8  # 8 blocks of 4 tokens
            for turn in range(3):
                prompt = prefix + (5,) * 4 * turn
                request = Request(
                    id=f"{number}-{turn}",
                    prompt_token_ids=prompt,
                    sampling=SamplingParams(seed=1, max_tokens=2),
                )
                (reader,) = ask(client, [request])
                outputs = await reader
                cached = [o.num_cached_tokens for o in outputs if o.num_cached_tokens is not None]
                assert (cached[0] >= 28) == (turn > 0), (number, turn)
        assert all(member.stats.num_steps for member in client.members), "all were used"
        # A salt separates prefixes in the cache and in routing: there is no affinity.
        salted = msgspec.structs.replace(request, cache_salt="s")
        adapted = msgspec.structs.replace(request, adapter=Adapter("a", "a", "a"))
        roots = {tuple(client._digests(one)[:1]) for one in (request, salted, adapted)}
        assert len(roots) == 3


async def test_streams_go_on_in_the_other_engine_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """They do not wait for the dead one's successor, which cannot load while ``flag`` exists."""
    monkeypatch.setattr("engine.supervisor.MAX_CRASHES", 10_000)
    flag = tmp_path / "flag"

    def options(index: int) -> dict[str, object]:
        return {} if index else {"die_unless_first": str(flag)}

    async with replicas(per_engine=options, step_s=0.004) as client:
        requests = make_requests(8, 100, ignore_eos=True, logprobs=0, prompt_logprobs=0)
        requests += fan_out("many", (1, 2, 3), SamplingParams(n=3, seed=5, max_tokens=100))
        readers = ask(client, requests)
        (aborted,) = client.submit(make_requests(9, 190, ignore_eos=True)[8:])
        await until(lambda: all(member.stats.num_steps > 5 for member in client.members))
        first, second = client.members
        kill(client, 0)
        await until(lambda: not first.alive)
        aborted.abort()
        assert client.alive
        assert client.responsive
        late = make_requests(12, 5)[10:]
        late_readers = ask(client, late)
        check(requests, await asyncio.gather(*readers))
        check(late, await asyncio.gather(*late_readers))
        assert not first.alive, "the successor was waited for"
        assert second.num_resumed >= 3
        assert first.stats.num_running == 0, "a dead engine is told to be busy"
        flag.unlink()
        await until(lambda: first.alive)
        assert not client._orphans
        again = [
            msgspec.structs.replace(request, prompt_token_ids=(5, 5, 5, index))
            for index, request in enumerate(make_requests(4, 30, ignore_eos=True))
        ]
        readers = ask(client, again)
        assert min(held(client)) > 0, "the successor is given nothing"
        check(again, await asyncio.gather(*readers))


@pytest.mark.slow
@pytest.mark.parametrize(
    "seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in range(1, 8))]
)
async def test_nothing_is_lost_in_a_storm_of_kills(
    seed: int, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("engine.supervisor.MAX_CRASHES", 100)
    monkeypatch.setattr("engine.suspects.MAX_FRUITLESS", 100)
    rng = random.Random(seed)
    async with replicas(step_s=0.002) as client:
        done, requests, readers = False, [], []

        async def storm() -> None:
            while not done:
                await asyncio.sleep(rng.uniform(0.05, 0.3))
                victim = rng.randrange(2)
                if client.members[victim].alive:
                    kill(client, victim)

        storming = asyncio.create_task(storm())
        for number in range(60):
            count = rng.choice((1, 1, 3))
            sampling = SamplingParams(
                n=count, seed=number, max_tokens=rng.randrange(1, 120), ignore_eos=True
            )
            prompt = tuple(rng.randrange(3) for _ in range(rng.randrange(1, 30)))
            group = fan_out(f"r{number}", prompt, sampling)
            while True:
                try:
                    streams = client.submit(group)
                    break
                except EngineDead:  # both at once
                    await asyncio.sleep(0.01)
            if rng.random() < 0.1:
                streams[0].abort()
                group, streams = group[1:], streams[1:]
            requests += group
            readers += [asyncio.create_task(collect(stream)) for stream in streams]
            await asyncio.sleep(rng.uniform(0, 0.05))
        check(requests, await asyncio.gather(*readers))
        done = True
        await storming
        assert sum(getattr(one, "num_resumed", 0) for one in client.members) > 10
        await until(lambda: all(one.alive for one in client.members))
        assert held(client) == [0, 0]
        assert not client._orphans


async def test_who_kills_engines_is_given_up_and_the_others_go_on(
    capfd: pytest.CaptureFixture,
) -> None:
    async with replicas(kill="r1") as client:
        _, poison = make_requests(2)
        (reader,) = ask(client, [poison])
        with pytest.raises(RequestFailed, match="died too often"):
            await reader
        await until(lambda: client.alive)
        (reader,) = ask(client, make_requests(1))
        check(make_requests(1), [await reader])


async def test_a_worker_that_starts_does_without_an_engine_that_is_given_up_meanwhile(
    tmp_path: Path,
) -> None:
    async with shared_engine(tmp_path) as engine:
        lost = SharedClient(str(tmp_path / "nobody"))
        client = ReplicaClient([SharedClient(engine.clients[0]._path), lost])
        starting = asyncio.create_task(client.start())
        await asyncio.sleep(0.05)
        lost.give_up(EngineDead("it keeps dying"))
        try:
            await starting
            requests = own_requests(1, 4)
            check(requests, await asyncio.gather(*ask(client, requests)))
        finally:
            await client.close()


async def test_a_worker_does_not_start_where_all_engines_are_given_up(tmp_path: Path) -> None:
    members = [SharedClient(str(tmp_path / name)) for name in ("one", "other")]
    client = ReplicaClient(members)
    starting = asyncio.create_task(client.start())
    await asyncio.sleep(0.05)
    for member in members:
        member.give_up(EngineDead("they keep dying"))
    with pytest.raises(EngineDead, match="keep dying"):
        await starting
    await client.close()


async def test_an_engine_that_is_given_up_leaves_the_others_to_serve(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr("engine.supervisor.MAX_CRASHES", 1)
    async with replicas(step_s=0.002) as client:
        requests = make_requests(8, 60, ignore_eos=True)
        readers = ask(client, requests)
        kill(client, 1)
        check(requests, await asyncio.gather(*readers))
        await until(lambda: client.members[1].dead)
        assert client.alive
        assert not client.dead
        await client.sleep(1, 0.0)  # the surviving ones
        assert client.activity == "asleep"
        await client.wake()
        readers = ask(client, requests)
        kill(client, 0)
        for told in await asyncio.gather(*readers, return_exceptions=True):
            assert isinstance(told, EngineDead)
        assert client.dead
        with pytest.raises(EngineDead):
            client.submit(requests)


async def test_all_sleep_and_all_wake() -> None:
    async with replicas(step_s=0.002) as client:
        requests = make_requests(6, 30, ignore_eos=True)
        readers = ask(client, requests)
        await client.sleep(1, 30.0)
        check(requests, await asyncio.gather(*readers))
        assert [member.activity for member in client.members] == ["asleep"] * 2
        (reader,) = ask(client, requests[:1])
        with pytest.raises(EngineAsleep):
            await reader
        await client.wake()
        assert client.activity == "serving"
        readers = ask(client, requests)
        check(requests, await asyncio.gather(*readers))


async def test_weights_are_exchanged_in_all_and_nobody_who_comes_has_the_old() -> None:
    async with replicas(step_s=0.005) as client:
        requests = make_requests(6, 60, ignore_eos=True)
        readers = ask(client, requests)
        await until(lambda: all(member.stats.num_steps > 2 for member in client.members))
        reloading = asyncio.create_task(client.reload(NEW, 30.0))
        await until(lambda: client.activity == "reloading")
        late = make_requests(8, 5)[6:]
        late_readers = ask(client, late)
        check(late, await asyncio.gather(*late_readers))
        assert client.info.generation == 1
        info = await reloading
        check(requests, await asyncio.gather(*readers))
        assert (info.model, info.generation) == (NEW, 1)
        assert [member.info.generation for member in client.members] == [1, 1]
        with pytest.raises(InvalidParameter, match="not these"):
            await client.reload(json.dumps({"refuse": "not these"}), 0.0)
        assert [member.info.generation for member in client.members] == [1, 1]
        assert client.activity == "serving"


async def test_weights_that_one_cannot_take_are_kept_by_none(
    capfd: pytest.CaptureFixture,
) -> None:
    """The second dies during the reload, and its successor has no room for the weights."""
    async with replicas(step_s=0.005) as client:
        first, second = client._replicas
        reload, asked = second.reload, []

        async def refuse(model: str, timeout_s: float) -> None:
            asked.append(model)
            if len(asked) == 1:
                kill(client, 1)
                raise EngineDead("gone")
            raise InvalidParameter("no room")

        second.reload = refuse
        with pytest.raises(InvalidParameter, match="no room"):
            await client.reload(NEW, 30.0)
        assert asked == [NEW, NEW]
        assert first.info.model == second.info.model != NEW
        second.reload = reload
        readers = ask(client, requests := make_requests(6, 20))
        check(requests, await asyncio.gather(*readers))


async def test_no_text_is_made_by_two_sets_of_weights() -> None:
    """Streams of a dead engine wait for one with the old weights while the others have new ones."""
    async with replicas(step_s=0.03) as client:
        first, second = client._replicas
        requests = make_requests(6, 100, ignore_eos=True)
        readers = ask(client, requests)
        await until(lambda: all(member.stats.num_steps > 5 for member in client.members))
        told = asyncio.create_task(first.reload(NEW, 0.0))  # its own end with it
        await told
        kill(client, 1)
        answers = await asyncio.gather(*readers, return_exceptions=True)
        whole = [index for index, answer in enumerate(answers) if isinstance(answer, list)]
        assert len(whole) == 3
        check([requests[index] for index in whole], [answers[index] for index in whole])
        assert (second.num_resumed, second.num_restarts) == (3, 1)
        assert first.num_resumed == 0


async def test_a_model_that_one_cannot_load_is_loaded_by_none(
    capfd: pytest.CaptureFixture,
) -> None:
    def one_refuses(index: int) -> dict[str, object]:
        return {"refuse": "no such model"} if index else {"load_s": 0.2}

    with pytest.raises(Exception, match="no such model"):
        async with replicas(per_engine=one_refuses):
            pass
