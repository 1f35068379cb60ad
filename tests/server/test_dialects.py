"""Models whose markers are special tokens, from prompt to answer, over a scripted engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

from engine.paths import default_model_dir
from engine.text.tokenizer import Tokenizer
from tests.server.asgi import Application, Exchange, running_app

MESSAGES = [{"role": "user", "content": "Hi"}]
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
MISTRAL = (
    "{% for m in messages %}[INST]{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[TOOL_CALLS]{{ c.function.name }}[ARGS]"
    "{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}{{ m.tool_call_id }}"
    "{% endfor %}{% if tools %}{{ tools | length }}{% endif %}"
)
THINKING = "{{ messages[-1].content }}[THINK]{# until [/THINK] #}"


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the demo model's tokenizer and Mistral's special tokens."""
    root = tmp_path_factory.mktemp("mistral")
    backend = Backend.from_file(str(Path(default_model_dir()) / "tokenizer.json"))
    backend.add_special_tokens(["[INST]", "[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"])
    backend.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return root


@asynccontextmanager
async def mistral(root: Path, template: str) -> AsyncIterator[tuple[Application, Tokenizer]]:
    (root / "chat_template.jinja").write_text(template)
    async with running_app(model=str(root), served_model_names=["quire-demo"]) as application:
        yield application, Tokenizer.from_dir(root)


async def answered(
    application: Application, tokenizer: Tokenizer, text: str, **fields: Any
) -> Exchange:
    """A chat whose answer is ``text``, token by token."""
    exchange = application.post("/v1/chat/completions", messages=MESSAGES, **fields)
    stream = await application.engine.next_stream()
    for id_ in tokenizer.encode(text, add_special_tokens=False, parse_special=True):
        stream.put(id_)
    stream.put(*tokenizer.eos_token_ids, end="stop")
    return await exchange.done()


def chunks(exchange: Exchange) -> list[dict[str, Any]]:
    lines = exchange.body.decode().splitlines()
    return [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]


async def test_special_marks_are_read_and_never_shown(special: Path) -> None:
    text = 'I add.[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]add[ARGS]{"a": 2}'
    async with mistral(special, MISTRAL) as (application, tokenizer):
        exchange = await answered(application, tokenizer, text, tools=[TOOL])
        (choice,) = json.loads(exchange.body)["choices"]
        calls = choice["message"]["tool_calls"]
        assert [call["function"]["arguments"] for call in calls] == ['{"a": 1}', '{"a": 2}']
        assert all(len(call["id"]) == 9 and call["id"].isalnum() for call in calls)
        assert choice["message"]["content"] == "I add."
        assert choice["finish_reason"] == "tool_calls"

        exchange = await answered(application, tokenizer, text, tools=[TOOL], stream=True)
        content, arguments = "", ["", ""]
        for chunk in chunks(exchange):
            content += chunk["delta"].get("content") or ""
            for call in chunk["delta"].get("tool_calls", []):
                arguments[call["index"]] += call["function"]["arguments"]
        assert (content, arguments) == ("I add.", ['{"a": 1}', '{"a": 2}'])

        malformed = "[TOOL_CALLS]subtract[ARGS]{}"
        exchange = await answered(application, tokenizer, malformed, tools=[TOOL])
        (choice,) = json.loads(exchange.body)["choices"]
        assert choice["message"]["content"] == "subtract{}"
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"

        exchange = await answered(application, tokenizer, text)  # no tools: markers are left out
        (choice,) = json.loads(exchange.body)["choices"]
        assert choice["message"]["content"] == 'I add.add{"a": 1}add{"a": 2}'


async def test_reasoning_that_the_prompt_has_opened(special: Path) -> None:
    async with mistral(special, THINKING) as (application, tokenizer):
        for fields in ({}, {"stream": True}):
            thoughts = tokenizer.encode("Well, well.", add_special_tokens=False)
            exchange = await answered(
                application, tokenizer, "Well, well.[/THINK]\n\nYes.", **fields
            )
            if fields:
                deltas = [chunk["delta"] for chunk in chunks(exchange)]
                told = "".join(delta.get("reasoning") or "" for delta in deltas)
                content = "".join(delta.get("content") or "" for delta in deltas)
            else:
                answer = json.loads(exchange.body)
                told = answer["choices"][0]["message"]["reasoning"]
                content = answer["choices"][0]["message"]["content"]
                details = answer["usage"]["completion_tokens_details"]
                assert details["reasoning_tokens"] == len(thoughts) + 1
            assert (told, content) == ("Well, well.", "Yes.")


async def test_the_history_is_what_the_template_expects(special: Path) -> None:
    """Arguments are objects, and ids have nine characters, whatever their origin."""
    call = {"id": "call_0123456789abcdef", "type": "function"}
    call["function"] = {"name": "add", "arguments": '{"b": {"c": 1}}'}
    history = [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": call["id"]},
    ]
    async with mistral(special, MISTRAL) as (application, tokenizer):
        exchange = application.post("/v1/chat/completions", messages=history, tools=[TOOL])
        stream = await application.engine.next_stream()
        prompt = tokenizer.decode(stream.request.prompt_token_ids, skip_special_tokens=False)
        expected = '[INST][TOOL_CALLS]add[ARGS]{"b": {"c": 1}}789abcdef[INST]2789abcdef1'
        assert prompt == expected
        stream.put(end="stop")
        await exchange.done()


async def test_a_template_without_a_place_for_tools(special: Path) -> None:
    async with mistral(special, THINKING) as (application, _):
        exchange = application.post("/v1/chat/completions", messages=MESSAGES, tools=[TOOL])
        error = (await exchange.done()).error
        assert exchange.status == 400
        assert error["param"] == "tools"
        assert "template" in error["message"]
