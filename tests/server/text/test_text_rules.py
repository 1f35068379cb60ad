"""Strings with a form, in formats of calls that do not quote them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import jsonschema
import pytest
from jsonschema import FormatChecker

from engine.paths import default_model_dir
from engine.text.tokenizer import Tokenizer
from server.text import dialects, harmony, reasoning
from server.text.answer_grammar import AnswerRules
from server.text.custom_input import CustomInputs, input_schema
from server.text.parser import AnswerParser
from server.text.parts import ToolCallArguments
from server.text.text_rules import text_patterns
from server.text.tool_grammar import CallableTool
from tests.server.text.test_text_grammar import draw, special, special_ids, takes  # noqa: F401

TAGGED = ["qwen3_xml", "glm45", "longcat_pairs", "minimax_m2", "seed_oss", "deepseek_v32", "gemma4"]
SCHEMA: dict[str, Any] = {  # as pydantic writes such fields
    "type": "object",
    "title": "Page",
    "x-origin": "unknown keywords have no effect",
    "properties": {
        "slug": {"type": "string", "pattern": "^[a-z]{2,4}(-x|/y)?$", "title": "Slug"},
        "name": {"type": "string", "minLength": 2, "maxLength": 6},
        "day": {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
        "colour": {"$ref": "#/$defs/Colour"},
        "shade": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}], "default": None},
    },
    "required": ["slug", "name", "day", "colour", "shade"],
    "$defs": {"Colour": {"type": "string", "enum": ["red", "dark blue"]}},
}


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    return Tokenizer.from_dir(default_model_dir())


@pytest.mark.parametrize("kind", ["plain", "special"])
@pytest.mark.parametrize("name", TAGGED)
def test_whatever_is_written_has_the_form(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    dialect = dialects.BY_NAME[name]
    marks = special_ids(tokenizer, dialect)
    tools = [CallableTool("save", SCHEMA, True)]
    rules = AnswerRules(
        dialect=dialect, tools=tools, is_required=True, is_parallel=False, special_ids=marks
    )
    grammar = rules.grammar()
    assert grammar is not None
    for seed in range(3):
        text = tokenizer.decode(
            draw(tokenizer, grammar, random.Random(seed)), skip_special_tokens=False
        )
        parser = AnswerParser(dialect=dialect, schemas={"save": SCHEMA}, hidden=marks)
        parts = parser.push(text) + parser.finish()
        written = "".join(part.text for part in parts if isinstance(part, ToolCallArguments))
        jsonschema.validate(json.loads(written), SCHEMA, format_checker=FormatChecker())


_CALL = (
    "<tool_call>\n<function=save>\n<parameter=slug>\n{slug}\n</parameter>\n<parameter=name>\n{name}"
    "\n</parameter>\n<parameter=day>\n{day}\n</parameter>\n<parameter=colour>\n{colour}"
    "\n</parameter>\n<parameter=shade>\n{shade}\n</parameter>\n</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("changed", "is_right"),
    [
        ({}, True),
        ({"slug": "abcd/y", "name": "<b>\n", "day": "null", "shade": "null"}, True),
        ({"slug": "abcde"}, False),
        ({"slug": "ab-y"}, False),
        ({"name": "a"}, False),
        ({"name": "abcdefg"}, False),
        ({"name": "ééé"}, True),
        ({"day": "2026-13-01"}, False),
        ({"colour": "null"}, False),
        ({"colour": "blue"}, False),
    ],
)
def test_each_keyword_is_held(plain: Tokenizer, changed: dict[str, str], is_right: bool) -> None:
    values = {"slug": "ab-x", "name": "abc", "day": "2026-01-31", "colour": "dark blue"}
    text = _CALL.format_map({**values, "shade": "red", **changed})
    tools = [CallableTool("save", SCHEMA, True)]
    rules = AnswerRules(
        dialect=dialects.BY_NAME["qwen3_xml"], tools=tools, is_required=True, special_ids={}
    )
    assert takes(plain, rules, text) == is_right


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ("date", "2024-02-29", "2024-2-9"),
        ("time", "23:59:01.5+02:00", "24:00:00Z"),
        ("date-time", "2024-02-29T00:00:00Z", "2024-02-29"),
        ("duration", "P1Y2M3DT4H5M6S", "P"),
        ("duration", "PT30M", "PT"),
        ("email", "a.b+c@example.org", "a@b@c.d"),
        ("hostname", "a-1.example", "-a.example"),
        ("ipv4", "192.168.0.255", "192.168.0.256"),
        ("ipv6", "2001:db8::1", "1::2::3"),
        ("ipv6", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7:8:9"),
        ("ipv6", "::", ":"),
        ("uri", "https://a.b/c?d=%20#e", "no uri"),
        ("uuid", "123e4567-e89b-12d3-a456-426614174000", "123e4567"),
        ("byte", "YWI=", "YWI"),
    ],
)
def test_formats(form: str, right: str, wrong: str) -> None:
    (pattern,) = text_patterns({"type": "string", "format": form})
    assert re.fullmatch(pattern, right)
    assert not re.fullmatch(pattern, wrong)


@pytest.mark.parametrize(
    ("pattern", "right", "wrong"),
    [
        ("b", "abc\nd", "acd"),
        ("^b", "bc", "abc"),
        ("b$", "ab", "abc"),
        (r"^a\$$", "a$", "a"),
        (r"a\$", "xa$x", "xa"),
        ("^(a|b)$", "a", "ab"),
        ("a|b", "xby", "xcy"),
        ("^[|]$", "|", "a"),
    ],
)
def test_a_pattern_may_be_found_anywhere_but_for_its_anchors(
    pattern: str, right: str, wrong: str
) -> None:
    (whole,) = text_patterns({"type": "string", "pattern": pattern})
    assert re.fullmatch(whole, right)
    assert not re.fullmatch(whole, wrong)


INPUT = r'(\+[a-z/\\]{1,4}\n){2}(<"x">)?'


@pytest.mark.parametrize("kind", ["plain", "special"])
@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_the_input_of_a_custom_tool_has_its_form(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    dialect = dialects.BY_NAME[name]
    marks = special_ids(tokenizer, dialect)
    schema = input_schema(INPUT)
    rules = AnswerRules(
        dialect=dialect,
        tools=[CallableTool("save", schema, True)],
        is_required=True,
        is_parallel=False,
        special_ids=marks,
        channels=harmony.HARMONY if name == "harmony" else None,
    )
    grammar = rules.grammar()
    assert grammar is not None
    marker = reasoning.BY_NAME["harmony"] if name == "harmony" else None
    for seed in range(2):
        ids = draw(tokenizer, grammar, random.Random(seed))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        parser = AnswerParser(
            reasoning=marker, dialect=dialect, schemas={"save": schema}, hidden=marks
        )
        inputs = CustomInputs({"save"})
        parts = inputs.read(parser.push(text) + parser.finish(), is_last=True)
        pieces = [part.text for part in parts if isinstance(part, ToolCallArguments)]
        assert re.fullmatch(INPUT, "".join(pieces)), text
