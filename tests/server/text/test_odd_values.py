"""Values of arguments that only some readers of JSON take, and names that only some grammars do."""

from __future__ import annotations

import dataclasses
import json

import pytest

from engine.paths import default_model_dir
from engine.text.tokenizer import Tokenizer
from server.anthropic.blocks import complete_blocks
from server.anthropic.outputs import MessageToolUse
from server.openai.outputs import to_json
from server.text import dialects
from server.text.answer_grammar import AnswerRules
from server.text.enforceable import UnenforceableSchema
from server.text.json_scan import is_json
from server.text.parser import AnswerParser
from server.text.parts import Part, ToolCallArguments
from server.text.tool_grammar import CallableTool
from tests.server.text.test_text_grammar import takes

# Calls of f(a), in formats whose values are not part of one JSON text.
FORMS = {
    "qwen3_xml": "<tool_call>\n<function=f>\n<parameter=a>\n%s\n</parameter>\n</function>\n"
    "</tool_call>",
    "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>%s</arg_value>\n</tool_call>",
    "deepseek_v32": '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n'
    '<｜DSML｜parameter name="a" string="false">%s</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
    "gemma4": "<|tool_call>call:f{a:%s}<tool_call|>",
    "pythonic": "[f(a=%s)]",
}
SCHEMA = {"type": "object", "properties": {"a": {"type": ["array", "number"]}}}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_dir(default_model_dir())


def parts_of(dialect: str, value: str, *, whole: bool) -> list[Part]:
    made = AnswerParser(
        dialect=dialects.BY_NAME[dialect], schemas={"f": SCHEMA}, buffer_calls=whole
    )
    return made.push(FORMS[dialect] % value) + made.finish()


def arguments_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, ToolCallArguments))


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dialect", FORMS)
def test_a_number_of_thousands_of_digits_is_a_number(dialect: str, whole: bool) -> None:
    """Which Python refuses to make of such a text. A model that repeats itself writes them."""
    digits = "1" * 5000
    parts = parts_of(dialect, digits, whole=whole)
    assert arguments_of(parts) == f'{{"a": {digits}}}'
    (block,) = complete_blocks(parts)
    assert isinstance(block, MessageToolUse)
    assert to_json(block.input) == b'{"a": %s}' % digits.encode()


@pytest.mark.parametrize("depth", [250, 900, 960, 5000])
@pytest.mark.parametrize("dialect", ["qwen3_xml", "glm45", "deepseek_v32"])
def test_what_is_nested_too_deeply_is_a_text(dialect: str, depth: int) -> None:
    """Not JSON that one reader still takes, and the next refuses: that made an answer a 500."""
    value = "[" * depth + "]" * depth
    parts = parts_of(dialect, value, whole=True)
    assert json.loads(arguments_of(parts)) == {"a": value}
    assert json.loads(to_json(complete_blocks(parts)[0]))["input"] == {"a": value}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (' {"a": [1, "x"]}\n', True),
        ("0", True),
        ('"é"', True),
        ("1e999", True),
        ("[" * 200 + "]" * 200, True),
        ("[" * 201 + "]" * 201, False),
        ("NaN", False),
        ("-Infinity", False),
        ("01", False),
        ("1 2", False),
        ("[1", False),
        ("", False),
        (" ", False),
        ("{'a': 1}", False),
        ("1\u00a0", False),
    ],
)
def test_what_counts_as_json(text: str, expected: bool) -> None:
    assert is_json(text) == expected


@pytest.mark.parametrize(
    ("dialect", "argument"),
    [
        ("pythonic", "%s=1"),
        ("olmo3", "%s=1"),
        ("gemma4", "%s:1"),
        ("minimax_m2", '<parameter name="%s">1</parameter>\n'),
    ],
)
def test_a_grammar_admits_only_names_that_are_read(
    tokenizer: Tokenizer, dialect: str, argument: str
) -> None:
    """What a word is to the library's expressions, marks on letters too, is not one to Python's."""
    found = dialects.BY_NAME[dialect]
    tools = [CallableTool("f", {"type": "object"}, False)]
    rules = AnswerRules(dialect=found, tools=tools, is_required=True, special_ids={})
    names = {"größe_2": True, "城市": True, "मौसम": True, "$x.y-1": True, "x\u2054": True}
    for name, is_read in {
        **names,
        "a b": False,
        "a=b": False,
        '"a"': False,
        "a\x1e": False,
    }.items():
        call = found.call_prefix.replace("{}", "f", 1) + argument % name + found.call_suffix
        whole = found.prefix + call + found.suffix
        assert takes(tokenizer, rules, whole) == is_read
        made = AnswerParser(dialect=found, schemas={"f": {}}, buffer_calls=True)
        parts = made.push(whole) + made.finish()
        if is_read:
            assert json.loads(arguments_of(parts)) == {name: 1}
            held = {"type": "object", "properties": {name: {"const": 1}}, "required": [name]}
            strict = dataclasses.replace(rules, tools=[CallableTool("f", held, True)])
            assert takes(tokenizer, strict, whole)


@pytest.mark.parametrize(
    ("dialect", "value"),
    [
        ("minimax_m2", "line\n"),
        ("minimax_m2", "a</parameter>"),
        ("qwen3_xml", "a\n</parameter>"),
        ("glm45", "</arg_value>"),
        ("deepseek_v32", "</｜DSML｜parameter>"),
    ],
)
def test_a_value_that_its_tags_cannot_hold_is_refused(dialect: str, value: str) -> None:
    def grammar(one: str) -> object:
        schema = {"type": "object", "properties": {"a": {"enum": [one, "b"]}}}
        return AnswerRules(
            dialect=dialects.BY_NAME[dialect],
            tools=[CallableTool("f", schema, True)],
            is_required=True,
            special_ids={},
        ).grammar()

    with pytest.raises(UnenforceableSchema, match="cannot be written"):
        grammar(value)
    assert grammar(value.replace("<", "").replace("\n", "")) is not None


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"$ref": "#/$defs/n"}, {"a": "5"}),  # a text, in as many ways as there are
        ({"type": [["string"]]}, {"a": 5}),  # no type at all
    ],
)
@pytest.mark.parametrize("dialect", ["qwen3_xml", "glm45"])
def test_an_argument_of_any_schema_is_read(
    dialect: str, schema: dict[str, object], expected: dict[str, object]
) -> None:
    """A tool that is not strict may have any: nothing has looked at it before."""
    names = [{"$ref": "#/$defs/n"}] * 30
    definitions = {"n": {"anyOf": [*names, {"type": "string"}]}}
    tool = {"properties": {"a": schema}, "$defs": definitions}
    made = AnswerParser(dialect=dialects.BY_NAME[dialect], schemas={"f": tool})
    parts = made.push(FORMS[dialect] % "5") + made.finish()
    assert json.loads(arguments_of(parts)) == expected
