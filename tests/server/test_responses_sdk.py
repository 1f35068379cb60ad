"""The Responses API through the openai SDK, against a real server on the demo model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from tests.servers import MODEL, Server

FRANCE = "What is the capital of France?"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def ask(client: openai.OpenAI, text: str = FRANCE, **fields) -> Response:
    return client.responses.create(model=MODEL, input=text, temperature=0, **fields)


def ended(client: openai.OpenAI, response: Response) -> Response:
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


def test_an_answer_is_what_chat_gives(client: openai.OpenAI, server: Server) -> None:
    response = ask(client, instructions="Be brief.", metadata={"a": "b"}, max_output_tokens=50)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": FRANCE}]
    body = {"model": MODEL, "messages": messages, "temperature": 0}
    chat = server.post("/v1/chat/completions", body).json()
    assert response.output_text == chat["choices"][0]["message"]["content"]
    assert response.usage is not None
    assert response.usage.input_tokens == chat["usage"]["prompt_tokens"]
    assert response.usage.output_tokens == chat["usage"]["completion_tokens"]
    assert (response.status, response.error, response.incomplete_details) == (
        "completed",
        None,
        None,
    )
    assert (response.instructions, response.metadata) == ("Be brief.", {"a": "b"})
    assert (response.max_output_tokens, response.temperature) == (50, 0)
    assert response.id.startswith("resp_")
    assert response.output[0].id.startswith("msg_")


def test_a_limit_is_told(client: openai.OpenAI) -> None:
    response = ask(client, max_output_tokens=3)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.output[0].status == "incomplete"
    assert response.usage is not None
    assert response.usage.output_tokens == 3


def test_logprobs_are_included(client: openai.OpenAI) -> None:
    response = ask(client, include=["message.output_text.logprobs"], top_logprobs=2)
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    assert part.logprobs is not None
    assert b"".join(bytes(token.bytes) for token in part.logprobs).decode() == part.text
    assert all(len(token.top_logprobs) == 2 for token in part.logprobs)


def test_the_stream_helper_gives_the_same(client: openai.OpenAI) -> None:
    whole = ask(client)
    with client.responses.stream(model=MODEL, input=FRANCE, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        final = stream.get_final_response()
    assert "".join(deltas) == final.output_text == whole.output_text
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert client.responses.retrieve(final.id).output_text == whole.output_text


def test_a_conversation_goes_on_from_a_stored_response(client: openai.OpenAI) -> None:
    first = ask(client)
    second = ask(client, "And of Italy?", previous_response_id=first.id)
    history = [
        {"role": "user", "content": FRANCE},
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "And of Italy?"},
    ]
    sent = client.responses.create(model=MODEL, input=history, temperature=0)
    assert second.output_text == sent.output_text
    assert second.usage is not None
    assert sent.usage is not None
    assert second.usage.input_tokens == sent.usage.input_tokens
    assert second.previous_response_id == first.id
    # Output is accepted as input, as it is and by reference.
    again = [
        *client.responses.input_items.list(first.id, order="asc").data,
        *first.output,
        {"role": "user", "content": "And of Italy?"},
    ]
    items = [i if isinstance(i, dict) else i.model_dump(exclude_none=True) for i in again]
    references = [
        *({"type": "item_reference", "id": item["id"]} for item in items[:2]),
        items[2],
    ]
    for given in (items, references):
        answer = client.responses.create(model=MODEL, input=given, temperature=0)
        assert answer.output_text == second.output_text
    # A broken chain is reported.
    client.responses.delete(first.id)
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, "And now?", previous_response_id=second.id)
    assert caught.value.code == "previous_response_not_found"
    assert caught.value.param == "previous_response_id"


def test_stored_responses_are_found_and_forgotten(client: openai.OpenAI) -> None:
    response = ask(client)
    assert client.responses.retrieve(response.id).to_dict() == response.to_dict()
    client.responses.delete(response.id)
    for lookup in (
        lambda: client.responses.retrieve(response.id),
        lambda: client.responses.delete(response.id),
        lambda: client.responses.cancel(response.id),
        lambda: client.responses.input_items.list(response.id),
    ):
        with pytest.raises(openai.NotFoundError):
            lookup()
    unstored = ask(client, store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    texts = [f"Message {i}." for i in range(5)]
    given = [{"role": "user", "content": text} for text in texts]
    response = client.responses.create(model=MODEL, input=given, max_output_tokens=1)
    forward = client.responses.input_items.list(response.id, order="asc", limit=2)
    assert [item.content[0].text for item in forward] == texts  # from all pages
    backward = client.responses.input_items.list(response.id, limit=5)
    assert [item.content[0].text for item in backward.data] == texts[::-1]
    assert backward.has_more is False
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_items.list(response.id, after="msg_none")
    assert caught.value.param == "after"


def test_tokens_are_counted(client: openai.OpenAI) -> None:
    response = ask(client)
    assert response.usage is not None
    count = client.responses.input_tokens.count(model=MODEL, input=FRANCE)
    assert count.input_tokens == response.usage.input_tokens


def test_background(client: openai.OpenAI) -> None:
    queued = ask(client, background=True)
    assert queued.status == "queued"
    assert ended(client, queued).output_text == ask(client).output_text
    events = list(client.responses.retrieve(queued.id, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    later = list(client.responses.retrieve(queued.id, stream=True, starting_after=4))
    assert [event.to_dict() for event in later] == [event.to_dict() for event in events[5:]]
    for number in (len(events) - 1, 999):
        assert not list(client.responses.retrieve(queued.id, stream=True, starting_after=number))


def test_what_a_stored_response_may_include(client: openai.OpenAI, server: Server) -> None:
    id = ask(client).id
    assert client.responses.retrieve(id, include=["message.output_text.logprobs"]).id == id
    unknown: Any = ["everything"]
    with pytest.raises(openai.BadRequestError, match="'include' cannot hold 'everything'"):
        client.responses.retrieve(id, include=unknown)
    assert server.get(f"/v1/responses/{id}?include=everything").status_code == 400


def test_a_background_stream_goes_on_without_its_client(client: openai.OpenAI) -> None:
    text = "Tell me a story."
    with ask(client, text, background=True, stream=True, store=True) as stream:
        seen = []
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    id, number = seen[0].response.id, seen[-1].sequence_number
    rest = list(client.responses.retrieve(id, stream=True, starting_after=number))
    deltas = [e.delta for e in [*seen, *rest] if e.type == "response.output_text.delta"]
    assert rest[-1].type == "response.completed"
    assert "".join(deltas) == rest[-1].response.output_text
    assert ended(client, rest[-1].response).output_text == "".join(deltas)


def test_a_background_response_is_cancelled(client: openai.OpenAI, server: Server) -> None:
    body = {"ignore_eos": True}
    queued = ask(client, "Tell me a story.", background=True, extra_body=body)
    cancelled = client.responses.cancel(queued.id)
    assert cancelled.status == "cancelled"
    assert client.responses.retrieve(queued.id).status == "cancelled"
    assert client.responses.cancel(queued.id).status == "cancelled"
    server.wait_idle()
    last = list(client.responses.retrieve(queued.id, stream=True))[-1]
    assert (last.type, last.response.status) == ("response.incomplete", "cancelled")
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(ask(client).id)


async def test_many_at_once(async_client: openai.AsyncOpenAI) -> None:
    async def one(number: int) -> tuple[str, str]:
        text = f"What is {number} plus 1?"
        stream = await async_client.responses.create(
            model=MODEL, input=text, temperature=0, max_output_tokens=12, stream=True
        )
        pieces, last = [], None
        async for event in stream:
            if event.type == "response.output_text.delta":
                pieces.append(event.delta)
            last = event
        assert last is not None
        stored = await async_client.responses.retrieve(last.response.id)
        return "".join(pieces), stored.output_text

    answers = await asyncio.gather(*(one(number) for number in range(32)))
    assert all(streamed == stored and streamed for streamed, stored in answers)
