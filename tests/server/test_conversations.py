"""/v1/conversations, and responses in them, through the openai SDK against a real server."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.servers import MODEL, Server, running_server

FRANCE, ITALY = "What is the capital of France?", "And of Italy?"
KEYS = {"anna": "sk-quire-test-anna", "ben": "sk-quire-test-ben"}


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("conversations")
    keys = [
        {"name": name, "sha256": hashlib.sha256(key.encode()).hexdigest()}
        for name, key in KEYS.items()
    ]
    (home / "keys.yaml").write_text(json.dumps({"keys": keys}))
    flags = ["--data-dir", str(home / "data"), "--api-key-file", str(home / "keys.yaml")]
    with running_server(home / "log", *flags, key=KEYS["anna"]) as server:
        yield server


@pytest.fixture
def client(keeping: Server) -> Iterator[openai.OpenAI]:
    url = keeping.url + "/v1"
    with openai.OpenAI(
        base_url=url, api_key=KEYS["anna"], max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def message(text: str, **fields: Any) -> Any:
    return {"type": "message", "role": "user", "content": text, **fields}


def say(client: openai.OpenAI, text: str | list[Any], **fields: Any) -> Any:
    return client.responses.create(model=MODEL, input=text, temperature=0, **fields)


def texts(client: openai.OpenAI, id: str) -> list[str]:
    """All texts in a conversation, page by page."""
    items: Any = client.conversations.items.list(id, order="asc", limit=2)
    return [item.content[0].text for item in items]


def test_a_conversation_is_made_labelled_and_forgotten(client: openai.OpenAI) -> None:
    made = client.conversations.create(metadata={"a": "b"}, items=[message(FRANCE)])
    assert made.id.startswith("conv_")
    assert made.metadata == {"a": "b"}
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"c": "d"}).metadata == {"c": "d"}
    assert client.conversations.retrieve(made.id).created_at == made.created_at
    assert texts(client, made.id) == [FRANCE]
    deleted = client.conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    for lookup in (
        lambda: client.conversations.retrieve(made.id),
        lambda: client.conversations.update(made.id, metadata={}),
        lambda: client.conversations.delete(made.id),
        lambda: client.conversations.items.list(made.id),
        lambda: client.conversations.items.create(made.id, items=[message("x")]),
        lambda: client.conversations.items.retrieve("msg_1", conversation_id=made.id),
        lambda: client.conversations.items.delete("msg_1", conversation_id=made.id),
    ):
        with pytest.raises(openai.NotFoundError):
            lookup()


def test_items_are_added_found_and_forgotten(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    assert client.conversations.items.list(conversation.id, limit=3).data == []
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    added = client.conversations.items.create(
        conversation.id,
        items=[message("One", id="msg_one"), message("Two"), call],
    )
    assert (added.first_id, added.last_id) == ("msg_one", added.data[2].id)
    newest = client.conversations.items.list(conversation.id, limit=2)
    assert newest.data == added.data[:0:-1]
    assert [item.id for item in newest] == [item.id for item in added.data[::-1]]  # all pages
    one = client.conversations.items.retrieve("msg_one", conversation_id=conversation.id)
    assert one == added.data[0]
    left = client.conversations.items.delete("msg_one", conversation_id=conversation.id)
    assert left.id == conversation.id
    with pytest.raises(openai.NotFoundError) as missing:
        client.conversations.items.retrieve("msg_one", conversation_id=conversation.id)
    assert missing.value.param == "item_id"
    with pytest.raises(openai.BadRequestError) as caught:
        client.conversations.items.list(conversation.id, after="msg_one")
    assert caught.value.param == "after"


@pytest.mark.parametrize(
    ("items", "param"),
    [
        ([{"role": "user", "content": "x", "id": "msg_a"}] * 2, "items.1.id"),
        ([message("x"), {"type": "web_search_call", "id": "w"}], "items.1.type"),
        ([{"type": "item_reference", "id": "msg_none"}], "items.0.id"),
        ([message("x")] * 21, "items"),
        ("x", "items"),
    ],
)
def test_bad_items_are_named_and_nothing_is_kept(
    client: openai.OpenAI, items: Any, param: str
) -> None:
    conversation = client.conversations.create()
    for refused in (
        lambda: client.conversations.create(items=items),
        lambda: client.conversations.items.create(conversation.id, items=items),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            refused()
        assert caught.value.param == param
    assert texts(client, conversation.id) == []


def test_responses_go_on_from_it_and_add_to_it(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[message(FRANCE)])
    first = say(client, [], conversation=conversation.id)
    assert first.conversation.id == conversation.id
    with client.responses.stream(
        model=MODEL, input=ITALY, temperature=0, conversation={"id": conversation.id}
    ) as stream:
        second = stream.get_final_response()
    sent = [
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": ITALY},
    ]
    assert second.output_text == say(client, sent).output_text
    said = [FRANCE, first.output_text, ITALY, second.output_text]
    assert texts(client, conversation.id) == said
    count = client.responses.input_tokens.count(
        model=MODEL, input="And now?", conversation=conversation.id
    )
    unstored = say(client, "And now?", conversation=conversation.id, store=False)
    assert unstored.usage.input_tokens == count.input_tokens
    assert texts(client, conversation.id) == [*said, "And now?", unstored.output_text]
    # Items stay when the response is deleted, and vice versa.
    client.responses.delete(first.id)
    assert texts(client, conversation.id)[1] == first.output_text
    client.conversations.delete(conversation.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text


def test_what_is_said_in_the_background_is_added_when_it_is_done(client: openai.OpenAI) -> None:
    conversation = client.conversations.create()
    response = say(client, FRANCE, conversation=conversation.id, background=True)
    deadline = time.monotonic() + 60
    while response.status != "completed":
        assert time.monotonic() < deadline
        time.sleep(0.02)
        response = client.responses.retrieve(response.id)
    assert response.conversation is not None
    assert texts(client, conversation.id) == [FRANCE, response.output_text]
    gone = say(client, "Tell me a story.", conversation=conversation.id, background=True)
    client.responses.cancel(gone.id)
    assert len(texts(client, conversation.id)) in (2, 4)  # none of it, or it was done before
    if client.responses.retrieve(gone.id).status == "cancelled":
        assert len(texts(client, conversation.id)) == 2


def test_what_does_not_fit_is_named(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[message("x", id="msg_x")])
    stored = say(client, FRANCE, max_output_tokens=1)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"conversation": conversation.id, "previous_response_id": stored.id}, "conversation"),
        ({"conversation": {"id": 3}}, "conversation"),
        (
            {
                "conversation": conversation.id,
                "input": [{"type": "item_reference", "id": "msg_x"}],
            },
            "input.0.id",
        ),
    ]
    for fields, param in cases:
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(**{"model": MODEL, "input": "Hi", **fields})
        assert caught.value.param == param
    with pytest.raises(openai.NotFoundError) as missing:
        say(client, "Hi", conversation="conv_none")
    assert missing.value.param == "conversation"


def test_items_may_be_referred_to(client: openai.OpenAI) -> None:
    conversation = client.conversations.create(items=[message(FRANCE, id="msg_france")])
    reference: Any = [{"type": "item_reference", "id": "msg_france"}]
    assert say(client, reference).output_text == say(client, FRANCE).output_text
    copy = client.conversations.create(items=reference)
    assert texts(client, copy.id) == texts(client, conversation.id) == [FRANCE]


def test_a_conversation_belongs_to_a_key(
    client: openai.OpenAI, keeping: Server, tmp_path: Path
) -> None:
    conversation = client.conversations.create(items=[message("Secret", id="msg_secret")])
    other = client.with_options(api_key=KEYS["ben"])
    for lookup in (
        lambda: other.conversations.retrieve(conversation.id),
        lambda: other.conversations.delete(conversation.id),
        lambda: other.conversations.items.list(conversation.id),
        lambda: say(other, "Hi", conversation=conversation.id),
    ):
        with pytest.raises(openai.NotFoundError):
            lookup()
    with pytest.raises(openai.BadRequestError):
        say(other, [{"type": "item_reference", "id": "msg_secret"}])
    assert texts(client, conversation.id) == ["Secret"]
