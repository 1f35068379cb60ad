"""Logprobs in both formats, and what evaluation harnesses rely on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.server.test_streams import events_of
from tests.servers import MODEL, Server

TEXTS = ["The capital of France is Paris.", "Water boils at one hundred degrees."]


def tokens_of(server: Server, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text}).json()["tokens"]


def test_harness_loglikelihood(server: Server) -> None:
    """Token-id prompts, echo, one extra token: as lm-eval's local-completions sends and slices."""
    prompts = [tokens_of(server, text) for text in TEXTS]
    body = {"model": MODEL, "prompt": prompts, "temperature": 0, "max_tokens": 1}
    answer = server.post("/v1/completions", {**body, "logprobs": 1, "echo": True, "seed": 1234})
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == [0, 1]
    for prompt, text, choice in zip(prompts, TEXTS, choices, strict=True):
        told = choice["logprobs"]
        assert {len(values) for values in told.values()} == {len(prompt) + 1}
        assert told["token_logprobs"][0] is None
        assert told["top_logprobs"][0] is None
        assert choice["text"].startswith(text)
        for token, logprob, top in zip(
            told["tokens"][1:], told["token_logprobs"][1:], told["top_logprobs"][1:], strict=True
        ):
            assert logprob <= 0
            assert top[token] == logprob  # the same float, so that equality means greedy
            assert 1 <= len(top) <= 2
            assert max(top.values()) >= logprob
        # The generated token is greedy, and so the most likely one.
        assert told["token_logprobs"][-1] == max(told["top_logprobs"][-1].values())
        assert told["text_offset"][0] == 0
        assert told["text_offset"] == sorted(told["text_offset"])
        assert told["text_offset"][-1] == len(text)


def test_scoring_equals_generation(server: Server) -> None:
    """The logprobs of generated tokens equal those of the same tokens in a prompt."""
    (choice,) = server.complete(TEXTS[0][:20], logprobs=2, max_tokens=5).json()["choices"]
    ids = tokens_of(server, TEXTS[0][:20]) + [
        id
        for token in choice["logprobs"]["tokens"]
        for id in server.post("/tokenize", {"prompt": token, "add_special_tokens": False}).json()[
            "tokens"
        ]
    ]
    (scored,) = server.complete(ids, logprobs=2, echo=True, max_tokens=0).json()["choices"]
    tail = scored["logprobs"]["token_logprobs"][-5:]
    # In bfloat16, where the processor supports it, a chunk and single tokens round differently.
    assert tail == pytest.approx(choice["logprobs"]["token_logprobs"], abs=0.03)
    assert scored["logprobs"]["tokens"][-5:] == choice["logprobs"]["tokens"]


def test_echo_alone(server: Server) -> None:
    answer = server.complete(TEXTS[0], echo=True, max_tokens=0).json()
    assert answer["choices"][0]["text"] == TEXTS[0]
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 0
    ids = tokens_of(server, TEXTS[0])
    scored = server.complete(ids, echo=True, logprobs=1, max_tokens=0).json()["choices"][0]
    assert len(scored["logprobs"]["tokens"]) == len(ids)
    assert scored["text"] == "".join(scored["logprobs"]["tokens"])


def test_echo_streamed(server: Server) -> None:
    body = {"model": MODEL, "prompt": TEXTS, "echo": True, "logprobs": 1, "max_tokens": 3}
    body |= {"temperature": 0}
    whole = server.post("/v1/completions", body).json()["choices"]
    joined: list[dict[str, Any]] = [
        {"text": "", "tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for _ in TEXTS
    ]
    for event in events_of(server.stream("/v1/completions", body)):
        for choice in event["choices"]:
            into = joined[choice["index"]]
            into["text"] += choice["text"]
            for field, values in (choice["logprobs"] or {}).items():
                into[field] += values
    for choice, into in zip(whole, joined, strict=True):
        assert into.pop("text") == choice["text"]
        assert json.dumps(into) == json.dumps(choice["logprobs"])


def test_chat_logprobs(server: Server) -> None:
    asked = {"logprobs": True, "top_logprobs": 3, "max_tokens": 12}
    (choice,) = server.chat(**asked).json()["choices"]
    content = choice["logprobs"]["content"]
    assert choice["logprobs"]["refusal"] is None
    spoken = b"".join(bytes(entry["bytes"]) for entry in content)
    assert spoken.decode() == choice["message"]["content"]
    for entry in content:
        assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
        assert len(entry["top_logprobs"]) == 3
        assert entry["top_logprobs"][0]["logprob"] == entry["logprob"]  # greedy
        values = [top["logprob"] for top in entry["top_logprobs"]]
        assert values == sorted(values, reverse=True)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, **asked}
    streamed: list[Any] = []
    for event in events_of(server.stream("/v1/chat/completions", body)):
        streamed += (event["choices"][0]["logprobs"] or {"content": []})["content"]
    assert streamed == content
    bare = server.chat(logprobs=True, max_tokens=2).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in bare)


def test_part_of_a_character_has_its_bytes(server: Server) -> None:
    """A character of several tokens: each token has its own raw bytes."""
    ids = tokens_of(server, "👩‍👩‍👧 日本")
    (choice,) = server.complete(ids, echo=True, logprobs=0, max_tokens=0).json()["choices"]
    assert len(choice["logprobs"]["tokens"]) == len(ids)
    assert choice["text"].endswith("👩‍👩‍👧 日本")


def test_prompt_logprobs(server: Server) -> None:
    ids = tokens_of(server, TEXTS[1])
    (choice,) = server.complete(ids, prompt_logprobs=2, max_tokens=1).json()["choices"]
    told = choice["prompt_logprobs"]
    assert told[0] is None
    assert len(told) == len(ids)
    for id, position in zip(ids[1:], told[1:], strict=True):
        assert str(id) in position
        assert 2 <= len(position) <= 3
        assert {entry["rank"] for entry in position.values()} >= {1, 2}
    chat = server.chat(prompt_logprobs=1, max_tokens=1).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]


def test_prompt_logprobs_come_first_on_a_stream(server: Server) -> None:
    fields: dict[str, Any] = {"prompt_logprobs": 1, "max_tokens": 3, "temperature": 0, "n": 2}
    prompt = {"model": MODEL, "prompt": list(TEXTS[:2]), **fields}
    whole = server.post("/v1/completions", prompt).json()["choices"]
    told: dict[int, Any] = {}
    begun: set[int] = set()
    for event in events_of(server.stream("/v1/completions", prompt)):
        (choice,) = event["choices"]
        assert ("prompt_logprobs" in choice) == (choice["index"] not in begun)
        begun.add(choice["index"])
        told.setdefault(choice["index"], choice.get("prompt_logprobs"))
    assert told == {choice["index"]: choice["prompt_logprobs"] for choice in whole}
    messages = [{"role": "user", "content": TEXTS[1]}]
    chat = {"model": MODEL, "messages": messages, **fields}
    events = events_of(server.stream("/v1/chat/completions", chat))
    (first,) = [event for event in events if "prompt_logprobs" in event]
    assert first["choices"][0]["delta"]["role"] == "assistant"
    answer = server.post("/v1/chat/completions", chat).json()
    assert first["prompt_logprobs"] == answer["prompt_logprobs"]


def test_sampling_parameters_have_their_effect(server: Server) -> None:
    """logit_bias, penalties and truncation have an effect; a seed determines the text."""
    (plain,) = server.complete(logprobs=0, max_tokens=6).json()["choices"]
    first = plain["logprobs"]["tokens"][0]
    (id,) = server.post("/tokenize", {"prompt": first, "add_special_tokens": False}).json()[
        "tokens"
    ]
    (banned,) = server.complete(logprobs=0, max_tokens=1, logit_bias={str(id): -100}).json()[
        "choices"
    ]
    assert banned["logprobs"]["tokens"][0] != first
    hot = {"temperature": 1.5, "max_tokens": 12, "ignore_eos": True}
    texts = {server.complete(seed=seed, **hot).json()["choices"][0]["text"] for seed in range(4)}
    assert len(texts) > 1
    again = [server.complete(seed=3, **hot).json()["choices"][0]["text"] for _ in range(2)]
    assert again[0] == again[1]
    greedy = server.complete(max_tokens=12, ignore_eos=True).json()["choices"][0]["text"]
    for narrow in ({"top_k": 1}, {"top_p": 0.0}, {"min_p": 1.0}):
        assert server.complete(**{**hot, **narrow}).json()["choices"][0]["text"] == greedy
