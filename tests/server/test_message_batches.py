"""/v1/messages/batches: many messages at once, in Anthropic's formats."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from server.anthropic.batch_results import results
from server.http.public_address import public_address
from tests.server.asgi import running_app
from tests.servers import MODEL, Server, running_server

PATH = "/v1/messages/batches"
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ")


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("message-batches")
    with running_server(home / "log", "--data-dir", str(home / "data")) as server:
        yield server


def ask(id: str, text: str = "What is the capital of France?", **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    params = {"model": MODEL, "max_tokens": 60, "messages": messages, "temperature": 0, **fields}
    return {"custom_id": id, "params": params}


def make(server: Server, requests: list[dict[str, Any]]) -> dict[str, Any]:
    answer = server.post(PATH, {"requests": requests})
    assert answer.status_code == 200, answer.text
    return answer.json()


def end_of(server: Server, id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (batch := server.get(f"{PATH}/{id}").json())["processing_status"] != "ended":
        assert time.monotonic() < deadline, batch
        time.sleep(0.05)
    return batch


def results_of(server: Server, batch: dict[str, Any]) -> dict[str, Any]:
    lines = server.get(batch["results_url"].removeprefix(server.url)).text.splitlines()
    return {told["custom_id"]: told["result"] for told in map(json.loads, lines)}


def delete(server: Server, id: str) -> httpx.Response:
    return httpx.delete(f"{server.url}{PATH}/{id}")


def test_the_url_of_results_is_the_one_that_clients_see(keeping: Server) -> None:
    """Behind a proxy that ends TLS and serves other things besides."""
    batch = end_of(keeping, make(keeping, [ask("a")])["id"])
    where = f"{PATH}/{batch['id']}/results"
    assert batch["results_url"] == keeping.url + where

    def url(**forwarded: str) -> str:
        headers = {f"x-forwarded-{name}": value for name, value in forwarded.items()}
        answer = httpx.get(f"{keeping.url}{PATH}/{batch['id']}", headers=headers)
        assert answer.status_code == 200
        return answer.json()["results_url"]

    assert url(proto="https") == keeping.url.replace("http:", "https:") + where
    told = {"proto": "https", "host": "llm.example:8443", "prefix": "/quire/"}
    assert url(**told) == f"https://llm.example:8443/quire{where}"
    assert url(proto="https, http", host="[2001:db8::1]") == f"https://[2001:db8::1]{where}"
    # What is no scheme, host or path is not put into an answer.
    assert url(proto="javascript", host="a/b?c", prefix="//x y") == keeping.url + where
    # And nothing of it leads to another route.
    prefix = {"x-forwarded-prefix": "/health"}
    assert httpx.get(f"{keeping.url}/health{PATH}", headers=prefix).status_code == 404


@pytest.mark.parametrize(
    ("peer", "trusted", "believed"),
    [
        ("127.0.0.1", [], True),
        ("::1", [], True),
        ("10.1.2.3", [], False),
        ("10.1.2.3", ["192.168.0.0/16", "10.0.0.0/8"], True),
        ("::ffff:10.1.2.3", ["10.1.2.3"], True),
        ("11.1.2.3", ["10.0.0.0/8"], False),
        ("fd00::7", ["fd00::/8"], True),
        ("203.0.113.9", ["*"], True),
        ("unknown", ["10.0.0.0/8"], False),
    ],
)
def test_only_trusted_proxies_are_believed(peer: str, trusted: list[str], believed: bool) -> None:
    scope = {
        "type": "http",
        "scheme": "http",
        "path": "/",
        "query_string": b"",
        "headers": [(b"host", b"inner:8000"), (b"x-forwarded-proto", b"https")],
        "client": (peer, 1),
        "server": ("127.0.0.1", 8000),
    }
    told = public_address(Request(scope), trusted)
    assert told == ("https://inner:8000" if believed else "http://inner:8000")


def test_each_request_is_answered_as_it_would_be_alone(keeping: Server) -> None:
    asked = [ask("a"), ask("b", "What is the capital of Italy?"), ask("c", max_tokens=0)]
    made = make(keeping, asked)
    assert made["type"] == "message_batch"
    assert made["id"].startswith("msgbatch_")
    assert (made["ended_at"], made["results_url"]) == (None, None)
    counts = {"succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    assert made["request_counts"] == {**counts, "processing": 3}
    batch = end_of(keeping, made["id"])
    assert batch["request_counts"] == {**counts, "processing": 0, "succeeded": 2, "errored": 1}
    assert all(STAMP.fullmatch(batch[name]) for name in ("created_at", "expires_at", "ended_at"))
    told = results_of(keeping, batch)
    for request in asked[:2]:
        alone = keeping.post("/v1/messages", request["params"]).json()
        result = told[request["custom_id"]]
        assert result["type"] == "succeeded"
        assert result["message"]["content"] == alone["content"]
        assert result["message"]["usage"]["output_tokens"] == alone["usage"]["output_tokens"]
    refused = keeping.post("/v1/messages", asked[2]["params"]).json()
    assert told["c"]["type"] == "errored"
    assert told["c"]["error"]["error"] == refused["error"]


def test_batches_of_either_kind_are_listed_apart(keeping: Server) -> None:
    ids = [make(keeping, [ask("a", max_tokens=1)])["id"] for _ in range(3)]
    page = keeping.get(PATH, params={"limit": 2}).json()
    assert [batch["id"] for batch in page["data"]] == ids[:0:-1]
    assert (page["first_id"], page["last_id"], page["has_more"]) == (ids[2], ids[1], True)
    after = keeping.get(PATH, params={"limit": 1, "after_id": ids[1]}).json()
    assert [batch["id"] for batch in after["data"]] == ids[:1]
    before = keeping.get(PATH, params={"limit": 1, "before_id": ids[0]}).json()
    assert [batch["id"] for batch in before["data"]] == ids[1:2]
    assert before["has_more"]
    assert keeping.get("/v1/batches").json()["data"] == []
    assert keeping.get(f"/v1/batches/{ids[0]}").status_code == 404
    for params in ({"after_id": "x"}, {"before_id": ids[0], "after_id": ids[1]}):
        answer = keeping.get(PATH, params=params)
        assert (answer.status_code, answer.json()["type"]) == (400, "error")
    for id in ids:
        end_of(keeping, id)


def test_what_was_not_run_is_told(keeping: Server) -> None:
    story = {"max_tokens": 400, "stop_sequences": ["never to be seen"]}
    made = make(keeping, [ask(f"r{n}", "Tell me a story.", **story) for n in range(300)])
    assert keeping.get(f"{PATH}/{made['id']}/results").status_code == 409
    assert delete(keeping, made["id"]).status_code == 409
    cancelled = keeping.post(f"{PATH}/{made['id']}/cancel", {}).json()
    assert cancelled["processing_status"] in ("canceling", "ended")
    assert STAMP.fullmatch(cancelled["cancel_initiated_at"])
    batch = end_of(keeping, made["id"])
    told = results_of(keeping, batch)
    assert set(told) == {f"r{n}" for n in range(300)}
    kinds = [result["type"] for result in told.values()]
    assert kinds.count("canceled") == batch["request_counts"]["canceled"] > 0
    assert kinds.count("succeeded") == batch["request_counts"]["succeeded"]
    assert all(len(result) == 1 for result in told.values() if result["type"] == "canceled")
    gone = delete(keeping, made["id"])
    assert gone.json() == {"id": made["id"], "type": "message_batch_deleted"}
    assert keeping.get(f"{PATH}/{made['id']}").status_code == 404
    assert delete(keeping, made["id"]).json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("requests", "param"),
    [
        ([], "requests"),
        ([ask("a"), ask("a")], "requests.1.custom_id"),
        ([ask("no spaces")], "requests.0.custom_id"),
        ([ask("a", model="another")], "requests.0.params.model"),
        ([{"custom_id": "a", "params": {}}], "requests.0.params.model"),
        ([ask("a", stream=True)], "requests.0.params.stream"),
        ([{"custom_id": "a"}], "requests.0.params"),
    ],
)
def test_a_batch_that_could_not_be_run_is_refused(
    keeping: Server, requests: list[dict[str, Any]], param: str
) -> None:
    answer = keeping.post(PATH, {"requests": requests})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert f"'{param}'" in answer.json()["error"]["message"]


async def test_an_expired_request_says_so(tmp_path) -> None:
    line = {"custom_id": "a", "response": None, "error": {"code": "batch_expired", "message": "m"}}
    (tmp_path / "errors").write_text(json.dumps(line) + "\n")
    (told,) = [chunk async for chunk in results([tmp_path / "errors"])]
    assert json.loads(told) == {"custom_id": "a", "result": {"type": "expired"}}


async def test_the_input_is_on_disk_before_its_batch_exists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    sync = os.fsync

    def recorded(number: int) -> None:
        synced.add(os.fstat(number).st_ino)
        sync(number)

    monkeypatch.setattr(os, "fsync", recorded)
    async with running_app(data_dir=tmp_path) as application:
        answer = await application.post(PATH, requests=[ask("a")]).done()
        assert answer.status == 200, answer.body
        (file,) = json.loads((await application.get("/v1/files")).body)["data"]
        assert (tmp_path / "files" / file["id"]).stat().st_ino in synced
