"""Text files in chats and responses, and documents in Anthropic's messages: shown as text."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.servers import MODEL, Server

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()
TEXT = "Grüße: the capital of France is Paris.\n"
BASE64 = base64.b64encode(TEXT.encode()).decode()
PDF = b"%PDF-1.7 \xff"
SHOWN = "<document>\n<title>facts.txt</title>\nGrüße: the capital of France is Paris.\n</document>"


@pytest.fixture
def client(base_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        yield client


def upload(client: openai.OpenAI, contents: bytes = TEXT.encode(), name: str = "facts.txt") -> str:
    return client.files.create(file=(name, contents), purpose="user_data").id


def prompt_of(server: Server, content: Any) -> str:
    """What the model sees of a user's message."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": content}]}
    tokens = server.post("/tokenize", body).json()["tokens"]
    text = server.post("/detokenize", {"tokens": tokens}).json()["prompt"]
    return text.partition("user\n")[2].partition("<|im_end|>")[0]


def same_prompt(server: Server, text: str, **answer: int) -> bool:
    """Whether a prompt is as long as that of a message with this text."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}]}
    return server.post("/tokenize", body).json()["count"] == sum(answer.values())


QUESTION = {"type": "text", "text": "What is it?"}


def test_a_chat_shows_the_text_of_files(client: openai.OpenAI, server: Server) -> None:
    id = upload(client)
    named = {"filename": "facts.txt", "file_data": f"data:text/markdown;base64,{BASE64}"}
    for file in ({"file_id": id}, named, {**named, "file_data": BASE64}):
        for part in ({"type": "file", "file": file}, {"type": "input_file", **file}):
            assert prompt_of(server, [part, QUESTION]) == f"{SHOWN}\nWhat is it?"
    other = {"type": "file", "file": {"file_id": id, "filename": "notes"}}
    assert "<title>notes</title>" in prompt_of(server, [other])
    bare = {"type": "file", "file": {"file_data": base64.b64encode(b"\xef\xbb\xbfa").decode()}}
    assert prompt_of(server, [bare]) == "<document>\na\n</document>"


def test_a_stored_chat_keeps_what_the_file_said(client: openai.OpenAI) -> None:
    id = upload(client)
    messages: Any = [{"role": "user", "content": [{"type": "file", "file": {"file_id": id}}]}]
    answer = client.chat.completions.create(
        model=MODEL, messages=messages, store=True, max_tokens=1
    )
    client.files.delete(id)
    (kept,) = client.chat.completions.messages.list(answer.id)
    assert kept.content == SHOWN


def test_a_response_keeps_the_file(client: openai.OpenAI, server: Server) -> None:
    id = upload(client)
    fields: Any = {"model": MODEL, "max_output_tokens": 16}
    content: Any = [{"type": "input_file", "file_id": id}, {"type": "input_text", "text": "Hm?"}]
    first = client.responses.create(input=[{"role": "user", "content": content}], **fields)
    assert same_prompt(server, f"{SHOWN}\nHm?", prompt=first.usage.input_tokens)
    client.files.delete(id)
    client.responses.create(input="And?", previous_response_id=first.id, **fields)
    (item,) = client.responses.input_items.list(first.id)
    sent: Any = item.to_dict()
    assert sent["content"][0]["filename"] == "facts.txt"
    assert base64.b64decode(sent["content"][0]["file_data"].partition(",")[2]).decode() == TEXT
    again = client.responses.create(input=[sent], **fields)  # without the file
    assert again.usage.input_tokens == first.usage.input_tokens


def test_a_calls_output_may_hold_a_file(server: Server) -> None:
    call = {"type": "function_call", "call_id": "c", "name": "read", "arguments": "{}"}
    part = {"type": "input_file", "filename": "facts.txt", "file_data": BASE64, "detail": "high"}
    counts = []
    for output in ([part], SHOWN):
        result = {"type": "function_call_output", "call_id": "c", "output": output}
        body = {"model": MODEL, "input": [{"role": "user", "content": "Hi"}, call, result]}
        answer = server.post("/v1/responses/input_tokens", body)
        counts.append(answer.json()["input_tokens"])
        told = answer.headers.get("x-quire-ignored-params")
        assert told == (None if output == SHOWN else "input.2.output.0.detail")
    assert counts[0] == counts[1]


@pytest.mark.parametrize(
    ("file", "problem"),
    [
        ({}, "needs"),
        ({"file_id": "file-none"}, "not stored"),
        ({"file_id": 5}, "id"),
        ({"file_data": 5}, "string"),
        ({"file_data": "https://example.org/a.txt"}, "base64"),
        ({"file_data": "data:text/plain,abc"}, "base64"),
        ({"file_data": f"data:image/png;base64,{PNG}"}, "UTF-8"),
        ({"file_data": base64.b64encode(b"a\0b").decode()}, "UTF-8"),
        ({"file_data": base64.b64encode(PDF).decode()}, "PDF"),
        ({"file_data": BASE64, "filename": 1}, "filename"),
        ({"file_url": "https://example.org/a.txt"}, "fetched"),
    ],
)
def test_what_is_no_text_is_refused(server: Server, file: dict[str, Any], problem: str) -> None:
    chat = [{"role": "user", "content": [{"type": "file", "file": file}]}]
    items = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    for path, body, param in (
        ("/v1/chat/completions", {"messages": chat}, "messages.0.content"),
        ("/v1/responses", {"input": items}, "input.0"),
    ):
        answer = server.post(path, {"model": MODEL, **body})
        error = answer.json()["error"]
        assert answer.status_code == 400
        assert error["param"].startswith(param)
        assert problem in error["message"]


def test_an_uploaded_file_that_is_no_text_is_refused(client: openai.OpenAI, server: Server) -> None:
    for id, problem in (
        (upload(client, PDF, "a.pdf"), "PDF"),
        (upload(client, b"a" * (16 * 2**20 + 1)), "larger than 16 MiB"),
    ):
        part = {"type": "input_file", "file_id": id}
        chat = {"messages": [{"role": "user", "content": [part]}]}
        for path, body in (
            ("/v1/chat/completions", chat),
            ("/tokenize", chat),
            ("/v1/responses", {"input": chat["messages"]}),
            ("/v1/conversations", {"items": chat["messages"]}),
        ):
            answer = server.post(path, {"model": MODEL, **body})
            assert answer.status_code == 400
            assert problem in answer.json()["error"]["message"]
        client.files.delete(id)


def text_source(data: str) -> dict[str, Any]:
    return {"type": "text", "media_type": "text/plain", "data": data}


def count(server: Server, *blocks: Any) -> Any:
    """The answer to a count of tokens."""
    messages = [{"role": "user", "content": list(blocks)}]
    return server.post("/v1/messages/count_tokens", {"model": MODEL, "messages": messages})


def test_documents_of_anthropics_messages_are_shown(server: Server) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    encoded = {"type": "base64", "media_type": "text/plain", "data": BASE64}
    for block, shown in (
        ({"source": text_source(TEXT), "title": "facts.txt"}, SHOWN),
        ({"source": encoded, "title": "facts.txt", "context": None}, SHOWN),
        ({"source": {"type": "content", "content": parts}}, "<document>\na\nb\n</document>"),
        (
            {"source": {"type": "content", "content": "a"}, "context": "Of old."},
            "<document>\n<context>Of old.</context>\na\n</document>",
        ),
    ):
        document = {"type": "document", **block}
        answer = count(server, document, QUESTION)
        assert "x-quire-ignored-params" not in answer.headers
        assert same_prompt(server, f"{shown}\nWhat is it?", **answer.json())
    assert same_in_a_tools_result(server, document, shown)


def same_in_a_tools_result(server: Server, block: dict[str, Any], shown: str) -> bool:
    """Whether a block that a tool returns is counted as this text."""
    use = {"type": "tool_use", "id": "t", "name": "read", "input": {}}
    counts = []
    for content in ([block], shown):
        result = {"type": "tool_result", "tool_use_id": "t", "content": content}
        messages = [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": [use]},
            {"role": "user", "content": [result]},
        ]
        body = {"model": MODEL, "messages": messages}
        counts.append(server.post("/v1/messages/count_tokens", body).json())
    return bool(counts[0] == counts[1])


def test_search_results_are_documents_with_a_source(server: Server) -> None:
    found: dict[str, Any] = {
        "type": "search_result",
        "source": "https://example.org/facts",
        "title": "facts.txt",
        "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        "citations": {"enabled": False},
        "cache_control": {"type": "ephemeral"},
    }
    shown = (
        "<document>\n<title>facts.txt</title>\n<source>https://example.org/facts</source>\n"
        "a\nb\n</document>"
    )
    answer = count(server, found, QUESTION)
    assert "x-quire-ignored-params" not in answer.headers
    assert same_prompt(server, f"{shown}\nWhat is it?", **answer.json())
    assert same_in_a_tools_result(server, found, shown)
    asked = {**found, "citations": {"enabled": True}}
    told = count(server, asked).headers["x-quire-ignored-params"]
    assert told == "messages.0.content.0.citations"
    for name in ("source", "title", "content"):
        refused = count(server, {**found, name: None})
        assert refused.status_code == 400
        assert name in refused.json()["error"]["message"]


def test_what_documents_ask_for_and_do_not_get_is_named(server: Server) -> None:
    source = {**text_source("a"), "mood": 1}
    asked = {"type": "document", "source": source, "citations": {"enabled": True}}
    told = count(server, asked).headers["x-quire-ignored-params"]
    assert told == "messages.0.content.0.citations,messages.0.content.0.source.mood"
    idle = {**asked, "source": text_source("a"), "citations": {"enabled": False}}
    assert "x-quire-ignored-params" not in count(server, idle).headers


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        ({}, "'source'"),
        ({"source": {"type": "url", "url": "https://example.org/a"}}, "nothing is fetched"),
        ({"source": {"type": "file", "file_id": "file_1"}}, "not stored here"),
        (
            {"source": {"type": "base64", "media_type": "application/pdf", "data": "JVBERg=="}},
            "application/pdf",
        ),
        ({"source": {"type": "base64", "media_type": "text/plain", "data": "?"}}, "base64"),
        ({"source": {**text_source("a"), "data": 1}}, "'data'"),
        ({"source": text_source("a"), "title": 1}, "'title'"),
        ({"source": {"type": "content", "content": [{"type": "thinking"}]}}, "content"),
        ({"source": {"type": "content", "content": None}}, "content"),
    ],
)
def test_other_documents_are_refused(server: Server, block: dict[str, Any], problem: str) -> None:
    answer = count(server, {"type": "document", **block})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert problem in answer.json()["error"]["message"]
