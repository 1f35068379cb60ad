"""DeepSeek-V3.2: prompts without a chat template of its own, and tags around a special token.

The form of prompts and calls is that of ``encoding_dsv32.py``, which comes with the checkpoints.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine.paths import default_model_dir
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.text import dialects
from server.text.answer_format import AnswerFormat
from server.text.answer_grammar import AnswerRules
from server.text.parser import AnswerParser
from server.text.parts import ToolCallArguments
from server.text.tool_grammar import CallableTool
from tests.server.asgi import running_app
from tests.server.text.test_text_grammar import draw, takes

BOS, EOS, USER, ASSISTANT = "<|im_start|>", "<|im_end|>", "<｜User｜>", "<｜Assistant｜>"
SPECIAL = ["｜DSML｜", "<think>", "</think>", USER, ASSISTANT]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer", "maximum": 9}},
    "required": ["city"],
}
FORECAST = {"name": "forecast", "description": "Tell the weather.", "parameters": SCHEMA}
TOOLS = [{"type": "function", "function": FORECAST}]
QUESTION = {"role": "user", "content": "What is the weather?"}
CALLS = (
    '<｜DSML｜function_calls>\n<｜DSML｜invoke name="forecast">\n'
    '<｜DSML｜parameter name="city" string="true">Rome</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">2</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a checkpoint has besides weights: no template, and the token of its tags."""
    from tokenizers import Tokenizer as Backend

    root = tmp_path_factory.mktemp("deepseek")
    backend = Backend.from_file(str(Path(default_model_dir()) / "tokenizer.json"))
    backend.add_special_tokens(SPECIAL)
    backend.save(str(root / "tokenizer.json"))
    named = {"bos_token": BOS, "eos_token": EOS}
    (root / "tokenizer_config.json").write_text(json.dumps(named))
    (root / "config.json").write_text('{"model_type": "deepseek_v32"}')
    return root


@pytest.fixture(scope="module")
def tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_dir(directory)


@pytest.fixture(scope="module")
def template(directory: Path, tokenizer: Tokenizer):
    made = ChatTemplate.from_dir(directory, tokenizer)
    yield made
    made.close()


def rendered(template: ChatTemplate, messages: list[dict[str, Any]], **options: Any) -> str:
    kwargs = {"thinking": True} if options.pop("thinking", False) else None
    return template.render_sync(messages, template_kwargs=kwargs, **options)


def called(id: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    function = {"name": "forecast", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id, "function": function}], **fields}


def test_turns(template: ChatTemplate) -> None:
    system = {"role": "system", "content": "Be brief."}
    said = {"role": "assistant", "content": "Sunny.", "reasoning_content": "Italy..."}
    earlier = f"{USER}What is the weather?{ASSISTANT}</think>Sunny.{EOS}"
    messages = [system, QUESTION, said, QUESTION]
    begun = f"{BOS}Be brief.{earlier}{USER}What is the weather?{ASSISTANT}"
    assert rendered(template, messages) == f"{begun}</think>"
    assert rendered(template, messages, thinking=True) == f"{begun}<think>"
    assert rendered(template, [QUESTION]) == f"{BOS}{USER}What is the weather?{ASSISTANT}</think>"


def test_calls_and_results(template: ChatTemplate) -> None:
    """Reasoning since the last question stays; a result goes with its call, in their order."""
    two = called("a", {"city": "Rome", "days": 2}, content="", reasoning_content="Let me see.")
    two["tool_calls"] += called("b", {})["tool_calls"]
    results = [
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
        {"role": "tool", "tool_call_id": "a", "content": "sun"},
    ]
    calls = CALLS.replace(
        "</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="forecast">\n\n</｜DSML｜invoke>\n</｜DSML｜function_calls>',
    )
    told = "\n\n<function_results>\n<result>sun</result>\n<result>rain</result>\n"
    asked = f"{BOS}{USER}What is the weather?{ASSISTANT}"
    rest = f"\n\n{calls}{EOS}{told}</function_results>\n\n"
    messages = [QUESTION, two, *results]
    assert rendered(template, messages) == f"{asked}</think>{rest}</think>"
    thought = f"{asked}<think>Let me see.</think>{rest}<think>"
    assert rendered(template, messages, thinking=True) == thought
    answered = [*messages, {"role": "assistant", "content": "Fine."}, QUESTION]
    assert rendered(template, answered, thinking=True) == (
        f"{asked}</think>{rest}</think>Fine.{EOS}{USER}What is the weather?{ASSISTANT}<think>"
    )
    # Without ids that match, in the order in which they were sent.
    for result in results:
        del result["tool_call_id"]
    assert "<result>rain</result>\n<result>sun</result>" in rendered(template, messages)


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_functions_are_shown_in_the_system_text(
    template: ChatTemplate, system: list[dict[str, Any]]
) -> None:
    text = rendered(template, [*system, QUESTION], tools=TOOLS)
    begin = BOS + "".join(each["content"] for each in system)
    assert text.startswith(f"{begin}\n\n## Tools\n")
    assert f"<functions>\n{json.dumps(FORECAST)}\n</functions>\n{USER}What" in text
    assert "<｜DSML｜function_calls>\n<｜DSML｜invoke name=" in text
    assert "## Tools" not in rendered(template, [*system, QUESTION])


def test_arguments_that_are_no_json_are_shown_all_the_same(template: ChatTemplate) -> None:
    text = rendered(template, [QUESTION, called("a", "{city: Rome")])
    assert 'name="arguments" string="true">{city: Rome</｜DSML｜parameter>' in text


def test_an_answer_can_be_continued(template: ChatTemplate) -> None:
    begun = {"role": "assistant", "content": "Sun"}
    text = rendered(template, [QUESTION, begun], continue_final_message=True)
    assert text == f"{BOS}{USER}What is the weather?{ASSISTANT}</think>Sun"


def test_the_parsers_are_found(template: ChatTemplate, tokenizer: Tokenizer) -> None:
    answers = AnswerFormat.of(template.source, tokenizer)
    assert answers.dialect is dialects.BY_NAME["deepseek_v32"]
    assert answers.reasoning is not None
    assert answers.reasoning.name == "think"
    assert answers.supports_tools
    assert not answers.expects_text_arguments


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("thinking", [False, True])
async def test_calls_are_read_though_special_tokens_are_left_out_of_texts(
    directory: Path, tokenizer: Tokenizer, stream: bool, thinking: bool
) -> None:
    settings = {"model": str(directory), "served_model_names": ["quire-demo"]}
    async with running_app(**settings) as served:
        served.engine.max_model_len = 4096
        asked = served.post(
            "/v1/chat/completions",
            messages=[QUESTION],
            tools=TOOLS,
            stream=stream,
            max_tokens=200,
            chat_template_kwargs={"thinking": thinking},
        )
        sent = await served.engine.next_stream()
        prompt = tokenizer.decode(sent.request.prompt_token_ids, skip_special_tokens=False)
        assert prompt.endswith(f"{ASSISTANT}<think>" if thinking else f"{ASSISTANT}</think>")
        assert tokenizer.special_id("｜DSML｜") in sent.request.prompt_token_ids
        text = f"Let me see.\n\n{CALLS}"
        text = f"Rome?</think>{text}" if thinking else text
        ids = tokenizer.encode(text, add_special_tokens=False, parse_special=True)
        for id_ in ids:
            sent.put(id_)
        sent.put(*tokenizer.eos_token_ids[:1], end="stop")
        answer = await asked.done()
        assert answer.status == 200, answer.body
        told = _joined(answer.body) if stream else json.loads(answer.body)["choices"][0]["message"]
        assert told["content"] == "Let me see."
        assert told.get("reasoning_content") == ("Rome?" if thinking else None)
        (call,) = told["tool_calls"]
        assert call["function"]["name"] == "forecast"
        assert json.loads(call["function"]["arguments"]) == {"city": "Rome", "days": 2}


def _joined(body: bytes) -> dict[str, Any]:
    """The message that a stream's deltas make."""
    content, thought, calls = "", "", []
    for line in body.decode().split("\n\n"):
        if not line.startswith("data: {"):
            continue
        delta = json.loads(line.removeprefix("data: "))["choices"][0]["delta"]
        content += delta.get("content") or ""
        thought += delta.get("reasoning_content") or ""
        for piece in delta.get("tool_calls", ()):
            if "id" in piece:
                calls.append({"function": dict(piece["function"])})
            else:
                calls[-1]["function"]["arguments"] += piece["function"]["arguments"]
    return {"content": content, "reasoning_content": thought or None, "tool_calls": calls}


def rules(tokenizer: Tokenizer, **options: Any) -> AnswerRules:
    dialect = dialects.BY_NAME["deepseek_v32"]
    ids = AnswerFormat.of("", tokenizer, tool_call_parser="deepseek_v32").special_ids
    assert set(ids) == {"｜DSML｜"}
    tools = [CallableTool("forecast", SCHEMA, True)]
    return AnswerRules(dialect=dialect, tools=tools, special_ids=ids, **options)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        (CALLS, True),
        (CALLS.replace("Rome", "Ro</me> <｜"), True),
        (CALLS.replace("Rome</", "Rome"), False),
        (CALLS.replace(">2<", ">10<"), False),
        (CALLS.replace("city", "town"), False),
        (CALLS.replace("</｜DSML｜function_calls>", ""), False),
        ("It rains.", False),
    ],
)
def test_a_forced_call_holds_the_token_and_its_arguments_the_schema(
    tokenizer: Tokenizer, text: str, is_right: bool
) -> None:
    assert takes(tokenizer, rules(tokenizer, is_required=True), text) == is_right


def test_text_may_come_before_a_call(tokenizer: Tokenizer) -> None:
    either = rules(tokenizer, is_parallel=False)
    for text in ("It rains.", f"Let me see.\n\n{CALLS}", CALLS):
        assert takes(tokenizer, either, text), text
    assert not takes(tokenizer, either, CALLS.replace("forecast", "other"))


@pytest.mark.parametrize("seed", range(3))
def test_what_the_grammar_admits_is_read(tokenizer: Tokenizer, seed: int) -> None:
    schema = {
        "type": "object",
        "properties": {"days": SCHEMA["properties"]["days"], "unit": {"enum": ["C", "</F>"]}},
        "required": ["unit"],
    }
    held = rules(tokenizer, is_required=True)
    tools = [CallableTool("forecast", schema, True)]
    grammar = dataclasses.replace(held, tools=tools, is_parallel=False).grammar()
    assert grammar is not None
    ids = draw(tokenizer, grammar, random.Random(seed))
    made = AnswerParser(dialect=held.dialect, schemas={"forecast": schema})
    parts = made.push(tokenizer.decode(ids, skip_special_tokens=False)) + made.finish()
    assert made.ends_in_calls
    arguments = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
    jsonschema.validate(json.loads(arguments), schema)
