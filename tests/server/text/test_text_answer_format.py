"""The dialect and the markers detected from a chat template."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from engine.paths import default_model_dir
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from server.text import dialects, reasoning
from server.text.answer_format import (
    AnswerFormat,
    MismatchedParsers,
    ReasoningParser,
    ToolCallParser,
    check_parsers,
)
from server.text.parser import AnswerParser
from server.text.parts import Text, ToolCallBegin


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(default_model_dir())


def test_settings_name_what_there_is() -> None:
    assert set(get_args(ToolCallParser)) == {"auto", "none", *dialects.BY_NAME}
    assert set(get_args(ReasoningParser)) == {"auto", "none", *reasoning.BY_NAME}


# What distinguishes the families in their templates.
TEMPLATES = {
    "harmony": "{% if tools %}<|start|>assistant<|channel|>commentary json<|message|>{}<|call|>",
    "hermes": '{% if tools %}# Tools ... <tool_call>\n{"name": <function-name>}\n</tool_call>',
    "qwen3_xml": "{% if tools %}<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>",
    "llama3": "{% if tools %}{{ '\"parameters\": ' }}{{ arguments | tojson }}{{ '<|eot_id|>' }}",
    "mistral": "{% if tools %}{{ '[AVAILABLE_TOOLS]' }}{{ '[TOOL_CALLS] [' }}",
    "mistral_args": "{% if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' + arguments }}",
    "pythonic": "{% if tools %}in the format of [func_name1(params_name1=params_value1)]",
    "deepseek_v3": "{% if tools %}<｜tool▁calls▁begin｜>{{ '```json' }}",
    "deepseek_v31": "{% if tools %}<｜tool▁calls▁begin｜><｜tool▁sep｜>",
    "deepseek_v32": "{% if tools %}<｜DSML｜function_calls>\n<｜DSML｜invoke name={{ n }}>",
    "glm45": "{% if tools %}<tool_call>{{ n }}\n<arg_key>{{ k }}</arg_key>\n<arg_value>{{ v }}",
    "longcat_pairs": "{% if tools %}<longcat_tool_call>{{ n }}\n<longcat_arg_key>{{ k }}"
    "</longcat_arg_key>\n<longcat_arg_value>{{ v }}",
    "longcat": '{% if tools %}<longcat_tool_call>\n{"name": {{ n }}}\n</longcat_tool_call>',
    "kimi_k2": "{% if tools %}<|tool_calls_section_begin|>{{ i }}<|tool_call_argument_begin|>",
    "granite": "{% if tools %}{{ '<|tool_call|>' + calls | tojson }}",
    "minimax_m2": '{% if tools %}<minimax:tool_call>\n<invoke name="tool">{{ n }}</invoke>',
    "seed_oss": "{% if tools %}<seed:tool_call>\n<function=example>\n<parameter=a>",
    "cohere": '{% if tools %}<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "{{ n }}"',
    "nemotron": "{% if tools %}<TOOLCALL>{{ calls | tojson }}</TOOLCALL>",
    "hunyuan_a13b": "{% if tools %}<tool_calls>{{ calls | tojson }}</tool_calls>",
    "lfm2": "{% if tools %}<|tool_list_start|>{{ tools }}<|tool_list_end|><|tool_call_start|>",
    "gemma4": "{% if tools %}{{ '<|tool_call>call:' + name + '{' }}{{ '}<tool_call|>' }}",
    "functiongemma": "{% if tools %}<start_function_call>call:{{ n }}{a:<escape>{{ v }}<escape>}",
    "olmo3": "{% if tools %}<functions>{{ tools }}<function_calls>{{ calls }}</function_calls>",
    None: "{% if tools %}<tool_call>{{ name }}<function_calls>",
}
OTHER_TEMPLATES = [
    ("lfm2", "{% if tools %}{{ '<|tool_list_start|>' }}{{ tools | tojson }}"),
    (None, "{% if tools %}<function_calls><invoke name='{{ n }}'></invoke></function_calls>"),
]


@pytest.mark.parametrize(("name", "template"), [*TEMPLATES.items(), *OTHER_TEMPLATES])
def test_a_template_shows_its_dialect(
    name: str | None, template: str, tokenizer: Tokenizer
) -> None:
    answers = AnswerFormat.of(template, tokenizer)
    assert (answers.dialect and answers.dialect.name) == name
    assert answers.supports_tools
    assert AnswerFormat.of(template, tokenizer, tool_call_parser="none").dialect is None
    chosen = AnswerFormat.of(template, tokenizer, tool_call_parser="llama3").dialect
    assert chosen is dialects.BY_NAME["llama3"]


@pytest.mark.parametrize(
    ("name", "template", "unasked"),
    [
        ("think", "{{ '<think>\n\n</think>\n\n' }}", True),
        ("think", "{% if enable_thinking %}think{% endif %}", False),
        ("mistral", "[THINK]{{ thinking }}[/THINK]", True),
        ("granite", "after 'Here is my thought process:' and 'Here is my response:'", True),
        ("harmony", "<|start|>assistant<|channel|>analysis<|message|>{{ x }}<|end|>", True),
        ("muse", "{{ '<|start|>assistant to=self<|message|>' + thinking + '<|eom|>' }}", True),
        (None, "<|user|>{{ messages[0].content }}<|end|>", False),
        (None, "{{ messages[0].content }}", False),
    ],
)
def test_a_template_shows_its_marks(
    name: str | None, template: str, unasked: bool, tokenizer: Tokenizer
) -> None:
    answers = AnswerFormat.of(template, tokenizer)
    assert (answers.reasoning and answers.reasoning.name) == name
    assert answers.reasons_by_default == unasked
    assert not answers.supports_tools


def test_the_demo_model(tokenizer: Tokenizer) -> None:
    template = ChatTemplate.from_dir(default_model_dir(), tokenizer)
    answers = AnswerFormat.of(template.source, tokenizer)
    assert answers.dialect is dialects.BY_NAME["hermes"]
    assert answers.reasoning is reasoning.BY_NAME["think"]
    assert answers.supports_tools
    assert answers.special_ids == {}
    template.close()


def test_no_calls_are_read_in_muses_messages(tokenizer: Tokenizer) -> None:
    """Its template has all that Llama's shows, too."""
    template = (
        "{% if tools %}{{ '\"parameters\": <atem:function_calls>' }}{% endif %}"
        "{{ '<|start|>assistant to=self<|message|><|eom|><|eot|>' }}"
    )
    answers = AnswerFormat.of(template, tokenizer)
    assert answers.reasoning is reasoning.BY_NAME["muse"]
    assert answers.dialect is None
    check_parsers("none", "muse")
    with pytest.raises(MismatchedParsers, match="muse needs --tool-call-parser none"):
        check_parsers("hermes", "muse")


def test_harmony_reads_calls_and_reasoning_or_neither(tokenizer: Tokenizer) -> None:
    """Its calls are in channels, which the other parser of the two reads."""

    def names(template: str, **chosen: Any) -> tuple[str | None, str | None]:
        answers = AnswerFormat.of(template, tokenizer, **chosen)
        dialect, marks = answers.dialect, answers.reasoning
        return dialect and dialect.name, marks and marks.name

    for template in ("{% if tools %}{{ tools }}", TEMPLATES["hermes"] + "<think></think>"):
        assert names(template, tool_call_parser="harmony") == ("harmony", "harmony")
        assert names(template, reasoning_parser="harmony") == ("harmony", "harmony")
        chosen = {"tool_call_parser": "none", "reasoning_parser": "harmony"}
        assert names(template, **chosen) == (None, "harmony")
    own = TEMPLATES["harmony"] + "<|channel|>analysis<|message|>"
    assert names(own) == ("harmony", "harmony")
    assert names(own, reasoning_parser="none") == (None, None)


def test_a_parser_chosen_for_calls_alone_finds_them(tokenizer: Tokenizer) -> None:
    answers = AnswerFormat.of("{{ tools }}", tokenizer, tool_call_parser="harmony")
    parser = AnswerParser(
        reasoning=answers.reasoning, dialect=answers.dialect, schemas={"add": {}}, buffer_calls=True
    )
    text = "<|channel|>commentary to=functions.add <|constrain|>json<|message|>{}<|call|>"
    parts = [*parser.push(text), *parser.finish()]
    assert any(isinstance(part, ToolCallBegin) for part in parts)
    assert not any(isinstance(part, Text) for part in parts)


def test_without_a_template(tokenizer: Tokenizer) -> None:
    answers = AnswerFormat.of(None, tokenizer)
    assert (answers.dialect, answers.reasoning, answers.supports_tools) == (None, None, False)


def test_arguments_of_earlier_calls_are_what_the_template_joins(tokenizer: Tokenizer) -> None:
    joins = "{{ sep + tool['function']['arguments'] + end }}"
    for template, given, past in (
        (joins, '{"a": 1}', '{"a": 1}'),
        (joins, {"a": 1}, '{"a": 1}'),
        ("{{ tool.function.arguments | tojson }}", '{"a": 1}', {"a": 1}),
        ("{% for k, v in call.arguments|items %}{{ k + v }}{% endfor %}", "", {}),
        ("{{ arguments }}", "not json", "not json"),
        ("{{ arguments }}", "[1]", "[1]"),
    ):
        answers = AnswerFormat.of(template, tokenizer)
        assert answers.template_arguments(given) == past, template


def test_a_template_that_takes_one_call_a_turn(tokenizer: Tokenizer) -> None:
    source = TEMPLATES["llama3"] + "This model only supports single tool-calls at once!"
    dialect = AnswerFormat.of(source, tokenizer).dialect
    assert dialect is not None
    assert (dialect.name, dialect.is_single) == ("llama3", True)
