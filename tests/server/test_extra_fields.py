"""Fields beyond OpenAI's: token ids, prompt truncation, best_of, running usage."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from engine.text.tokenizer import Tokenizer
from server.errors import ApiError
from server.openai.endpoint import read_fields
from server.openai.inputs import CompletionRequest
from server.settings import Settings
from server.text.infill import FAMILIES, Infill
from tests.server.asgi import running_app
from tests.server.test_streams import events_of
from tests.servers import MODEL, ROOT, Server

TEXT = "The capital of France is Paris, and the capital of Spain is"
USER = [{"role": "user", "content": "What is the capital of France?"}]


def tokenize(server: Server, **fields: Any) -> list[int]:
    return server.post("/tokenize", {"model": MODEL, **fields}).json()["tokens"]


def detokenize(server: Server, ids: list[int]) -> str:
    return server.post("/detokenize", {"tokens": ids}).json()["prompt"]


# ---------------------------------------------------------------- token ids


def test_token_ids_of_completions(server: Server) -> None:
    body = {"model": MODEL, "prompt": [TEXT, "Hello"], "max_tokens": 8, "n": 2, "seed": 1}
    body |= {"return_token_ids": True, "ignore_eos": True}
    whole = server.post("/v1/completions", body).json()["choices"]
    for choice in whole:
        prompt = body["prompt"][choice["index"] // 2]
        assert choice["prompt_token_ids"] == tokenize(server, prompt=prompt)
        assert len(choice["token_ids"]) == 8
        assert detokenize(server, choice["token_ids"]) == choice["text"]
    prompts: dict[int, list[int]] = {}
    ids: dict[int, list[int]] = {index: [] for index in range(4)}
    for event in events_of(server.stream("/v1/completions", body)):
        for choice in event["choices"]:
            if "prompt_token_ids" in choice:
                assert choice["index"] not in prompts, "told once"
                prompts[choice["index"]] = choice["prompt_token_ids"]
            ids[choice["index"]] += choice.get("token_ids", [])
    assert [ids[choice["index"]] for choice in whole] == [c["token_ids"] for c in whole]
    assert [prompts[c["index"]] for c in whole] == [c["prompt_token_ids"] for c in whole]


def test_token_ids_of_chats(server: Server) -> None:
    fields = {"return_token_ids": True, "stop": "Paris", "temperature": 0}
    whole = server.chat(**fields).json()
    assert whole["prompt_token_ids"] == tokenize(server, messages=USER)
    (choice,) = whole["choices"]
    # The tokens include the stop string, as they include an end token.
    assert "Paris" in detokenize(server, choice["token_ids"])
    assert "Paris" not in choice["message"]["content"]
    assert whole["usage"]["completion_tokens"] == len(choice["token_ids"])
    body = {"model": MODEL, "messages": USER, **fields}
    events = events_of(server.stream("/v1/chat/completions", body))
    assert [event["prompt_token_ids"] for event in events if "prompt_token_ids" in event] == [
        whole["prompt_token_ids"]
    ]
    told = [id_ for event in events for id_ in event["choices"][0].get("token_ids", [])]
    assert told == choice["token_ids"]


def test_tokens_named_by_their_ids(server: Server) -> None:
    fields = {"logprobs": 2, "max_tokens": 4, "return_token_ids": True, "echo": True}
    (choice,) = server.complete(TEXT, return_tokens_as_token_ids=True, **fields).json()["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    told = choice["logprobs"]
    assert told["tokens"] == [f"token_id:{id_}" for id_ in ids]
    for token, top in zip(told["tokens"][1:], told["top_logprobs"][1:], strict=True):
        assert token in top
        assert all(name.removeprefix("token_id:").isdigit() for name in top)
    (plain,) = server.complete(TEXT, **fields).json()["choices"]
    assert plain["logprobs"]["token_logprobs"] == told["token_logprobs"]
    assert plain["logprobs"]["text_offset"] == told["text_offset"]

    chat = {"logprobs": True, "top_logprobs": 1, "max_tokens": 3, "return_token_ids": True}
    (choice,) = server.chat(return_tokens_as_token_ids=True, **chat).json()["choices"]
    for id_, entry in zip(choice["token_ids"], choice["logprobs"]["content"], strict=False):
        assert entry["token"] == entry["top_logprobs"][0]["token"] == f"token_id:{id_}"
        assert bytes(entry["bytes"]).decode() == detokenize(server, [id_])


# ---------------------------------------------------------------- the prompt


@pytest.mark.parametrize(("side", "kept"), [(None, slice(-5, None)), ("right", slice(5))])
def test_a_long_prompt_is_cut(server: Server, side: str | None, kept: slice) -> None:
    ids = tokenize(server, prompt=TEXT)
    assert len(ids) > 5
    fields = {"max_tokens": 3, "return_token_ids": True, "echo": True}
    cut = {"truncate_prompt_tokens": 5, "truncation_side": side}
    answer = server.complete(TEXT, **fields, **cut).json()
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == ids[kept]
    assert answer["usage"]["prompt_tokens"] == 5
    assert choice["text"].startswith(detokenize(server, ids[kept]))
    assert server.complete(ids[kept], **fields).json()["choices"] == answer["choices"]
    whole = tokenize(server, messages=USER)
    chat = server.chat(max_tokens=3, return_token_ids=True, **cut).json()
    assert chat["prompt_token_ids"] == whole[kept]


def test_a_prompt_is_cut_to_what_leaves_room(server: Server) -> None:
    (model,) = server.get("/v1/models").json()["data"]
    context = model["max_model_len"]
    long = "word " * (context + 50)
    assert server.complete(long, max_tokens=7).json()["error"]["code"] == "context_length_exceeded"
    answer = server.complete(long, max_tokens=7, truncate_prompt_tokens=-1, ignore_eos=True).json()
    assert answer["usage"]["prompt_tokens"] == context - 7
    assert answer["usage"]["completion_tokens"] == 7


def test_a_prompt_keeps_more_than_the_context_never(server: Server) -> None:
    for value in (0, -2, 2**31, 1.5, "5", 10**6):
        error = server.complete(truncate_prompt_tokens=value).json()["error"]
        assert (error["param"], error["code"]) == ("truncate_prompt_tokens", None)
    error = server.complete(truncate_prompt_tokens=4, truncation_side="top").json()["error"]
    assert error["param"] == "truncation_side"


def test_an_answer_can_begin_with_the_turn_it_goes_on_with(server: Server) -> None:
    opened = "The capital of France"
    messages = [*USER, {"role": "assistant", "content": opened}]
    body = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
    body |= {"add_generation_prompt": False, "continue_final_message": True}
    rest = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    body["echo"] = True
    whole = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    assert whole == opened + rest
    events = events_of(server.stream("/v1/chat/completions", body))
    deltas = [event["choices"][0]["delta"] for event in events]
    assert "".join(delta.get("content", "") for delta in deltas) == whole


# ---------------------------------------------------------------- best of


def test_the_best_of_several(server: Server) -> None:
    fields = {"temperature": 1.0, "seed": 7, "max_tokens": 6, "logprobs": 0}
    several = server.complete(["Once", "The"], n=6, **fields).json()
    best = server.complete(["Once", "The"], n=2, best_of=6, **fields).json()

    def mean(choice: dict[str, Any]) -> float:
        told = choice["logprobs"]["token_logprobs"]
        return math.fsum(told) / len(told)

    expected = []
    for group in (several["choices"][:6], several["choices"][6:]):
        expected += sorted(group, key=mean, reverse=True)[:2]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in best["choices"]] == [c["text"] for c in expected]
    assert best["usage"]["completion_tokens"] == several["usage"]["completion_tokens"]
    silent = server.complete("Once", best_of=3, temperature=1.0).json()["choices"]
    assert [choice["logprobs"] for choice in silent] == [None]


# ---------------------------------------------------------------- beam search


def test_beam_search(server: Server) -> None:
    fields = {"max_tokens": 8, "logprobs": 1, "ignore_eos": True, "return_token_ids": True}
    fields["skip_special_tokens"] = False
    beams = {"use_beam_search": True, "beam_width": 4, "length_penalty": 0.0, "n": 3}
    answer = server.complete([TEXT, "Once"], **fields, **beams, top_p=0.5, seed=3)
    assert answer.headers["x-quire-ignored-params"] == "top_p,seed"
    choices = answer.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(6))
    assert answer.json()["usage"]["completion_tokens"] == 2 * 4 * 8  # of all beams
    for prompt, group in ((TEXT, choices[:3]), ("Once", choices[3:])):
        totals = [math.fsum(choice["logprobs"]["token_logprobs"]) for choice in group]
        assert totals == sorted(totals, reverse=True)
        assert len({tuple(choice["token_ids"]) for choice in group}) == 3
        (greedy,) = server.complete(prompt, **fields).json()["choices"]
        # In bfloat16 a chunk and single tokens are rounded differently.
        assert totals[0] >= math.fsum(greedy["logprobs"]["token_logprobs"]) - 0.1
        for choice in group:
            assert choice["finish_reason"] == "length"
            assert choice["text"] == detokenize(server, choice["token_ids"])
    server.wait_idle()


def test_beam_search_in_a_chat(server: Server) -> None:
    answer = server.chat(use_beam_search=True, n=2, max_tokens=40, early_stopping=True).json()
    first, second = answer["choices"]
    assert (first["index"], second["index"]) == (0, 1)
    assert "Paris" in first["message"]["content"]
    assert first["message"]["content"] != second["message"]["content"]
    assert answer["usage"]["completion_tokens"] > 2
    idle = server.chat(beam_width=3, length_penalty=2.0, max_tokens=1)
    assert idle.headers["x-quire-ignored-params"] == "beam_width,length_penalty"


def test_a_beam_search_that_is_late_ends(server: Server) -> None:
    endless = {"max_tokens": 1500, "ignore_eos": True, "deadline_ms": 300}
    answer = server.complete("One", use_beam_search=True, n=4, **endless)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_exceeded")
    server.wait_idle()


# ---------------------------------------------------------------- usage


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_grows_with_the_stream(server: Server, path: str) -> None:
    body = {"model": MODEL, "temperature": 0, "max_tokens": 6, "n": 2, "ignore_eos": True}
    body |= {"messages": USER} if "chat" in path else {"prompt": TEXT}
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = events_of(server.stream(path, {**body, "stream_options": options}))
    told = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert told == sorted(told)
    assert told[-1] == last["usage"]["completion_tokens"] == 12
    assert {chunk["usage"]["prompt_tokens"] for chunk in [*chunks, last]} == {
        last["usage"]["prompt_tokens"]
    }
    # Alone it has no effect: a stream without usage has none.
    alone = {"continuous_usage_stats": True}
    assert not any(
        "usage" in chunk
        for chunk in events_of(server.stream(path, body | {"stream_options": alone}))
    )


# ---------------------------------------------------------------- infilling


def with_tokens(directory: Path, *spellings: str) -> Path:
    """The demo model's tokenizer with additional vocabulary entries."""
    source = ROOT / "demo" / "model"
    data = json.loads((source / "tokenizer.json").read_text())
    first = 1 + max(entry["id"] for entry in data["added_tokens"])
    first = max(first, len(data["model"]["vocab"]))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for id_, text in enumerate(spellings, first):
        data["added_tokens"].append({"id": id_, "content": text, "special": True, **flags})
    directory.mkdir(exist_ok=True)
    (directory / "tokenizer.json").write_text(json.dumps(data))
    config = source / "tokenizer_config.json"
    (directory / config.name).write_text(config.read_text())
    return directory


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.layout[0])
def test_each_family_has_its_own_order(tmp_path: Path, family: Any) -> None:
    marks = [text for text in family.layout if "{" not in text]
    tokenizer = Tokenizer.from_dir(with_tokens(tmp_path, *marks, *family.ends))
    infill = Infill.of(tokenizer)
    assert infill is not None
    ids = infill.encode("def f(x):\n", "\nreturn y")
    shown = tokenizer.decode(ids, skip_special_tokens=False)
    expected = "".join(family.layout).replace("{before}", "def f(x):\n")
    assert shown == expected.replace("{after}", "\nreturn y")
    assert {tokenizer.token_id(mark) for mark in marks} <= set(ids)
    assert set(infill.stop_token_ids) == {tokenizer.token_id(end) for end in family.ends}
    # A spelling within the texts is text.
    assert sum(id_ == tokenizer.token_id(marks[0]) for id_ in infill.encode(marks[0], "")) == 1


def test_a_model_without_the_tokens_cannot(server: Server) -> None:
    error = server.complete("def f(x):", suffix="return y").json()["error"]
    assert (error["param"], error["code"]) == ("suffix", None)
    assert "middle" in error["message"]
    assert server.complete("def f(x):", suffix="").status_code == 200


async def test_the_engine_is_asked_for_the_middle(tmp_path: Path) -> None:
    marks = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|fim_pad|>")
    directory = with_tokens(tmp_path / "tokenizer", *marks)
    tokenizer = Tokenizer.from_dir(directory)
    async with running_app(tokenizer=str(directory)) as app:
        call = app.post("/v1/completions", prompt="a =", suffix="print(a)", stop_token_ids=[5])
        stream = await app.engine.next_stream()
        shown = tokenizer.decode(stream.request.prompt_token_ids, skip_special_tokens=False)
        assert shown == "<|fim_prefix|>a =<|fim_suffix|>print(a)<|fim_middle|>"
        ends = stream.request.sampling.stop_token_ids
        assert {5, tokenizer.token_id("<|fim_pad|>")} <= set(ends)
        stream.put(300, end="length")
        assert (await call.done()).status == 200


# ---------------------------------------------------------------- fields without effect


def test_what_has_no_effect_is_named(server: Server, guarded_server: Server) -> None:
    def named(**fields: Any) -> str | None:
        return server.complete(max_tokens=1, **fields).headers.get("x-quire-ignored-params")

    assert named(detokenize=False, spaces_between_special_tokens=True) == (
        "detokenize,spaces_between_special_tokens"
    )
    assert named(detokenize=True, spaces_between_special_tokens=False, priority=0) is None
    assert named(truncation_side="left", return_tokens_as_token_ids=True) == (
        "truncation_side,return_tokens_as_token_ids"
    )
    alone = {"continuous_usage_stats": True}
    assert named(stream=True, stream_options=alone) == "stream_options.continuous_usage_stats"
    assert named(priority=3) == "priority"  # the queue is first come, first served
    assert named(logprob_token_ids=[1]) == "logprob_token_ids"
    turn = {"role": "user", "content": "Hi", "annotations": [], "audio": None, "mood": "glad"}
    body = {"model": MODEL, "messages": [*USER, turn], "max_tokens": 1}
    answer = server.post("/v1/chat/completions", body)
    assert answer.headers["x-quire-ignored-params"] == "messages.1.mood"
    assert server.chat(echo=True, max_tokens=1).headers["x-quire-ignored-params"] == "echo"
    error = guarded_server.complete(priority=3).json()["error"]
    assert (error["param"], "no effect" in error["message"]) == ("priority", True)


def test_a_priority_is_ignored_where_nothing_reads_it(server: Server, tmp_path: Path) -> None:
    with_keys = Settings(api_key_file=tmp_path / "keys.yaml", strict=True)
    body = {"model": MODEL, "prompt": "Hello", "priority": 3}
    assert with_keys.engine_config().scheduler.policy == "fair"
    assert read_fields(with_keys, CompletionRequest, body)[1] == {}
    first_come = with_keys.model_copy(update={"scheduling_policy": "fcfs"})
    with pytest.raises(ApiError, match="'priority' has no effect"):
        read_fields(first_come, CompletionRequest, body)
    answer = server.post("/tokenize", body)
    assert answer.headers["x-quire-ignored-params"] == "priority"  # once


def test_an_assistant_may_have_refused_or_said_nothing(server: Server) -> None:
    """An answer that ended in its reasoning has no content, and clients send it back like that."""

    def answer(**turn: Any) -> Any:
        messages = [*USER, {"role": "assistant", **turn}, *USER]
        body = {"model": MODEL, "messages": messages, "temperature": 0, "return_token_ids": True}
        return server.post("/v1/chat/completions", {**body, "max_tokens": 2}).json()

    spoken = answer(content="I cannot say.")
    assert (
        answer(content=None, refusal="I cannot say.")["prompt_token_ids"]
        == (spoken["prompt_token_ids"])
    )
    silent = answer(content="")["prompt_token_ids"]
    assert answer(content=None)["prompt_token_ids"] == silent
    assert answer(content=None, reasoning="Well.")["prompt_token_ids"] == silent
