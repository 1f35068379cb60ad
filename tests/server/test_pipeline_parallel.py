"""The embedded model in pipeline stages, over HTTP: its answers, and the death of a stage."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator

import openai
import pytest

from tests.server.test_tensor_parallel import QUESTIONS, end_and_see, ranks, text_of
from tests.servers import Server, running_server

FLAGS = ("--pipeline-parallel-size", "3", "--dtype", "float32")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def lone_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A single process with the same dtype, which auto need not choose here."""
    log = tmp_path_factory.mktemp("alone") / "server.log"
    with running_server(log, "--dtype", "float32") as running:
        yield running


@pytest.fixture(scope="module")
def staged_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("stages") / "server.log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TMPDIR", str(log.parent))
        with running_server(log, *FLAGS) as running:
            yield running


def test_three_stages_answer_as_one_process(lone_server: Server, staged_server: Server) -> None:
    assert len(ranks(staged_server)) == 3
    for question in QUESTIONS:
        assert text_of(staged_server, question) == text_of(lone_server, question)
    assert "pipeline parallel in 3 stages of " in staged_server.log.read_text()


async def test_a_crowd_is_answered_as_by_one_process(
    lone_server: Server, staged_server: Server
) -> None:
    """Streams with seeds, log-probabilities and a schema, all in flight at once."""

    async def answers(of: Server) -> list[str]:
        async with openai.AsyncOpenAI(base_url=of.url + "/v1", api_key="none") as client:

            async def ask(number: int) -> str:
                schema = {"name": "person", "schema": SCHEMA, "strict": True}
                held = {"response_format": {"type": "json_schema", "json_schema": schema}}
                stream = await client.chat.completions.create(
                    model="quire-demo",
                    messages=[{"role": "user", "content": QUESTIONS[number % 3]}],
                    seed=number,
                    temperature=0.8,
                    max_tokens=48,
                    stream=True,
                    logprobs=number % 2 == 0,
                    **(held if number % 4 == 3 else {"frequency_penalty": 0.3}),
                )
                deltas = [chunk.choices[0].delta.content async for chunk in stream]
                return "".join(text or "" for text in deltas)

            return await asyncio.gather(*map(ask, range(12)))

    alone, staged = await answers(lone_server), await answers(staged_server)
    assert staged == alone
    for held in staged[3::4]:
        assert set(json.loads(held)) == {"name", "age"}


@pytest.mark.slow
def test_a_stream_outlives_a_stage(staged_server: Server) -> None:
    body = {"max_tokens": 200, "ignore_eos": True, "stream": True}
    expected = staged_server.chat(QUESTIONS[2], **{**body, "stream": False}).json()
    last = ranks(staged_server)[-1]
    body |= {
        "model": "quire-demo",
        "messages": [{"role": "user", "content": QUESTIONS[2]}],
        "temperature": 0,
    }
    got, killed = "", False
    url = staged_server.url + "/v1/chat/completions"
    with staged_server._client.stream("POST", url, json=body, timeout=120) as stream:
        for line in stream.iter_lines():
            if not line.startswith("data: {"):
                continue
            got += json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            if len(got) > 40 and not killed:
                last.kill()
                killed = True
    assert killed
    assert got == expected["choices"][0]["message"]["content"]
    assert last.pid not in [process.pid for process in ranks(staged_server)]
    assert "rank 2 (process" in staged_server.log.read_text()


def test_no_stage_is_left_behind_by_a_killed_server(staged_server: Server) -> None:
    end_and_see(staged_server, signal.SIGKILL, 3)  # the last test to use it
    assert not list(staged_server.log.parent.glob("quire-ranks-*"))  # nor a directory


@pytest.mark.slow
def test_stages_of_several_ranks_in_several_engines(
    lone_server: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Two engines of two stages of two ranks: eight processes."""
    log = tmp_path_factory.mktemp("all") / "server.log"
    sizes = ("--pipeline-parallel-size", "2", "--tensor-parallel-size", "2")
    flags = (*sizes, "--data-parallel-size", "2", "--dtype", "float32")
    with running_server(log, *flags) as running:
        assert len(ranks(running)) == 8
        for question in QUESTIONS:
            assert text_of(running, question) == text_of(lone_server, question)
        end_and_see(running, signal.SIGTERM, 8)
