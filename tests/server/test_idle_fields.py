"""Fields with little or no effect here: accepted as clients send them, and named where idle."""

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


def test_labels_and_what_holds_anyway_are_not_reported(client: openai.OpenAI) -> None:
    """So that clients that always send them work under --strict, too."""
    answer = client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=MESSAGES,
        max_tokens=2,
        safety_identifier="a hash",
        prompt_cache_key="a kind of prompt",
        verbosity="medium",
        stream=True,
        stream_options={"include_obfuscation": False},
    )
    assert list(answer.parse())
    assert IGNORED not in answer.headers


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"verbosity": "low"}, "verbosity"),
        ({"verbosity": "high"}, "verbosity"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"prediction": {"type": "content", "content": "Hello"}}, "prediction"),
        ({"prompt_cache_options": {"mode": "implicit"}}, "prompt_cache_options"),
    ],
)
def test_what_has_no_effect_is_named(server: Server, fields: dict[str, Any], name: str) -> None:
    answer = server.chat(max_tokens=1, **fields)
    assert (answer.status_code, answer.headers[IGNORED]) == (200, name)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"verbosity": "chatty"}, "verbosity"),
        ({"safety_identifier": "x" * 513}, "safety_identifier"),
        ({"prompt_cache_key": 7}, "prompt_cache_key"),
        ({"moderation": {"model": "m", "policy": {"input": {"mode": "block"}}}}, "moderation"),
        ({"stream": True, "stream_options": {"include_obfuscation": 1}}, "stream_options"),
    ],
)
def test_what_cannot_be_meant_is_refused(
    server: Server, fields: dict[str, Any], param: str
) -> None:
    answer = server.chat(max_tokens=1, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].startswith(param)


CHAT, RESPONSES, ANTHROPIC = "/v1/chat/completions", "/v1/responses", "/v1/messages"
FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
FLAT = {"type": "function", **FUNCTION, "strict": False}
THEIRS = {"name": "f", "input_schema": {"type": "object"}}


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        # A likely mistake: strict belongs in the function.
        (CHAT, {"tools": [{**TOOL, "strict": True}]}, "tools.0.strict"),
        (CHAT, {"tools": [{**TOOL, "function": {**FUNCTION, "x": 1}}]}, "tools.0.function.x"),
        (CHAT, {"functions": [{**FUNCTION, "returns": {"type": "null"}}]}, "functions.0.returns"),
        (CHAT, {"tools": [{**TOOL, "cache_control": {"type": "ephemeral"}, "x": None}]}, None),
        (RESPONSES, {"tools": [{**FLAT, "defer_loading": True}]}, "tools.0.defer_loading"),
        (RESPONSES, {"tools": [{**FLAT, "output_schema": {}, "async": False}]}, None),
        (RESPONSES, {"tools": [{**FLAT, "allowed_callers": ["direct"]}]}, None),
        (RESPONSES, {"text": {"format": {"type": "text", "x": 1}}}, "text.format.x"),
        (ANTHROPIC, {"tools": [{**THEIRS, "input_examples": [{}]}]}, "tools.0.input_examples"),
        (ANTHROPIC, {"tools": [{**THEIRS, "eager_input_streaming": True}]}, None),
        (ANTHROPIC, {"output_config": {"task_budget": {}}}, "output_config.task_budget"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_what_has_no_effect_within_a_field_is_named(
    server: Server, path: str, fields: dict[str, Any], names: str | None
) -> None:
    begun = {
        CHAT: {"messages": MESSAGES, "max_tokens": 1},
        RESPONSES: {"input": "Hello", "max_output_tokens": 1},
        ANTHROPIC: {"messages": MESSAGES, "max_tokens": 1},
    }
    answer = server.post(path, {"model": MODEL, **begun[path], **fields})
    assert (answer.status_code, answer.headers.get(IGNORED)) == (200, names), answer.text
