"""The load generator's client: it counts tokens correctly and detects broken streams."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.client import Client, HttpError, StreamRecord, _EventReader
from loadtest.scrape import scrape
from tests.loadtest.scripted import Script, scripted_server

BODY = {"prompt": "one two three", "max_tokens": 4}
CHAT = {"messages": [{"role": "user", "content": "one two three"}], "max_tokens": 4}


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", BODY), ("/v1/chat/completions", CHAT)]
)
async def test_a_whole_stream_is_counted(path, body):
    async with scripted_server(Script()) as server:
        client = Client(server.url + "/v1")
        record = await client.stream(path, body)
        client.close()
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.cached_tokens) == (3, 4, 3)
    assert record.finish_reason == "length"
    assert len(record.token_times_s) == 4  # role, finish and usage events carry no output
    times = [record.due_s, record.sent_s, *record.token_times_s, record.end_s]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("fault", "failure"),
    [
        ("busy", "http_503"),
        ("cut", "cut"),
        ("error", "error_event"),
        ("garbage", "bad_event"),
        ("no finish", "no_finish_reason"),
        ("no usage", "usage_too_low"),
        ("no done", "no_done"),
    ],
)
async def test_a_broken_stream_is_a_failure_and_the_next_one_is_not(fault, failure):
    async with scripted_server(Script(fault=fault, every=2)) as server:
        client = Client(server.url)
        seen = [(await client.stream("/v1/completions", BODY)).failure for _ in range(4)]
        client.close()
    assert seen == [None, failure, None, failure]


async def test_an_absent_server_is_a_failure_too():
    record = await Client("http://127.0.0.1:9").stream("/v1/completions", BODY)
    assert record.failure == "connect"


async def test_a_silent_server_times_out():
    class Silent(Script):
        async def serve(self, reader, writer):
            await reader.read()

    async with scripted_server(Silent()) as server:
        record = await Client(server.url, timeout_s=0.05).stream("/v1/completions", BODY)
    assert record.failure == "timeout"


async def test_a_server_that_speaks_something_else_is_no_answer():
    class Alert(Script):  # as TLS answers what is not encrypted
        async def serve(self, reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"\x15\x03\x01\x00\x02\x02F")
            await writer.drain()

    async with scripted_server(Alert()) as server:
        client = Client(server.url)
        with pytest.raises(ConnectionError, match="not HTTP"):
            await client.fetch("GET", "/v1/models")
        assert await scrape(client) == {}
        assert (await client.stream("/v1/completions", BODY)).failure == "cut"


async def test_connections_are_kept_and_errors_carry_the_status():
    async with scripted_server(Script()) as server:
        client = Client(server.url)
        for _ in range(3):
            assert json.loads(await client.fetch("GET", "/v1/models"))["data"]
            with pytest.raises(HttpError) as caught:
                await client.fetch("GET", "/nowhere")
            assert caught.value.status == 404
        client.close()
        assert server.connections == 1


@given(st.lists(st.integers(min_value=1, max_value=40), max_size=60), st.booleans())
def test_the_same_is_counted_wherever_the_network_splits_the_stream(sizes, carriage_returns):
    events = [
        {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
        {"choices": [{"delta": {"content": "é😀"}}]},
        {"choices": [{"delta": {"content": "data: [DONE]"}, "finish_reason": "stop"}]},
        {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 2}},
    ]
    lines = [f"data: {json.dumps(event, ensure_ascii=False)}\n\n" for event in events]
    text = ": hi\n\n" + "".join(lines) + "data: [DONE]\n\n"
    stream = text.replace("\n", "\r\n" if carriage_returns else "\n").encode()
    record = StreamRecord()
    reader = _EventReader(record)
    position = 0
    for size in [*sizes, len(stream)]:
        reader.feed(stream[position : position + size], float(position))
        position += size
    assert reader.failure_reason() is None
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (5, 2, "stop")
    assert len(record.token_times_s) == 2


async def test_a_connection_that_the_server_gave_up_is_no_failure():
    async with scripted_server(Script(closes=True)) as server:
        client = Client(server.url)
        seen = [(await client.stream("/v1/completions", BODY)).failure for _ in range(4)]
        client.close()
    assert seen == [None] * 4
    assert server.connections == 4
