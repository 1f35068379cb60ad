"""Inputs that would cost all requests time are refused before they do."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.openai.inputs import ChatRequest
from server.text.answer_grammar import AnswerRules
from tests.server.asgi import running_app

CHAT = "/v1/chat/completions"
USER = [{"role": "user", "content": "Hi"}]
_ENCODE_BATCH = Tokenizer.encode_batch
LONG = "word " * 2000  # more than the fake engine's 64 tokens can be
FUNCTION = {"name": "f", "description": LONG}
CALL = {"type": "function", "function": {"name": LONG}}


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]}, "tools"),
        (
            CHAT,
            {"messages": [*USER, {"role": "assistant", "tool_calls": [CALL]}, *USER]},
            "messages",
        ),
        ("/v1/responses", {"input": "Hi", "tools": [{"type": "function", **FUNCTION}]}, "tools"),
        (
            "/tokenize",
            {"messages": USER, "tools": [{"type": "function", "function": FUNCTION}]},
            "",
        ),
        ("/tokenize", {"messages": [{"role": "user", "content": LONG}]}, "messages"),
        ("/tokenize", {"prompt": LONG}, "prompt"),
    ],
)
async def test_what_no_context_holds_is_not_tokenised(
    monkeypatch: pytest.MonkeyPatch, path: str, fields: dict[str, Any], param: str
) -> None:
    async with running_app() as app:
        model = await app.state.model()
        monkeypatch.setattr(
            type(model.tokenizer), "encode", lambda *_, **__: pytest.fail("encodes")
        )
        answer = await app.post(path, **fields).done()
        assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
        assert answer.error["param"] == (param or "tools")


async def test_messages_with_long_tools_are_refused_in_anthropics_shape() -> None:
    async with running_app() as app:
        tools = [{"name": "f", "description": LONG, "input_schema": {"type": "object"}}]
        answer = await app.post("/v1/messages", messages=USER, tools=tools, max_tokens=4).done()
        assert answer.status == 400
        assert "maximum context length" in answer.error["message"]


@pytest.mark.parametrize("path", [CHAT, "/tokenize"])
async def test_templates_are_not_given_variables_of_any_size(
    monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(ChatTemplate, "render_sync", lambda *_, **__: pytest.fail("renders"))
    async with running_app() as app:
        kwargs = {"words": ["x" * 70] * 1000}
        answer = await app.post(path, messages=USER, chat_template_kwargs=kwargs).done()
        assert answer.status == 400
        assert answer.error["message"] == "'chat_template_kwargs' must be at most 64 KiB of JSON"


async def test_bad_words_are_encoded_once_for_all_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_app() as app:
        tokenizer = (await app.state.model()).tokenizer
        expected = {
            tuple(tokenizer.encode(text, add_special_tokens=False))
            for word in ("Rome", "Oslo")
            for text in (word, f" {word}")
        }
        num_words = 0

        def encode_batch(self: Tokenizer, texts: Sequence[str], **options: Any) -> list[list[int]]:
            nonlocal num_words
            num_words += sum("Rome" in text for text in texts)
            return _ENCODE_BATCH(self, texts, **options)

        monkeypatch.setattr(Tokenizer, "encode_batch", encode_batch)
        fields = {"prompt": [[5], [6], [7]], "bad_words": ["Rome", "Oslo"]}
        exchange = app.post("/v1/completions", **fields)
        await app.engine.next_stream()
        for stream in app.engine.streams:
            assert set(stream.request.sampling.bad_token_ids) == expected
            stream.put(5, end="stop")
        assert (await exchange.done()).status == 200
        assert num_words == 2  # with and without a space


async def test_long_bodies_and_the_rules_of_strict_tools_leave_the_event_loop_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thousand tools with schemas of 18 kB each took half a minute."""
    on_loop: dict[str, list[bool]] = {"read": [], "rules": []}
    loops_thread = threading.get_ident()
    read, grammar = ChatRequest.read, AnswerRules.grammar

    def noting_read(body: dict[str, Any], at: str = "") -> ChatRequest:
        on_loop["read"].append(threading.get_ident() == loops_thread)
        return read(body, at)

    def noting_grammar(self: AnswerRules) -> Any:
        on_loop["rules"].append(threading.get_ident() == loops_thread)
        return grammar(self)

    monkeypatch.setattr(ChatRequest, "read", noting_read)
    monkeypatch.setattr(AnswerRules, "grammar", noting_grammar)
    function = {"name": "f", "parameters": {"type": "object"}, "strict": True}
    asked = {"messages": USER, "tools": [{"type": "function", "function": function}]}
    async with running_app() as app:
        for more in ({}, {"ignored": "x" * 2**17}):
            exchange = app.post(CHAT, **asked, **more)
            (await app.engine.next_stream()).put(5, end="stop")
            assert (await exchange.done()).status == 200
    assert on_loop == {"read": [True, False], "rules": [False, False]}
