"""Stored chat completions: through the openai SDK, by key, page by page, across restarts."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from server.settings import Settings
from server.state import ServerState
from server.store.chats import ChatStore, StoredChat
from server.store.database import Database, StoreError
from server.store.retention import purge
from tests.server.asgi import running_app
from tests.servers import MODEL, Server, running_server

PATH = "/v1/chat/completions"
KEYS = {"anna": "sk-quire-test-anna", "ben": "sk-quire-test-ben"}
FRANCE = "What is the capital of France?"


def make(client: openai.OpenAI, text: str = FRANCE, **fields: Any) -> Any:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": text}], "name": "anna"},
    ]
    return client.chat.completions.create(
        model=MODEL, messages=messages, temperature=0, store=True, **fields
    )


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    home = tmp_path_factory.mktemp("chats")
    keys = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in KEYS.items()
    ]
    (home / "keys.yaml").write_text(json.dumps({"keys": keys}))
    return ["--data-dir", str(home / "data"), "--api-key-file", str(home / "keys.yaml")]


@pytest.fixture(scope="module")
def keeping(flags: list[str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "log"
    with running_server(log, *flags, key=KEYS["anna"]) as server:
        yield server


@pytest.fixture
def client(keeping: Server) -> Iterator[openai.OpenAI]:
    url = keeping.url + "/v1"
    with openai.OpenAI(base_url=url, api_key=KEYS["anna"], max_retries=0) as client:
        yield client


def test_what_was_answered_is_found_again(client: openai.OpenAI, keeping: Server) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    answer = make(
        client, metadata={"a": "b"}, seed=3, n=2, logprobs=True, tools=[tool], tool_choice="none"
    )
    kept = client.chat.completions.retrieve(answer.id).to_dict()
    assert {name: kept[name] for name in answer.to_dict()} == answer.to_dict()
    told: dict[str, Any] = {**kept["tools"][0]["function"]}
    assert (told["name"], told["parameters"]) == ("f", {"type": "object"})
    expected = {"metadata": {"a": "b"}, "seed": 3, "temperature": 0, "tool_choice": "none"}
    assert {name: kept[name] for name in expected} == expected
    unstored = keeping.chat().json()["id"]
    for lookup in (
        lambda: client.chat.completions.retrieve(unstored),
        lambda: client.chat.completions.update(unstored, metadata={}),
        lambda: client.chat.completions.delete(unstored),
        lambda: client.chat.completions.messages.list(unstored),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            lookup()
        assert caught.value.param == "completion_id"


def test_a_stream_is_kept_whole(client: openai.OpenAI) -> None:
    whole = make(client, logprobs=True)
    options = {"include_usage": True}
    chunks = list(make(client, stream=True, logprobs=True, stream_options=options))
    kept = client.chat.completions.retrieve(chunks[0].id)
    assert kept.choices[0].to_dict() == whole.choices[0].to_dict()
    assert kept.usage is not None
    assert kept.usage.completion_tokens == chunks[-1].usage.completion_tokens
    plain = list(make(client, stream=True))
    assert client.chat.completions.retrieve(plain[0].id).choices[0].message == (
        whole.choices[0].message
    )


def test_calls_are_kept_as_they_were_told(client: openai.OpenAI) -> None:
    parameters = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 8}}}
    tool = {"type": "function", "function": {"name": "look", "parameters": parameters}}
    fields = {"tools": [tool], "tool_choice": {"type": "function", "function": {"name": "look"}}}
    chunks = list(make(client, stream=True, **fields))
    deltas = [
        call.function.arguments or ""
        for chunk in chunks
        for call in chunk.choices[0].delta.tool_calls or []
    ]
    kept = client.chat.completions.retrieve(chunks[0].id)
    (call,) = kept.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.arguments == "".join(deltas)
    assert kept.choices[0].finish_reason == "tool_calls"


def test_messages_come_in_pages(client: openai.OpenAI) -> None:
    answer = make(client, max_tokens=1)
    messages = client.chat.completions.messages.list(answer.id, limit=1)
    assert messages.data[0].id == f"{answer.id}-0"
    found = list(messages)  # both pages
    assert [(m.role, m.content) for m in found] == [("system", "Be brief."), ("user", FRANCE)]
    newest = client.chat.completions.messages.list(answer.id, order="desc", limit=1).data
    assert newest[0].to_dict()["name"] == "anna"
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.messages.list(answer.id, after="chatcmpl-other-1")
    assert caught.value.param == "after"


def test_lists_are_filtered_and_come_in_pages(client: openai.OpenAI) -> None:
    completions = client.chat.completions
    labels: list[dict[str, str]] = [{"set": "a", "x]": "1"}, {"set": "b"}, {"set": "a"}]
    ids = [make(client, max_tokens=1, metadata=each).id for each in labels]
    assert [c.id for c in completions.list(metadata={"set": "a"}, limit=1)] == [ids[0], ids[2]]
    assert [c.id for c in completions.list(metadata={"set": "a", "x]": "1"})] == ids[:1]
    assert [c.id for c in completions.list(order="desc", limit=2).data] == [ids[2], ids[1]]
    assert [c.id for c in completions.list(after=ids[0], model=MODEL)] == ids[1:]
    assert not completions.list(model="another").data
    with pytest.raises(openai.BadRequestError) as caught:
        completions.list(after="none")
    assert caught.value.param == "after"


def test_labels_are_replaced(client: openai.OpenAI) -> None:
    answer = make(client, max_tokens=1, metadata={"old": "1", "set": "c"})
    changed = client.chat.completions.update(answer.id, metadata={"set": "d"})
    assert changed.to_dict()["metadata"] == {"set": "d"}
    assert not client.chat.completions.list(metadata={"set": "c"}).data
    assert [c.id for c in client.chat.completions.list(metadata={"set": "d"})] == [answer.id]
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.update(answer.id, metadata={"k" * 65: ""})
    assert caught.value.param == "metadata"


def test_what_is_deleted_is_gone(client: openai.OpenAI) -> None:
    answer = make(client, max_tokens=1, metadata={"set": "e"})
    deleted = client.chat.completions.delete(answer.id)
    assert deleted.to_dict() == {
        "id": answer.id,
        "object": "chat.completion.deleted",
        "deleted": True,
    }
    assert not client.chat.completions.list(metadata={"set": "e"}).data
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.retrieve(answer.id)


def test_they_belong_to_a_key_and_outlive_the_server(
    client: openai.OpenAI, keeping: Server, flags: list[str], tmp_path: Path
) -> None:
    answer = make(client, max_tokens=2)
    kept = keeping.get(f"{PATH}/{answer.id}").json()
    with running_server(tmp_path / "log", *flags, key=KEYS["anna"]) as later:
        assert later.get(f"{PATH}/{answer.id}").json() == kept
        later.key = KEYS["ben"]
        assert later.get(PATH).json()["data"] == []
        for path in (f"{PATH}/{answer.id}", f"{PATH}/{answer.id}/messages"):
            assert later.get(path).status_code == 404
        assert later.get(PATH, params={"after": answer.id}).status_code == 400


async def test_an_answer_that_cannot_be_kept_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*args: Any) -> None:
        raise StoreError("the disk is full")

    monkeypatch.setattr(Database, "run", fail)
    messages = [{"role": "user", "content": "Hi"}]
    async with running_app(data_dir=tmp_path) as application:
        for stream in (False, True):
            sent = application.post(PATH, messages=messages, store=True, stream=stream)
            (await application.engine.next_stream()).put(65, end="stop")
            body = (await sent.done()).body
            assert b'"finish_reason":"stop"' in body
            assert (b'"choices":[]' in body) == stream
            assert b'"store":false' in body


async def test_old_ones_are_forgotten(tmp_path: Path) -> None:
    state = ServerState(Settings(data_dir=tmp_path, store_days=2), None, None)
    store, day_s, now = ChatStore(state.database), 86_400, int(time.time())
    for id, age in (("old", 3), ("young", 1)):
        await store.add(StoredChat(id, "", now - age * day_s, MODEL, b"{}", {"a": "b"}), [b"{}"])
    await purge(state)
    found = await store.list("", model=None, metadata={}, after=None, limit=9, ascending=True)
    assert [chat.id for chat in found or []] == ["young"]
    assert await store.messages("old", after=None, limit=9, ascending=True) == []
    await state.database.close()
