"""Fields of OpenAI's API that ask for little or nothing here: taken as the SDK sends them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import openai
import pytest
from openai.types.responses import ServiceTier

from tests.servers import MODEL, Server

IGNORED = "x-quire-ignored-params"
MESSAGES: Any = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


@pytest.mark.parametrize("tier", [tier for tier in get_args(get_args(ServiceTier)[0]) if tier])
def test_every_tier_is_served_by_the_one_there_is(client: openai.OpenAI, tier: Any) -> None:
    chats = client.chat.completions.with_raw_response
    fields: Any = {"model": MODEL, "service_tier": tier}
    whole = chats.create(messages=MESSAGES, max_tokens=2, **fields)
    assert whole.parse().service_tier == "default"
    stream = chats.create(messages=MESSAGES, max_tokens=2, stream=True, **fields)
    assert {chunk.service_tier for chunk in stream.parse()} == {"default"}
    told = client.responses.with_raw_response.create(input="Hello", max_output_tokens=2, **fields)
    assert told.parse().service_tier == "default"
    names = None if tier in ("auto", "default") else "service_tier"
    assert [answer.headers.get(IGNORED) for answer in (whole, stream, told)] == [names] * 3


def test_a_tier_is_told_to_who_names_one(server: Server) -> None:
    assert "service_tier" not in server.chat(max_tokens=1).json()
    error = server.chat(max_tokens=1, service_tier="first class").json()["error"]
    assert error["param"] == "service_tier"
