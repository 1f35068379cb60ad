"""Batches through the SDK on a real server, including one that is killed halfway."""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch

from tests.servers import MODEL, Server, running_server

CHAT = "/v1/chat/completions"
ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(scope="module")
def batch_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("batches") / "server.log"
    with running_server(log, "--max-num-seqs", "4", "--max-queued-requests", "0") as running:
        yield running


@pytest.fixture
def client(batch_server: Server) -> Iterator[openai.OpenAI]:
    with client_of(batch_server) as client:
        yield client


def client_of(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat_line(custom_id: str, text: str = "What is the capital of France?", **fields: Any) -> dict:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": {**body, **fields}}


def start(
    client: openai.OpenAI, lines: Iterable[Any], endpoint: str = CHAT, **fields: Any
) -> Batch:
    texts = (line if isinstance(line, str) else json.dumps(line) for line in lines)
    file = client.files.create(file=("in.jsonl", "\n".join(texts).encode()), purpose="batch")
    return client.batches.create(
        input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields
    )


def wait_for(
    client: openai.OpenAI, batch: Batch, condition: Callable[[Batch], Any], limit_s: float = 60
) -> Batch:
    deadline = time.monotonic() + limit_s
    while not condition(batch):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def end_of(client: openai.OpenAI, batch: Batch) -> Batch:
    return wait_for(client, batch, lambda batch: batch.status in ENDED)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    text = client.files.content(file_id).text
    assert text.endswith("\n")
    return [json.loads(line) for line in text.splitlines()]


def test_a_batch_answers_what_the_endpoint_would(client: openai.OpenAI) -> None:
    lines = [chat_line(f"id-{n}", max_tokens=4 + n) for n in range(8)]
    lines.insert(3, chat_line("bad", temperature=9))
    batch = start(client, lines, metadata={"who": "me"})
    assert (batch.status, batch.endpoint, batch.metadata) == ("validating", CHAT, {"who": "me"})
    batch = end_of(client, batch)
    assert batch.status == "completed", batch
    times = (batch.created_at, batch.in_progress_at, batch.finalizing_at, batch.completed_at)
    assert None not in times
    assert list(times) == sorted(times)
    assert batch.expires_at == batch.created_at + 24 * 3600
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 9, "completed": 8, "failed": 1}

    answers = lines_of(client, batch.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"id-{n}" for n in range(8)]
    direct = client.chat.completions.create(**lines[0]["body"])
    response = answers[0]["response"]
    assert (response["status_code"], answers[0]["error"]) == (200, None)
    assert response["request_id"]
    assert response["body"]["choices"][0] == direct.choices[0].to_dict()
    used = sum(answer["response"]["body"]["usage"]["completion_tokens"] for answer in answers)
    assert batch.usage is not None
    assert (batch.usage.output_tokens, batch.model) == (used, MODEL)

    (error,) = lines_of(client, batch.error_file_id)
    assert (error["custom_id"], error["response"]["status_code"]) == ("bad", 400)
    assert error["response"]["body"]["error"]["param"] == "temperature"
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.purpose == "batch_output"


def test_completions_and_a_life_of_the_output(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "prompt": ["The", "A"], "max_tokens": 3, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    life = {"anchor": "created_at", "seconds": 3600}
    batch = end_of(client, start(client, [line], "/v1/completions", output_expires_after=life))
    (answer,) = lines_of(client, batch.output_file_id)
    assert len(answer["response"]["body"]["choices"]) == 2
    assert batch.error_file_id is None
    output = client.files.retrieve(batch.output_file_id or "")
    assert output.expires_at == output.created_at + 3600


def test_embeddings_are_what_the_endpoint_gives(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "input": ["One text", "Another"], "encoding_format": "float"}
    url = "/v1/embeddings"
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": url, "body": {**body, **fields}}
        for n, fields in enumerate(({}, {"dimensions": 0}))
    ]
    batch = end_of(client, start(client, lines, url))
    (answer,) = lines_of(client, batch.output_file_id)
    direct = client.embeddings.create(**body)
    for line, entry in zip(answer["response"]["body"]["data"], direct.data, strict=True):
        assert line["embedding"] == pytest.approx(entry.embedding, abs=2e-2)  # from another batch
    assert batch.usage is not None
    assert batch.usage.input_tokens == direct.usage.prompt_tokens
    (error,) = lines_of(client, batch.error_file_id)
    assert error["response"]["body"]["error"]["param"] == "dimensions"


def test_responses_are_made_and_stored(client: openai.OpenAI) -> None:
    body = {"model": MODEL, "input": "Hello"}
    bodies = [body, {**body, "background": True}]
    url = "/v1/responses"
    lines = [
        {"custom_id": f"{n}", "method": "POST", "url": url, "body": body}
        for n, body in enumerate(bodies)
    ]
    batch = end_of(client, start(client, lines, url))
    (answer,) = lines_of(client, batch.output_file_id)
    made = answer["response"]["body"]
    kept = client.responses.retrieve(made["id"])
    assert kept.output_text == made["output"][0]["content"][0]["text"]
    assert batch.usage is not None
    assert batch.usage.output_tokens == made["usage"]["output_tokens"] > 0
    (error,) = lines_of(client, batch.error_file_id)
    assert error["response"]["body"]["error"]["param"] == "background"


def test_an_input_is_judged_line_by_line(client: openai.OpenAI) -> None:
    good = chat_line("same")
    lines = [
        good,
        "{not json",
        good,
        {**chat_line("m"), "method": "GET"},
        {**chat_line("u"), "url": "/v1/completions"},
        chat_line("n", model="gpt-none"),
        "",
        {**chat_line("b"), "body": []},
        {"method": "POST", "url": CHAT, "body": {}},
        chat_line("s", stream=True),
        "[" * 50_000,
    ]
    batch = end_of(client, start(client, lines))
    assert (batch.status, batch.output_file_id, batch.in_progress_at) == ("failed", None, None)
    assert batch.failed_at
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.line, error.code, error.param) for error in batch.errors.data] == [
        (2, "invalid_json_line", None),
        (3, "duplicate_custom_id", "custom_id"),
        (4, "invalid_method", "method"),
        (5, "invalid_url", "url"),
        (6, "model_not_found", "body.model"),
        (8, "missing_required_parameter", "body"),
        (9, "missing_required_parameter", "custom_id"),
        (10, "invalid_parameter", "body.stream"),
        (11, "invalid_json_line", None),
    ]
    assert all(error.message for error in batch.errors.data)
    assert batch.errors.data[0].message == (
        "The line is not valid JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1)"
    )


def test_a_file_may_begin_with_a_byte_order_mark(client: openai.OpenAI) -> None:
    """Files written on Windows do, with CRLF line ends."""
    lines = "\r\n".join(json.dumps(chat_line(f"{n}", max_tokens=2)) for n in range(2))
    file = client.files.create(file=("in.jsonl", lines.encode("utf-8-sig")), purpose="batch")
    batch = client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    assert len(lines_of(client, end_of(client, batch).output_file_id)) == 2


@pytest.mark.parametrize(("number", "code"), [(0, "empty_file"), (50_001, "too_many_requests")])
def test_an_input_has_between_one_line_and_so_many(
    client: openai.OpenAI, number: int, code: str
) -> None:
    batch = end_of(client, start(client, ["\n", *["{}"] * number]))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [error.code for error in batch.errors.data or []] == [code]


def test_what_cannot_be_a_batch_is_refused(client: openai.OpenAI) -> None:
    other = client.files.create(file=b"{}", purpose="user_data")
    good = client.files.create(file=b"{}", purpose="batch")
    asked = {"input_file_id": good.id, "endpoint": CHAT, "completion_window": "24h"}
    for change, param in (
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"input_file_id": other.id}, "input_file_id"),
        ({"endpoint": "/v1/models"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"k" * 65: "v"}}, "metadata"),
        ({"metadata": {"k": 1}}, "metadata.k"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 9}},
         "output_expires_after.seconds"),
    ):  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.batches.create(**{**asked, **change})
        assert caught.value.param == param
    for look in (client.batches.retrieve, client.batches.cancel):
        with pytest.raises(openai.NotFoundError) as missing:
            look("batch_none")
        assert missing.value.code == "batch_not_found"


def test_a_batch_can_be_cancelled(client: openai.OpenAI, batch_server: Server) -> None:
    slow = [chat_line(f"{n}", max_tokens=200, ignore_eos=True) for n in range(400)]
    batch = start(client, slow)
    wait_for(client, batch, lambda batch: batch.request_counts.completed >= 2)
    with pytest.raises(openai.ConflictError) as caught:
        client.files.delete(batch.input_file_id)
    assert caught.value.code == "file_in_use"
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = end_of(client, batch)
    assert batch.status == "cancelled"
    assert batch.cancelling_at is not None
    assert batch.cancelled_at is not None
    batch_server.wait_idle()
    answers, errors = (lines_of(client, id) for id in (batch.output_file_id, batch.error_file_id))
    assert batch.request_counts is not None
    assert 2 <= len(answers) == batch.request_counts.completed < 400
    assert {error["error"]["code"] for error in errors} == {"batch_cancelled"}
    assert {line["custom_id"] for line in answers + errors} == {str(n) for n in range(400)}
    assert client.batches.cancel(batch.id).status == "cancelled", "twice is once"
    client.files.delete(batch.input_file_id)


def test_others_are_served_as_if_there_were_no_batch(
    client: openai.OpenAI, batch_server: Server
) -> None:
    """All four slots, without queueing, remain available however much of the batch is running."""
    slow = [chat_line(f"{n}", max_tokens=200, ignore_eos=True) for n in range(200)]
    batch = start(client, slow)
    wait_for(client, batch, lambda batch: batch.request_counts.completed >= 2)
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(batch_server.chat(max_tokens=8).status_code)

    for _ in range(3):
        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert statuses == [200] * 12
    assert client.batches.retrieve(batch.id).status == "in_progress"
    client.batches.cancel(batch.id)
    end_of(client, batch)


def test_batches_are_listed_newest_first(client: openai.OpenAI) -> None:
    made = [start(client, [chat_line("a", max_tokens=1)]).id for _ in range(3)]
    page = client.batches.list(limit=2)
    assert ([batch.id for batch in page.data], page.has_more) == (made[:0:-1], True)
    assert client.batches.list(limit=2, after=made[1]).data[0].id == made[0]
    assert {batch.id for batch in client.batches.list(limit=2)} >= set(made), "all pages"
    for id in made:
        assert end_of(client, client.batches.retrieve(id)).status == "completed"


def test_the_window_ends(client: openai.OpenAI, batch_server: Server) -> None:
    slow = [chat_line(f"{n}", max_tokens=200, ignore_eos=True) for n in range(300)]
    batch = start(client, slow)
    wait_for(client, batch, lambda batch: batch.request_counts.completed >= 1)
    with sqlite3.connect(batch_server.log.parent / "data" / "quire.sqlite3", timeout=10) as db:
        db.execute("UPDATE batches SET expires_at = 1 WHERE id = ?", (batch.id,))
    batch = end_of(client, batch)
    assert batch.status == "expired"
    assert batch.expired_at is not None
    answers, errors = (lines_of(client, id) for id in (batch.output_file_id, batch.error_file_id))
    assert len(answers) >= 1
    assert {error["error"]["code"] for error in errors} == {"batch_expired"}
    assert len(answers) + len(errors) == 300


def results(data: Path) -> dict[int, bytes]:
    """The recorded results by line number."""
    with sqlite3.connect(data / "quire.sqlite3", timeout=10) as db:
        return dict(db.execute("SELECT line, result FROM batch_lines"))


def test_killed_in_the_middle_no_line_is_lost_or_done_twice(tmp_path: Path) -> None:
    data = tmp_path / "kept"
    flags = ("--data-dir", str(data))
    lines = [chat_line(f"{n}", max_tokens=40, ignore_eos=True) for n in range(150)]
    with running_server(tmp_path / "1.log", *flags) as server, client_of(server) as client:
        batch = start(client, lines)
        batch = wait_for(client, batch, lambda batch: batch.request_counts.completed >= 30)
        assert batch.status == "in_progress"
        server.process.kill()
        server.process.wait()
    kept = results(data)
    assert 30 <= len(kept) < 150
    with running_server(tmp_path / "2.log", *flags) as server, client_of(server) as client:
        batch = end_of(client, batch)
        answers = client.files.content(batch.output_file_id or "").content.splitlines()
    assert batch.status == "completed"
    assert batch.request_counts is not None
    assert batch.request_counts.to_dict() == {"total": 150, "completed": 150, "failed": 0}
    assert [json.loads(answer)["custom_id"] for answer in answers] == [str(n) for n in range(150)]
    assert all(answers[line - 1] == text for line, text in kept.items()), "it was made again"
    assert results(data) == {}
    assert list((data / "batches").iterdir()) == []


@pytest.mark.slow
def test_the_end_of_a_server_is_not_the_end_of_its_batches(tmp_path: Path) -> None:
    """SIGTERM halfway: no line is recorded as failed, and the next server continues."""
    flags = ("--data-dir", str(tmp_path / "kept"), "--api-workers", "2")
    lines = [chat_line(f"{n}", max_tokens=40, ignore_eos=True) for n in range(60)]
    with running_server(tmp_path / "1.log", *flags) as server, client_of(server) as client:
        batch = start(client, lines)
        wait_for(client, batch, lambda b: b.request_counts.completed >= 5)
        assert server.stop() == 0
    with running_server(tmp_path / "2.log", *flags) as server, client_of(server) as client:
        batch = end_of(client, batch)
        assert batch.status == "completed"
        assert batch.error_file_id is None
        assert len(lines_of(client, batch.output_file_id)) == 60
