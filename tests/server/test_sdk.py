"""The openai SDK against a real server: sync, async, streams, its helper, its errors."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import openai
import pytest

from tests.servers import MODEL

QUESTION: list[openai.types.chat.ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the capital of France?"},
]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture
async def async_client(base_url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=0)
    assert answer.choices[0].message.content
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    stream = client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == answer.choices[0].message.content


def test_stream_helper(client: openai.OpenAI) -> None:
    with client.chat.completions.stream(
        model=MODEL,
        messages=QUESTION,
        temperature=0,
        logprobs=True,
        top_logprobs=2,
        stream_options={"include_usage": True},
    ) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text
    assert final.usage is not None
    assert final.choices[0].finish_reason == "stop"
    logprobs = final.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert b"".join(bytes(token.bytes or []) for token in logprobs.content).decode() == text


async def test_async(async_client: openai.AsyncOpenAI) -> None:
    stream = await async_client.chat.completions.create(
        model=MODEL, messages=QUESTION, temperature=0, stream=True
    )
    text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
    answer = await async_client.completions.create(model=MODEL, prompt="The", max_tokens=2)
    assert text
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 2


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL).id == MODEL
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("nothing")
    assert caught.value.code == "model_not_found"


def test_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=MODEL, messages=QUESTION, temperature=9)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    assert caught.value.request_id
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt-none", messages=QUESTION)
