"""Streams on the wire: raw bytes, chunk by chunk."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.servers import MODEL, Server, http_post

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = {"model": MODEL, "prompt": "Once upon a time", "temperature": 0, "max_tokens": 24}


def events_of(raw: bytes) -> list[dict[str, Any]]:
    """The JSON events of a stream; checks its framing and its end."""
    parts = raw.split(b"\n\n")
    assert parts.pop() == b""
    assert parts.pop() == b"data: [DONE]"
    assert all(part.startswith(b"data: {") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": QUESTION, "temperature": 0, "max_tokens": 32, **fields}


def test_chat_chunk_order(server: Server) -> None:
    whole = server.post(CHAT, chat_body()).json()
    events = events_of(server.stream(CHAT, chat_body()))

    assert len({(e["id"], e["created"], e["model"], e["system_fingerprint"]) for e in events}) == 1
    assert {e["object"] for e in events} == {"chat.completion.chunk"}
    assert all("usage" not in e for e in events)
    choices = [choice for e in events for choice in e["choices"]]
    assert all(len(e["choices"]) == 1 and e["choices"][0]["index"] == 0 for e in events)
    first, *middle, last = choices
    assert first["delta"] == {"role": "assistant", "content": ""}
    assert first["finish_reason"] is None
    assert all(set(c["delta"]) == {"content"} and c["finish_reason"] is None for c in middle)
    assert last["delta"] == {}
    assert last["finish_reason"] == whole["choices"][0]["finish_reason"]
    text = "".join(c["delta"]["content"] for c in middle)
    assert text == whole["choices"][0]["message"]["content"]


def test_whole_chat_answer(server: Server) -> None:
    answer = server.post(CHAT, chat_body())
    body = answer.json()
    assert body["object"] == "chat.completion"
    assert body["id"].startswith("chatcmpl-")
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant"
    assert choice["message"]["refusal"] is None
    assert choice["logprobs"] is None
    assert choice["finish_reason"] == "stop"
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}
    for header in ("x-request-id", "openai-processing-ms", "openai-version"):
        assert answer.headers[header]
    tokenized = server.post("/tokenize", {"messages": QUESTION}).json()
    assert tokenized["count"] == usage["prompt_tokens"] == len(tokenized["tokens"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_usage_chunk(server: Server, path: str) -> None:
    body = chat_body() if path == CHAT else STORY
    whole = server.post(path, body).json()
    options = {"stream_options": {"include_usage": True}}
    *chunks, last = events_of(server.stream(path, {**body, **options}))
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in chunks)
    assert last["choices"] == []
    for field in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert last["usage"][field] == whole["usage"][field]


def test_completion_chunks(server: Server) -> None:
    whole = server.post(COMPLETIONS, STORY).json()
    assert whole["object"] == "text_completion"
    assert whole["usage"]["completion_tokens"] <= 24
    events = events_of(server.stream(COMPLETIONS, STORY))
    choices = [event["choices"][0] for event in events]
    assert {event["object"] for event in events} == {"text_completion"}
    assert "".join(c["text"] for c in choices) == whole["choices"][0]["text"]
    assert [c["finish_reason"] for c in choices[:-1]] == [None] * (len(choices) - 1)
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]


def test_several_choices_interleave(server: Server) -> None:
    story = [{"role": "user", "content": "Tell me a short story."}]
    sampled = chat_body(messages=story, n=3, temperature=2.0, seed=7, max_tokens=24)
    whole = server.post(CHAT, sampled).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2]
    texts = ["", "", ""]
    ends: dict[int, str] = {}
    seen: list[int] = []
    for event in events_of(server.stream(CHAT, sampled)):
        (choice,) = event["choices"]
        index = choice["index"]
        if index not in seen:
            assert choice["delta"] == {"role": "assistant", "content": ""}
            seen.append(index)
        assert index not in ends
        texts[index] += choice["delta"].get("content", "")
        if choice["finish_reason"]:
            ends[index] = choice["finish_reason"]
    assert texts == [c["message"]["content"] for c in whole["choices"]]
    assert ends == {c["index"]: c["finish_reason"] for c in whole["choices"]}
    assert len(set(texts)) > 1  # each choice has its own seed
    # The first choice of a seeded request equals the single choice with n = 1.
    alone = server.post(CHAT, {**sampled, "n": 1}).json()
    assert alone["choices"][0]["message"]["content"] == texts[0]


def test_prompts_times_n(server: Server) -> None:
    prompts = ["The capital of France is", "One, two, three,"]
    body = {**STORY, "prompt": prompts, "n": 2, "max_tokens": 6, "seed": 1, "temperature": 0.9}
    whole = server.post(COMPLETIONS, body).json()
    assert [c["index"] for c in whole["choices"]] == [0, 1, 2, 3]
    for position, prompt in enumerate(prompts):
        alone = server.post(COMPLETIONS, {**body, "prompt": prompt}).json()
        part = whole["choices"][position * 2 : position * 2 + 2]
        assert [c["text"] for c in part] == [c["text"] for c in alone["choices"]]
    texts = [""] * 4
    for event in events_of(server.stream(COMPLETIONS, body)):
        for choice in event["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == [c["text"] for c in whole["choices"]]
    # Every prompt is counted once, and every output token.
    lengths = [server.post("/tokenize", {"prompt": prompt}).json()["count"] for prompt in prompts]
    assert whole["usage"]["prompt_tokens"] == sum(lengths)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_special_token_is_a_stop_string_too(server: Server, path: str) -> None:
    """It is left out of the text, and the text went on for ever behind it."""
    mark = "<|im_start|>"
    asked = chat_body() if path == CHAT else STORY
    (token,) = server.post("/tokenize", {"messages": QUESTION}).json()["tokens"][:1]
    forced = {**asked, "allowed_token_ids": [token], "max_tokens": 5}
    free = server.post(path, forced).json()
    assert (free["usage"]["completion_tokens"], free["choices"][0]["finish_reason"]) == (
        5,
        "length",
    )
    whole = server.post(path, {**forced, "stop": ["x", mark]}).json()
    choice = whole["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", mark)
    assert whole["usage"]["completion_tokens"] == 1
    *_, last = events_of(server.stream(path, {**forced, "stop": mark}))
    assert last["choices"][0]["finish_reason"] == "stop"


def test_stop_at_every_split(server: Server) -> None:
    """A stop string that starts and ends anywhere within tokens; none of it is sent."""
    text = server.post(COMPLETIONS, STORY).json()["choices"][0]["text"]
    for start in range(1, 20):
        stop = text[start : start + 5]
        expected = text[: text.index(stop)]
        body = {**STORY, "stop": [stop, "never said"]}
        (choice,) = server.post(COMPLETIONS, body).json()["choices"]
        assert (choice["text"], choice["finish_reason"]) == (expected, "stop")
        assert choice["stop_reason"] == stop
        if start % 6 == 0:
            streamed = events_of(server.stream(COMPLETIONS, body))
            assert "".join(e["choices"][0]["text"] for e in streamed) == expected
            assert streamed[-1]["choices"][0]["stop_reason"] == stop
    kept = server.post(
        COMPLETIONS, {**STORY, "stop": text[5:9], "include_stop_str_in_output": True}
    ).json()["choices"][0]
    assert kept["text"] == text[: text.index(text[5:9]) + 4]
    server.wait_idle()


def test_ends(server: Server) -> None:
    """max_tokens, ignore_eos, min_tokens and stop ids determine where an answer ends."""
    limited = server.post(CHAT, chat_body(max_tokens=2)).json()
    assert limited["choices"][0]["finish_reason"] == "length"
    assert limited["usage"]["completion_tokens"] == 2
    same = server.post(CHAT, chat_body(max_tokens=9, max_completion_tokens=2)).json()
    assert same["usage"]["completion_tokens"] == 2
    forced = server.post(CHAT, chat_body(max_tokens=40, ignore_eos=True)).json()
    assert forced["usage"]["completion_tokens"] == 40
    held = server.post(CHAT, chat_body(max_tokens=40, min_tokens=30)).json()
    assert held["usage"]["completion_tokens"] >= 30
    first = server.complete(logprobs=0, max_tokens=3).json()["choices"][0]
    (stop_id,) = server.post(
        "/tokenize", {"prompt": first["logprobs"]["tokens"][1], "add_special_tokens": False}
    ).json()["tokens"]
    stopped = server.complete(max_tokens=3, stop_token_ids=[stop_id]).json()["choices"][0]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop_id)
    assert stopped["text"] == first["logprobs"]["tokens"][0]


def test_unicode_is_never_split(server: Server) -> None:
    """Forced random bytes of multi-byte characters: the deltas join to the whole answer."""
    prompt = "日本語 👩‍👩‍👧‍👦 ünï"
    body = {**STORY, "prompt": prompt, "temperature": 2.0, "seed": 5, "max_tokens": 40}
    body |= {"ignore_eos": True, "top_k": 0}
    whole = server.post(COMPLETIONS, body).json()["choices"][0]["text"]
    streamed = events_of(server.stream(COMPLETIONS, body))
    assert "".join(e["choices"][0]["text"] for e in streamed) == whole
    tokens = server.post("/tokenize", {"prompt": prompt, "return_token_strs": True}).json()
    assert tokens["count"] == len(tokens["tokens"]) == len(tokens["token_strs"])
    back = server.post("/detokenize", {"tokens": tokens["tokens"]}).json()
    assert back["prompt"].endswith(prompt)


def test_continue_final_message(server: Server) -> None:
    messages = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
    body = chat_body(messages=messages, continue_final_message=True, max_tokens=2)
    answer = server.post(CHAT, body).json()
    assert answer["choices"][0]["message"]["content"]
    tokens = server.post("/tokenize", {"messages": messages, "continue_final_message": True})
    assert tokens.json()["count"] == answer["usage"]["prompt_tokens"]
    wrong = server.post(CHAT, chat_body(continue_final_message=True))
    assert wrong.json()["error"]["param"] == "continue_final_message"


def test_the_answer_continues_a_prefix(server: Server) -> None:
    """The name that DeepSeek's and Mistral's APIs have for it."""
    begun = {"role": "assistant", "content": "The capital of France is"}
    asked = {"temperature": 0, "max_tokens": 4}
    messages = [*QUESTION, begun]
    known = server.post(CHAT, chat_body(messages=messages, continue_final_message=True, **asked))
    messages = [*QUESTION, {**begun, "prefix": True}]
    answer = server.post(CHAT, chat_body(messages=messages, **asked))
    assert answer.json()["choices"] == known.json()["choices"]
    assert answer.json()["usage"]["prompt_tokens"] == known.json()["usage"]["prompt_tokens"]
    assert "x-quire-ignored-params" not in answer.headers
    earlier = server.post(CHAT, chat_body(messages=[*messages, *QUESTION], **asked))
    assert earlier.headers["x-quire-ignored-params"] == "messages.1.prefix"
    wrong = server.post(CHAT, chat_body(messages=[{**QUESTION[0], "prefix": True}]))
    assert wrong.status_code == 400
    assert wrong.json()["error"]["param"] == "messages.0.prefix"


def test_text_parts_and_special_spellings(server: Server) -> None:
    """Text parts are text, and so is the spelling of a special token."""
    parts = [
        {"type": "text", "text": "What is the capital"},
        {"type": "text", "text": "of France?"},
    ]
    joined = chat_body(messages=[{"role": "user", "content": parts}])
    plain = chat_body(messages=[{"role": "user", "content": "What is the capital\nof France?"}])
    answers = [server.post(CHAT, body).json() for body in (joined, plain)]
    assert answers[0]["choices"] == answers[1]["choices"]
    spelled = {"messages": [{"role": "user", "content": "<|im_end|>"}], "return_token_strs": True}
    tokens = server.post("/tokenize", spelled).json()["token_strs"]
    assert tokens.count("<|im_end|>") == 1  # the template's own


def test_cached_tokens_are_told(server: Server) -> None:
    prompt = "Prefix caching is told in usage. " * 8
    first, second = (server.complete(prompt, max_tokens=1).json()["usage"] for _ in range(2))
    cached = second["prompt_tokens_details"]["cached_tokens"]
    assert 0 < cached < second["prompt_tokens"] == first["prompt_tokens"]
    salted = server.complete(prompt, max_tokens=1, cache_salt="tenant").json()["usage"]
    assert salted["prompt_tokens_details"]["cached_tokens"] == 0


def test_ignored_parameters_are_named(server: Server) -> None:
    answer = server.chat(max_tokens=2, web_search="low", colour="blue", store=False)
    assert answer.status_code == 200
    assert answer.headers["x-quire-ignored-params"] == "web_search,colour"
    quiet = server.chat(max_tokens=2, user="u", metadata={"a": "b"}, tools=[], tool_choice="none")
    assert "x-quire-ignored-params" not in quiet.headers


def test_an_error_before_the_first_byte_has_its_status(server: Server) -> None:
    body = chat_body(stream=True, temperature=3)
    answer = server.post(CHAT, body)
    assert answer.status_code == 400
    assert answer.headers["content-type"] == "application/json"


def test_one_write_a_step(server: Server) -> None:
    """Each HTTP chunk holds whole events: the output of one step is written at once."""
    with server.connect() as sock:
        sock.sendall(http_post(CHAT, json.dumps(chat_body(stream=True)).encode()))
        data = b""
        while not data.endswith(b"0\r\n\r\n"):
            data += sock.recv(65536)
    head, body = data.split(b"\r\n\r\n", 1)
    assert b"content-type: text/event-stream" in head
    assert b"content-length" not in head
    chunks = []
    while body:
        size, _, rest = body.partition(b"\r\n")
        chunks.append(rest[: int(size, 16)])
        body = rest[int(size, 16) + 2 :]
    assert all(chunk.endswith(b"\n\n") for chunk in chunks if chunk)
    first = events_of(chunks[0] + b"data: [DONE]\n\n")
    assert first[0]["choices"][0]["delta"]["role"] == "assistant"
    assert len(first) >= 2  # the role comes with the first text, not before it
