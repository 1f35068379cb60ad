"""Every row of the table of bad inputs: the response, and that nothing else is affected.

After each row the error body is small and reveals no internals, the server is healthy, a canary
completion is unchanged, and every block is free again.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import psutil
import pytest

from tests.servers import MODEL, RawAnswer, Server, http_post, read_answer

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "Hello"}]
_LEAK = re.compile(rb"Traceback|\.py\b|/usr/|/home/|/root/|/tmp/|site-packages|0x[0-9a-f]{6,}")
LEFT_OUT = object()


@dataclass(frozen=True)
class Row:
    """One bad input and its response; ``send`` returns the request's bytes or sends them."""

    name: str
    send: bytes | Callable[[Server], RawAnswer]
    status: int | tuple[int, ...] = 400
    param: str | None = None
    code: str | None = None
    type: str = "invalid_request_error"
    closes: bool = False


def body_of(base: dict[str, Any], fields: dict[str, Any]) -> bytes:
    merged = {key: value for key, value in {**base, **fields}.items() if value is not LEFT_OUT}
    return json.dumps(merged).encode()


def chat(name: str, param: str | None, *, code: str | None = None, **fields: Any) -> Row:
    body = body_of({"model": MODEL, "messages": USER, "max_tokens": 4}, fields)
    return Row(name, http_post(CHAT, body), param=param, code=code)


def completion(name: str, param: str | None, *, code: str | None = None, **fields: Any) -> Row:
    body = body_of({"model": MODEL, "prompt": "Hello", "max_tokens": 4}, fields)
    return Row(name, http_post(COMPLETIONS, body), param=param, code=code)


def schema(name: str, definition: Any, *, code: str | None = None) -> Row:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": definition}}
    return chat(name, "response_format", code=code, response_format=wanted)


def deep_one_of(depth: int) -> dict[str, Any]:
    definition: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        definition = {"oneOf": [definition, {"type": "integer"}]}
    return definition


def deep_object(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"a": value}
    return value


DEEP = deep_object(700)  # JSON can be parsed up to almost 1000, templates take fewer
ASKED_DEEPLY = {
    "role": "assistant",
    "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": DEEP}}],
}
CATASTROPHE = {"type": "string", "pattern": r"(((.{1,30}){1,30}){1,30}){1,30}a"}


def literal(name: str, param: str | None, body: bytes, *, code: str | None = None) -> Row:
    return Row(name, http_post(CHAT, body), param=param, code=code)


def invalid_json(name: str, body: bytes) -> Row:
    return literal(name, None, body, code="invalid_json")


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: test\r\n\r\n".encode()


def chat_with(field: str, value: str) -> bytes:
    """A chat body with a field in literal JSON."""
    return f'{{"model":"{MODEL}","messages":{json.dumps(USER)},"{field}":{value}}}'.encode()


def chunked_over_the_limit(server: Server) -> RawAnswer:
    """20 MB in chunks of 1 MB; the response comes before all are sent, and memory does not grow."""
    memory = psutil.Process(server.process.pid).memory_info
    before = memory().rss
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    with server.connect() as sock:
        sock.sendall(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n")
        chunk = b"%x\r\n%b\r\n" % (2**20, b" " * 2**20)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(20):
                sock.sendall(chunk)
                assert memory().rss - before <= 8 * 2**20
        return read_answer(sock)


def one_byte_chunks(server: Server) -> RawAnswer:
    """70,000 chunks of one byte, which form a valid request."""
    body = chat_with("max_tokens", "1").ljust(70_000)
    data = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    head = f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\n"
    return server.raw(head.encode() + b"Transfer-Encoding: chunked\r\n\r\n" + data)


def with_headers(*headers: str) -> bytes:
    return http_post(CHAT, chat_with("max_tokens", "1"), *headers)


def malformed_length(headers: str) -> bytes:
    return f"POST {CHAT} HTTP/1.1\r\nHost: t\r\n{headers}\r\n\r\n0\r\n\r\n".encode()


def too_long_prompt(field: str) -> Row:
    words = "one two three four " * 2000
    if field == "messages":
        wanted = [{"role": "user", "content": words}]
        return chat("47 prompt > context", "messages", messages=wanted, code=CONTEXT)
    return completion("47 prompt > context, completions", "prompt", prompt=words, code=CONTEXT)


CONTEXT = "context_length_exceeded"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def tool(**function: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **function}}


def custom(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f", **fields}}


def input_grammar(syntax: str, definition: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": {"syntax": syntax, "definition": definition}}


NAMED = {"type": "function", "function": {"name": "absent"}}


def message(role: str, content: Any) -> list[dict[str, Any]]:
    return [{"role": role, "content": content}]


def not_found(name: str, model: str) -> Row:
    row = chat(name, "model", model=model)
    return Row(name, row.send, 404, "model", "model_not_found")


ROWS = [
    Row("1 unknown path", get("/v1/nothing"), 404, code="not_found"),
    Row("2 GET on POST route", get("/v1/completions"), 405, code="method_not_allowed"),
    invalid_json("3 empty body", b""),
    invalid_json("4 truncated", b'{"model": "m", "mess'),
    invalid_json("5 invalid UTF-8", b'{"model": "\xff"}'),
    invalid_json("6 list", b"[]"),
    invalid_json("6 string", b'"x"'),
    invalid_json("6 null", b"null"),
    invalid_json("7 NaN", chat_with("temperature", "NaN")),
    invalid_json("7 Infinity", chat_with("temperature", "Infinity")),
    literal("8 deep nesting", "a", b'{"a":' * 10_000 + b"1" + b"}" * 10_000, code="invalid_json"),
    *(
        chat(f"8 deep {field}", at, **{field: value})
        for field, at, value in (
            (
                "tools",
                "tools",
                [{"type": "function", "function": {"name": "f", "parameters": DEEP}}],
            ),
            ("chat_template_kwargs", "chat_template_kwargs", {"x": DEEP}),
            ("messages", "messages.1", [*USER, ASKED_DEEPLY, *USER]),
        )
    ),
    invalid_json("8 deep list", b"[" * 10_000),
    literal("9 long integer", "max_tokens", chat_with("max_tokens", "1" * 5000)),
    Row(
        "10 content type",
        http_post(CHAT, b"{}", content_type="text/plain"),
        415,
        code="unsupported_media_type",
    ),
    Row("11 gzip", with_headers("Content-Encoding: gzip"), 415, code="unsupported_media_type"),
    Row(
        "12 declared length over the limit",
        f"POST {CHAT} HTTP/1.1\r\nHost: t\r\nContent-Length: 99999999\r\n\r\n".encode(),
        413,
        code="body_too_large",
        closes=True,
    ),
    Row("13 chunked, over the limit", chunked_over_the_limit, 413, code="body_too_large"),
    Row("14 one-byte chunks", one_byte_chunks, 200),
    Row(
        "15 one 70 KB header",
        with_headers("X-Long: " + "a" * 70_000),
        431,
        code="headers_too_large",
        closes=True,
    ),
    Row("15 a URL of 70 KB", get("/" + "a" * 70_000), 431, code="headers_too_large", closes=True),
    Row(
        "16 300 headers",
        with_headers(*(f"X-{index}: 1" for index in range(300))),
        431,
        code="headers_too_large",
        closes=True,
    ),
    Row(
        "17 length and chunked",
        malformed_length("Content-Length: 5\r\nTransfer-Encoding: chunked"),
        closes=True,
    ),
    Row("17 two lengths", malformed_length("Content-Length: 5\r\nContent-Length: 6"), closes=True),
    Row("17 negative length", malformed_length("Content-Length: -5"), closes=True),
    Row(
        "17 a chunk without a size",
        malformed_length("Transfer-Encoding: chunked\r\n\r\nzz"),
        closes=True,
    ),
    *(
        Row(f"17 {number} hosts", f"GET /health HTTP/1.1\r\n{lines}\r\n".encode(), closes=True)
        for number, lines in (("no", "Accept: *\r\n"), ("two", "Host: t\r\n" * 2))
    ),
    Row("17 no host in HTTP/1.0", b"GET /health HTTP/1.0\r\n\r\n", 200),
    Row("17 no HTTP", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", closes=True),
    chat("28 model missing", "model", model=LEFT_OUT),
    not_found("29 unknown model", "gpt-none"),
    not_found("30 path as model", "../x"),
    not_found("30 absolute path", "/etc/passwd"),
    not_found("30 URL as model", "http://localhost/x"),
    chat("31 model name of 1 MB", "model", model="m" * 2**20),
    Row("32 LoRA route", http_post("/v1/load_lora_adapter", b"{}"), 404, code="not_found"),
    chat("33 messages missing", "messages", messages=LEFT_OUT),
    chat("34 no messages", "messages", messages=[]),
    chat("35 unknown role", "messages.0.role", messages=message("robot", "x")),
    chat("36 null content", "messages.0.content", messages=message("user", None)),
    chat("37 10,001 messages", "messages", messages=USER * 10_001),
    literal(
        "38 lone surrogate",
        "messages.0.content",
        f'{{"model":"{MODEL}","messages":[{{"role":"user","content":"\\ud83d"}}]}}'.encode(),
    ),
    Row("39 NUL in text", chat("", None, messages=message("user", "a\0b")).send, 200),
    completion("40 empty prompt", "prompt", prompt=""),
    completion("41 no prompt", "prompt", prompt=[]),
    completion("41 an empty list of ids", "prompt", prompt=[[]]),
    completion("41 prompt missing", "prompt", prompt=LEFT_OUT),
    completion("42 too many prompts", "prompt", prompt=["x"] * 1025),
    completion("43 token id -1", "prompt", prompt=[-1]),
    completion("44 token id outside the vocabulary", "prompt", prompt=[10**6]),
    completion("45 true as token id", "prompt", prompt=[True]),
    completion("45 fraction as token id", "prompt", prompt=[1.5]),
    completion("45 mixed list", "prompt", prompt=[1, "a"]),
    completion("45 mixed lists", "prompt", prompt=[[1], "a"]),
    Row("46 special spelling", chat("", None, messages=message("user", "<|im_end|>")).send, 200),
    too_long_prompt("messages"),
    too_long_prompt("prompt"),
    chat("49 max_tokens > context", "max_tokens", max_tokens=100_000, code=CONTEXT),
    completion("49 max_tokens > context", "max_tokens", max_tokens=100_000, code=CONTEXT),
    chat(
        "49 max_completion_tokens",
        "max_completion_tokens",
        max_completion_tokens=100_000,
        code=CONTEXT,
    ),
    *(chat(f"50 n {n}", "n", n=n) for n in (0, -1, 129, 10**9)),
    completion("51 best_of 21", "best_of", best_of=21),
    completion("51 best_of < n", "best_of", best_of=1, n=2),
    *(chat(f"52 temperature {t}", "temperature", temperature=t) for t in (-0.1, 2.1, "1", True)),
    literal("52 temperature 1e309", "temperature", chat_with("temperature", "1e309")),
    *(chat(f"53 top_p {p}", "top_p", top_p=p) for p in (-0.1, 1.1)),
    chat("54 top_k -2", "top_k", top_k=-2),
    chat("54 min_p 2", "min_p", min_p=2),
    *(
        chat(f"55 {field} {value}", field, **{field: value})
        for field in ("presence_penalty", "frequency_penalty")
        for value in (-2.1, 2.1)
    ),
    *(
        chat(f"55 repetition_penalty {p}", "repetition_penalty", repetition_penalty=p)
        for p in (0, 1e-37, 10.5)
    ),
    *(chat(f"56 max_tokens {m}", "max_tokens", max_tokens=m) for m in (-1, 0, 2**63, "5", 1.5)),
    completion("56 max_tokens -1", "max_tokens", max_tokens=-1),
    chat("57 top_logprobs 21", "top_logprobs", logprobs=True, top_logprobs=21),
    chat("57 top_logprobs alone", "top_logprobs", top_logprobs=2),
    completion("57 logprobs 21", "logprobs", logprobs=21),
    chat("58 logit_bias 101", "logit_bias", logit_bias={"5": 101}),
    chat("59 logit_bias key a", "logit_bias", logit_bias={"a": 1}),
    chat("59 logit_bias beyond", "logit_bias", logit_bias={"1000000": 1}),
    chat("59 1,025 biases", "logit_bias", logit_bias={str(i): 1 for i in range(1025)}),
    chat("60 five stops", "stop", stop=["a", "b", "c", "d", "e"]),
    chat("61 empty stop", "stop", stop=""),
    chat("61 stop of 1 MB", "stop", stop="x" * 2**20),
    chat("61 a stop that is no string", "stop", stop=[1]),
    chat("62 seed 2^64", "seed", seed=2**64),
    chat("63 stream maybe", "stream", stream="maybe"),
    chat("64 stream_options alone", "stream_options", stream_options={"include_usage": True}),
    chat("65 cache_salt of 129", "cache_salt", cache_salt="s" * 129),
    chat("65 cache_salt with NUL", "cache_salt", cache_salt="a\0"),
    chat("66 chat_template", "chat_template", chat_template="{{ messages }}"),
    chat("67 reserved", "chat_template_kwargs", chat_template_kwargs={"messages": []}),
    schema("70 type stsring", {"type": "stsring"}),
    schema("71 deep oneOf", deep_one_of(300), code="grammar_timeout"),
    schema("72 invalid regex", {"type": "string", "pattern": "(["}),
    schema("73 catastrophic regex", CATASTROPHE, code="grammar_timeout"),
    schema("74 100,000 values", {"enum": list(range(100_000))}),
    chat(
        "75 30,000 parentheses",
        "structured_outputs",
        structured_outputs={"grammar": "start: " + "(" * 30_000 + '"a"' + ")" * 30_000},
    ),
    chat(
        "75 in a regex",
        "structured_outputs",
        structured_outputs={"regex": "(" * 30_000 + "a" + ")" * 30_000},
    ),
    chat("77 bad tool", "tools.0.function", tools=[{"type": "function", "function": {}}]),
    chat("77 bad name", "tools.0.function", tools=[tool(name="a b")]),
    chat("77 bad parameters", "tools.0.function", tools=[tool(parameters=[])]),
    chat("77 bad type", "tools.0.function", tools=[tool(parameters={"type": "stsring"})]),
    chat(
        "77 bad inner type",
        "tools.1.function",
        tools=[TOOL, tool(parameters={"properties": {"a": {"items": {"type": "int"}}}})],
    ),
    chat("77 twice", "tools", tools=[TOOL, TOOL]),
    chat("77 twice", "functions", functions=[TOOL["function"]] * 2),
    chat("77 kind", "tools.0.type", tools=[{"type": "functoin", "function": {"name": "f"}}]),
    chat("77 no custom tool", "tools.0.custom", tools=[{**TOOL, "type": "custom"}]),
    chat("77 bad name", "tools.0.custom.name", tools=[custom(name="a b")]),
    chat("77 bad format", "tools.0.custom.format.type", tools=[custom(format={"type": "json"})]),
    chat(
        "77 bad grammar",
        "tools.0.custom.format",
        tools=[custom(format=input_grammar("regex", "(["))],
    ),
    chat(
        "77 catastrophic grammar",
        "tools.0.custom.format",
        tools=[custom(format=input_grammar("regex", CATASTROPHE["pattern"]))],
        code="grammar_timeout",
    ),
    chat("78 tool_choice", "tool_choice", tools=[TOOL], tool_choice=NAMED),
    chat("78 no tools", "tool_choice", tool_choice="required"),
    chat("78 unknown choice", "tool_choice", tools=[TOOL], tool_choice="any"),
    chat(
        "80 image",
        "messages.0.content",
        messages=message("user", [{"type": "image_url", "image_url": {"url": "http://x/"}}]),
    ),
    completion("81 prompt_embeds", "prompt_embeds", prompt_embeds="AAAA"),
    completion("suffix", "suffix", suffix="end"),
    chat("audio", "modalities", modalities=["text", "audio"]),
    chat("beam width 0", "beam_width", use_beam_search=True, beam_width=0),
    chat("beam width 65", "beam_width", use_beam_search=True, beam_width=65),
    chat("n above the beam width", "n", use_beam_search=True, beam_width=2, n=3),
    chat("n that is no beam width", "beam_width", use_beam_search=True, n=100),
    chat("beams on a stream", "stream", use_beam_search=True, stream=True),
    chat("beams with a penalty", "presence_penalty", use_beam_search=True, presence_penalty=1),
    chat("beams with a stop", "stop", use_beam_search=True, stop="x"),
    chat("length penalty", "length_penalty", use_beam_search=True, length_penalty=11),
    chat("early stopping", "early_stopping", use_beam_search=True, early_stopping="often"),
    chat("beams with 40 ends", "stop_token_ids", use_beam_search=True, stop_token_ids=[*range(40)]),
    completion("beams without a token", "max_tokens", use_beam_search=True, max_tokens=0),
    completion("the best of beams", "best_of", use_beam_search=True, best_of=2),
    completion("the best on a stream", "best_of", best_of=2, stream=True),
    completion("echo with suffix", "echo", suffix="x", echo=True),
    *(
        completion(f"cut to {kept}", "truncate_prompt_tokens", truncate_prompt_tokens=kept)
        for kept in (0, -2, 2**40, "5")
    ),
    completion("cut side", "truncation_side", truncate_prompt_tokens=2, truncation_side="up"),
    *(chat(f"deadline {ms}", "deadline_ms", deadline_ms=ms) for ms in (0, -1, 10**12, "5")),
    chat("min_tokens > max_tokens", "min_tokens", min_tokens=10),
    chat("stop id beyond", "stop_token_ids", stop_token_ids=[10**6]),
    Row("82 long id", with_headers("X-Request-Id: " + "a" * 10_000), 200),
    Row("82 CR in id", with_headers("X-Request-Id: a\rb"), closes=True),
]


@pytest.fixture(scope="module")
def canary(server: Server) -> tuple[list[int], float]:
    """A completion's tokens (from its logprobs), and the free blocks of an idle engine."""
    tokens = server.complete(logprobs=0, max_tokens=4).json()["choices"][0]["logprobs"]["tokens"]
    return tokens, server.wait_idle()["kv_blocks_free"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row(server: Server, canary: tuple[list[int], float], row: Row) -> None:
    answer = server.raw(row.send) if isinstance(row.send, bytes) else row.send(server)

    assert answer.status == row.status, answer.body[:500]
    assert {"x-request-id", "openai-processing-ms", "openai-version"} <= answer.headers.keys()
    if answer.status != 200:
        assert len(answer.body) <= 4096
        assert not _LEAK.search(answer.body)
        error = answer.error
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert (error["type"], error["param"], error["code"]) == (row.type, row.param, row.code)
        assert answer.headers["content-type"] == "application/json"
    if row.closes:
        assert answer.headers["connection"] == "close"

    tokens, free = canary
    assert server.get("/health").status_code == 200
    again = server.complete(logprobs=0, max_tokens=4).json()
    assert again["choices"][0]["logprobs"]["tokens"] == tokens
    assert server.wait_idle()["kv_blocks_free"] == free


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"messages": message("user", "one two three " * 2000)}),
        (CHAT, {"messages": message("user", "a" * 10**6)}),
        (CHAT, {"messages": message("user", "Hi"), "max_tokens": 5000}),
        ("/v1/completions", {"prompt": "one two three " * 2000}),
        ("/v1/responses", {"input": "one two three " * 2000}),
        ("/v1/embeddings", {"input": "one two three " * 2000}),
    ],
    ids=lambda value: str(value)[:40],
)
def test_too_much_is_told_in_the_words_that_clients_know(
    server: Server, path: str, fields: dict[str, Any]
) -> None:
    """LiteLLM and agents shorten a conversation if an error has OpenAI's wording."""
    error = server.post(path, {"model": MODEL, **fields}).json()["error"]
    assert error["message"].startswith("This model's maximum context length is 4096 tokens")
    assert error["code"] == CONTEXT


def test_request_ids(server: Server) -> None:
    """82, 83: a valid id is echoed, any other is replaced by one of ours."""

    def answered(given: str) -> str:
        return server.raw(with_headers(f"X-Request-Id: {given}")).headers["x-request-id"]

    assert answered("trace-42") == "trace-42"
    assert answered("a" * 10_000).startswith("req_")
    assert answered("a b").startswith("req_")

    # An id in use: the first request is held open while a second one arrives with the same id.
    with server.connect() as first:
        first.sendall(http_post(CHAT, b'{"unfinished', "X-Request-Id: dup")[:-1])
        # Soon it is read and the id is taken; once it has ended, the id is free again.
        assert any(answered("dup").startswith("req_") for _ in range(100))
    assert any(answered("dup") == "dup" for _ in range(100))


def test_many_connections_that_say_nothing(server: Server) -> None:
    sockets: list[socket.socket] = [server.connect() for _ in range(100)]
    assert server.get("/health").status_code == 200
    for sock in sockets:
        sock.close()
