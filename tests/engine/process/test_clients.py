"""Both clients: the same guarantees with and without a process boundary."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable

import msgspec
import pytest
import pytest_asyncio

from engine.client import EngineClient, RequestStream
from engine.core import EngineCore
from engine.errors import ContextLengthExceeded, EngineDead, InvalidParameter, RequestFailed
from engine.inline import InlineClient
from engine.process import SubprocessClient
from engine.requests import fan_out
from engine.types import Adapter, EngineOutput, Request, RequestOutput, SamplingParams
from tests.engine import fakes

MAX_LEN = 200  # of the engines that fakes.load creates


def subprocess_client(*, step_timeout_s: float = 0.0, **options: object) -> SubprocessClient:
    config = fakes.make_config(json.dumps(options))
    config = msgspec.structs.replace(config, step_timeout_s=step_timeout_s)
    return SubprocessClient(config, runner="tests.engine.fakes:load")


def inline_client(**options: object) -> InlineClient:
    config = fakes.make_config(json.dumps(options))

    def load(config, on_progress) -> EngineCore:
        return EngineCore(config, fakes.load(config, on_progress))

    return InlineClient(config, load=load)


@pytest_asyncio.fixture(params=[subprocess_client, inline_client], ids=["process", "inline"])
async def start(request: pytest.FixtureRequest) -> AsyncIterator[Callable]:
    """Starts a client of each kind and closes it at the end."""
    clients: list[EngineClient] = []

    async def start(**options: object) -> EngineClient:
        client = request.param(**options)
        clients.append(client)
        await client.start(lambda fraction, what: None)
        return client

    yield start
    for client in clients:
        await client.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)


async def collect(stream: RequestStream) -> list[RequestOutput]:
    """All outputs of a stream."""
    outputs = []
    try:
        while True:
            outputs.append(await stream.next())
    except StopAsyncIteration:
        return outputs


def tokens_of(outputs: list[RequestOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def make_requests(n: int, max_tokens: int = 20, **fields) -> list[Request]:
    requests = []
    for index in range(n):
        sampling = SamplingParams(seed=index, max_tokens=max_tokens, **fields)
        prompt = (1, 2, 3, index % 7)
        requests.append(Request(id=f"r{index}", prompt_token_ids=prompt, sampling=sampling))
    return requests


async def test_each_stream_gets_its_own_text(start: Callable) -> None:
    client = await start()
    heard: list[EngineOutput] = []
    client.on_output(heard.append)
    assert client.alive
    assert client.info.max_model_len == MAX_LEN
    requests = make_requests(10, logprobs=0, prompt_logprobs=0)
    requests += fan_out("many", (1, 2, 3, 4, 5), SamplingParams(n=3, seed=5, max_tokens=9))
    streams = client.submit(requests)
    for request, outputs in zip(
        requests, await asyncio.gather(*map(collect, streams)), strict=True
    ):
        text = (tokens_of(outputs), outputs[-1].finish_reason)
        assert text == fakes.expected_output(request, MAX_LEN)
        assert [output.num_cached_tokens is None for output in outputs[1:]] == [True] * (
            len(outputs) - 1
        )
        assert outputs[-1].timings is not None
        if request.sampling.logprobs is not None:
            told = [entry for output in outputs for entry in output.logprobs or ()]
            assert [entry.token_id for entry in told] == text[0]
            prompt = [entry.token_id for output in outputs for entry in output.prompt_logprobs]
            assert prompt == list(request.prompt_token_ids[1:])
    assert sum(len(tokens) for output in heard for tokens in output.token_ids) == sum(
        len(fakes.expected_output(request, MAX_LEN)[0]) for request in requests
    )
    assert client.stats == heard[-1].stats
    assert (client.stats.num_running, client.stats.blocks.held) == (0, 0)


async def test_a_consumer_that_lags_gets_all_it_missed_at_once(start: Callable) -> None:
    client = await start()
    slow, other = make_requests(2, 50, ignore_eos=True)
    lagging, followed = client.submit([slow, other])
    await collect(followed)
    await collect(client.submit([other])[0])
    outputs = await collect(lagging)
    assert len(outputs) == 1
    assert list(outputs[0].token_ids) == fakes.expected_output(slow, MAX_LEN)[0]
    assert outputs[0].finish_reason == "length"


async def test_a_refusal_is_an_error_of_its_stream_alone(start: Callable) -> None:
    client = await start()
    good = make_requests(1)[0]
    sampling = SamplingParams(max_tokens=1)
    long = Request(id="long", prompt_token_ids=(1,) * 300, sampling=sampling)
    alien = Request(id="alien", prompt_token_ids=(99,), sampling=sampling)
    first, second, third = client.submit([long, good, alien])
    with pytest.raises(ContextLengthExceeded) as caught:
        await first.next()
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(InvalidParameter):
        await third.next()
    assert tokens_of(await collect(second)) == fakes.expected_output(good, MAX_LEN)[0]


async def test_what_cannot_be_queued_fails_alone_and_counts_as_no_step(start: Callable) -> None:
    client = await start()
    heard: list[EngineOutput] = []
    client.on_output(heard.append)
    good, other = make_requests(2)
    assert tokens_of(await collect(client.submit([good])[0]))
    num_steps = sum(output.stats.step_tokens > 0 for output in heard)
    adapter = Adapter(id="a", name="a", path="nowhere")
    (bad,) = client.submit([msgspec.structs.replace(other, adapter=adapter)])
    with pytest.raises(RequestFailed, match="this adapter is bad"):
        await collect(bad)
    assert sum(output.stats.step_tokens > 0 for output in heard) == num_steps
    (stream,) = client.submit([good])
    assert tokens_of(await collect(stream)) == fakes.expected_output(good, MAX_LEN)[0]


async def test_a_bad_row_fails_alone(start: Callable) -> None:
    client = await start(**{"raise": "r1"})
    requests = make_requests(3)
    first, bad, last = client.submit(requests)
    with pytest.raises(RequestFailed, match="this row is bad"):
        await collect(bad)
    for request, stream in ((requests[0], first), (requests[2], last)):
        assert tokens_of(await collect(stream)) == fakes.expected_output(request, MAX_LEN)[0]
    assert client.alive


async def test_an_abort_ends_the_stream_and_frees_its_blocks(start: Callable) -> None:
    client = await start(step_s=0.002)
    ended = asyncio.Event()
    client.on_output(lambda output: ended.set() if "abort" in output.finish_reasons else None)
    (request,) = make_requests(1, 190, ignore_eos=True)
    (stream,) = client.submit([request])
    await stream.next()
    with pytest.raises(ValueError, match="in use"):
        client.submit([request])
    stream.abort()
    stream.abort()
    assert (await collect(stream))[-1].finish_reason == "abort"
    await ended.wait()
    stats = client.stats
    assert (stats.num_running, stats.num_waiting, stats.blocks.held) == (0, 0, 0)
    (again,) = client.submit([request])
    assert tokens_of(await collect(again)) == fakes.expected_output(request, MAX_LEN)[0]


async def test_closing_ends_every_stream(start: Callable) -> None:
    client = await start(step_s=0.002)
    streams = client.submit(make_requests(3, 190, ignore_eos=True))
    await streams[0].next()
    reader = asyncio.create_task(collect(streams[1]))
    await client.close()
    for waiting in (reader, collect(streams[2])):
        with pytest.raises(EngineDead):
            await waiting
    assert not client.alive
    with pytest.raises(EngineDead):
        client.submit(make_requests(1))
    await client.close()


async def test_nothing_is_told_before_the_start() -> None:
    for client in (subprocess_client(), inline_client()):
        assert not client.alive
        with pytest.raises(EngineDead):
            _ = client.info
        with pytest.raises(EngineDead):
            client.submit(make_requests(1))
        await client.close()
