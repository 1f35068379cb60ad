"""Reasoning: the demo model's reasoning text, its format in responses, and its token count."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest
from openai.types import ReasoningEffort

from tests.servers import MODEL, Server, running_server

THINK = "What is the capital of France?"


def message(server: Server, **fields: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    answer = server.chat(THINK, **fields).json()
    return answer["choices"][0]["message"], answer["usage"]


def test_reasoning_is_told_apart(server: Server) -> None:
    told, usage = message(server, reasoning_effort="high")
    assert told["content"] == "The capital of France is Paris."
    assert told["reasoning"] == told["reasoning_content"]
    assert "France" in told["reasoning"]
    assert "<think>" not in json.dumps(told)
    count = usage["completion_tokens_details"]["reasoning_tokens"]
    assert 0 < count < usage["completion_tokens"]
    # The text of exactly this many tokens ends with the end marker.
    body = {"model": MODEL, "messages": [{"role": "user", "content": THINK}]}
    body |= {"chat_template_kwargs": {"enable_thinking": True}}
    prompt = server.post("/tokenize", body).json()["tokens"]
    for num_tokens, ended in ((count, True), (count - 1, False)):
        text = server.complete(prompt, max_tokens=num_tokens).json()["choices"][0]["text"]
        assert text.endswith("</think>") == ended


def streamed(server: Server, **fields: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The deltas of an answer, and its usage."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": THINK}], "temperature": 0}
    body |= {"stream_options": {"include_usage": True}} | fields
    lines = server.stream("/v1/chat/completions", body).decode().splitlines()
    chunks = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    return [chunk["choices"][0]["delta"] for chunk in chunks[:-1]], chunks[-1]["usage"]


@pytest.mark.parametrize("fields", [{}, {"reasoning_effort": "none"}])
def test_no_reasoning(server: Server, fields: dict[str, Any]) -> None:
    told, usage = message(server, **fields)
    assert "reasoning" not in told
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 0


@pytest.mark.parametrize("effort", get_args(get_args(ReasoningEffort)[0]))
def test_every_effort_that_clients_know_is_taken(server: Server, effort: str) -> None:
    """In each API, with the same result."""
    thinks = effort not in ("none", "minimal")
    told, _ = message(server, reasoning_effort=effort)
    assert ("reasoning" in told) == thinks
    body = {"model": MODEL, "input": THINK, "reasoning": {"effort": effort}, "temperature": 0}
    items = server.post("/v1/responses", body).json()["output"]
    assert [item["type"] for item in items] == ["reasoning"] * thinks + ["message"]
    if effort in ("low", "medium", "high", "xhigh", "max"):  # the values of Anthropic's API
        body = {"model": MODEL, "messages": [{"role": "user", "content": THINK}], "max_tokens": 99}
        body |= {"thinking": {"type": "enabled", "budget_tokens": 1024}, "temperature": 0}
        answer = server.post("/v1/messages", body | {"output_config": {"effort": effort}}).json()
        assert [block["type"] for block in answer["content"]] == ["thinking", "text"]


def test_template_variables_win(server: Server) -> None:
    told, _ = message(
        server, reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}
    )
    assert told["reasoning"]


def test_reasoning_is_streamed_as_such(server: Server) -> None:
    whole, usage = message(server, reasoning_effort="high")
    deltas, told = streamed(server, reasoning_effort="high")
    for key in ("reasoning", "reasoning_content", "content"):
        assert "".join(delta.get(key) or "" for delta in deltas) == whole[key]
    assert told["completion_tokens_details"] == usage["completion_tokens_details"]
    # It is streamed as it comes, not only once it has ended.
    deltas, _ = streamed(server, reasoning_effort="high", max_tokens=5)
    begun = "".join(delta.get("reasoning") or "" for delta in deltas)
    assert begun
    assert whole["reasoning"].startswith(begun)
    assert not any(delta.get("content") for delta in deltas)


def test_reasoning_may_be_left_out(server: Server) -> None:
    told, usage = message(server, reasoning_effort="high", include_reasoning=False)
    assert set(told) == {"role", "content", "refusal"}
    assert usage["completion_tokens_details"]["reasoning_tokens"] > 0


def test_an_answer_that_ends_within_reasoning_says_nothing(server: Server) -> None:
    told, usage = message(server, reasoning_effort="high", max_tokens=6)
    assert told["content"] is None
    assert told["reasoning"]
    assert usage["completion_tokens_details"]["reasoning_tokens"] == 6
    told, _ = message(server, reasoning_effort="high", max_tokens=6, include_reasoning=False)
    assert told == {"role": "assistant", "content": None, "refusal": None}


def test_history_keeps_reasoning(server: Server) -> None:
    """Whether or not the template shows it, the request is accepted."""
    said = {"role": "assistant", "content": "Paris.", "reasoning_content": "France, so Paris."}
    user = {"role": "user", "content": THINK}
    answer = server.chat(messages=[user, said, user])
    assert answer.status_code == 200


def test_settings_choose_names_and_parsers(tmp_path: Any) -> None:
    flags = ("--reasoning-fields", "reasoning", "--tool-call-parser", "none")
    with running_server(tmp_path / "log", *flags) as server:
        told, _ = message(server, reasoning_effort="low")
        assert "reasoning" in told
        assert "reasoning_content" not in told
        tool = {"type": "function", "function": {"name": "f"}}
        error = server.chat(tools=[tool]).json()["error"]
        assert error["param"] == "tools"
        assert "--tool-call-parser" in error["message"]
