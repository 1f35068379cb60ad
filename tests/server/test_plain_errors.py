"""A newcomer's typical mistakes get errors that say what to do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.asgi import running_app

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "told"),
    [
        ("/chat/completions", "There is no such route, but there is /v1/chat/completions."),
        ("/v1/v1/models", "There is no such route, but there is /v1/models."),
        ("/v1/completions/", "There is no such route, but there is /v1/completions."),
        ("//v1/models", "There is no such route, but there is /v1/models."),
        ("/v1/metrics", "There is no such route, but there is /metrics."),
        ("/", "There is no such route; /openapi.json lists all routes."),
        ("/v1", "There is no such route; /openapi.json lists all routes."),
        ("/v1/images/generations", "There is no such route; /openapi.json lists all routes."),
    ],
)
async def test_a_path_that_misses_by_little_is_told_the_right_one(path: str, told: str) -> None:
    async with running_app() as app:
        answer = await app.get(path)
        assert (answer.status, answer.error["message"]) == (404, told)


@pytest.mark.parametrize(
    ("method", "path", "allowed", "told"),
    [
        ("GET", "/v1/completions", "POST", "This route takes POST, not GET."),
        ("DELETE", CHAT, "GET, POST", "This route takes GET and POST, not DELETE."),
        ("PUT", "/v1/models/quire-demo", "GET", "This route takes GET, not PUT."),
        (
            "PATCH",
            CHAT + "/chatcmpl-1",
            "DELETE, GET, POST",
            "This route takes DELETE and GET and POST, not PATCH.",
        ),
    ],
)
async def test_a_method_that_is_not_taken_is_told_those_that_are(
    method: str, path: str, allowed: str, told: str
) -> None:
    async with running_app() as app:
        answer = await app.request(method, path).done()
        assert (answer.status, answer.error["message"]) == (405, told)
        assert answer.headers["allow"] == allowed


@pytest.mark.parametrize(
    ("query", "told"),
    [
        ("/v1/responses/resp_1?stream=maybe", "'stream' must be a valid boolean"),
        ("/v1/files?limit=many", "'limit' must be a valid integer"),
        ("/v1/files?limit=" + "9" * 5000, "'limit' is a number out of range"),
    ],
)
async def test_a_parameter_of_the_path_is_told_what_it_must_be(query: str, told: str) -> None:
    async with running_app() as app:
        answer = await app.get(query)
        assert (answer.status, answer.error["message"]) == (400, told)


async def test_compaction_is_told_to_be_unsupported() -> None:
    async with running_app() as app:
        answer = await app.post("/v1/responses/compact", model="quire-demo", input="Hi").done()
        assert answer.status == 404
        assert answer.error == {
            "message": "The endpoint /v1/responses/compact is not supported: nothing here compacts "
            "conversations. To shorten them, send 'truncation': 'auto'.",
            "type": "invalid_request_error",
            "param": None,
            "code": "not_found",
        }


async def test_the_documentation_is_counted_under_its_routes() -> None:
    async with running_app() as app:
        for path in ("/docs", "/openapi.json"):
            assert (await app.get(path)).status == 200
        counted = (await app.get("/metrics")).body.decode()
        assert 'route="/docs"' in counted
        assert 'route="/openapi.json"' in counted
        assert 'route="unmatched"' not in counted
        assert (await app.get("/nowhere")).status == 404
        assert 'route="unmatched"' in (await app.get("/metrics")).body.decode()


async def test_probes_may_ask_by_head() -> None:
    async with running_app() as app:
        for path in ("/health", "/ready"):
            assert (await app.request("HEAD", path).done()).status == 200


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"messages": "hi"}, "'messages' must be a valid list"),
        ({"messages": []}, "'messages' must have at least 1 item"),
        ({"messages": ["hi"]}, "'messages.0' must be an object"),
        ({"temperature": "hot"}, "'temperature' must be a valid number"),
        ({"seed": "x"}, "'seed' must be a valid integer"),
        ({"response_format": "json"}, "'response_format' must be an object"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "'response_format.json_schema.name' must match the pattern '^[a-zA-Z0-9_-]{1,64}$'",
        ),
    ],
)
async def test_a_wrong_field_is_told_in_one_voice(fields: dict[str, Any], told: str) -> None:
    async with running_app() as app:
        body = {"messages": [{"role": "user", "content": "hi"}], **fields}
        answer = await app.post(CHAT, **body).done()
        assert (answer.status, answer.error["message"]) == (400, told)


async def test_json_that_is_none_is_told_with_its_place() -> None:
    async with running_app() as app:
        answer = await app.request("POST", CHAT, b'{"model": "m",\n "n": }').done()
        assert answer.error["message"].endswith("Expecting value: line 2 column 7 (char 21)")


SCHEMA = {"type": "object"}
HELLO = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("path", "fields", "told"),
    [
        (
            CHAT,
            {"response_format": {"type": "json_schema"}},
            "'response_format.json_schema' is required, with a 'name' and the 'schema' in it",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "schema": SCHEMA}},
            "'response_format.json_schema' is required, with a 'name' and the 'schema' in it",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a b"}}},
            "'response_format.json_schema.name' must match the pattern '^[a-zA-Z0-9_-]{1,64}$'",
        ),
        (
            CHAT,
            {"structured_outputs": {"regex": "a", "choice": ["a"]}},
            "'structured_outputs' must hold exactly one of "
            "'json', 'json_object', 'regex', 'choice' and 'grammar'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": []}]},
            "'messages.0.content' must be a string or a list of parts, at least one",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": ["hi"]}]},
            "'messages.0.content' part 0: must be an object with a 'type'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "'messages.0.content' part 0 must hold its text as a string",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "file"}]}]},
            "'messages.0.content' part 0: its 'file' must be an object with 'file_data' or "
            "'file_id'",
        ),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "smell"}]}]},
            "'messages.0.content' holds a part of type 'smell', which is not supported; send text, "
            "images, videos, audio or files",
        ),
        (CHAT, {"bad_words": [""]}, "'bad_words' must hold strings of 1 to 256 characters"),
        (CHAT, {"logit_bias": {"x": 1}}, "'logit_bias' must have token ids as its keys"),
        (
            CHAT,
            {"stop_token_ids": [10**6]},
            "'stop_token_ids' must hold token ids between 0 and 4095",
        ),
        (
            CHAT,
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": 1}}},
            "'response_format.json_schema.schema' must be an object",
        ),
        (CHAT, {"guided_json": 1}, "'guided_json' must be an object"),
        ("/tokenize", {"prompt": "hi"}, "'prompt' or else 'messages' must be sent, and not both"),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": []}]},
            "'messages.0.content' must be a string or a list of blocks, at least one",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "type": "bash_20250124"}]},
            "'tools.0.type' 'bash_20250124' is not supported; define what the client runs by an "
            "input_schema",
        ),
        (
            "/v1/responses",
            {"text": {"format": {"type": "json_schema", "name": "a b", "schema": SCHEMA}}},
            "'text.format.name' must match the pattern '^[a-zA-Z0-9_-]{1,64}$'",
        ),
        (
            "/v1/messages",
            {"mcp_servers": [{"type": "url", "url": "https://example.com"}]},
            "'mcp_servers' is not supported: this server calls no other; define 'tools' instead",
        ),
        (
            "/v1/messages",
            {"tools": [{"name": "f", "input_schema": SCHEMA}], "tool_choice": {"type": "tool"}},
            "'tool_choice.name' is required with the type 'tool'",
        ),
    ],
)
async def test_a_shape_that_is_not_whole_is_told_what_it_lacks(
    path: str, fields: dict[str, Any], told: str
) -> None:
    async with running_app() as app:
        begun = {"input": "hi"} if path == "/v1/responses" else {"messages": HELLO}
        limit = {"max_tokens": 9} if path == "/v1/messages" else {}
        answer = await app.post(path, **{**begun, **limit, **fields}).done()
        assert (answer.status, answer.error["message"]) == (400, told)
