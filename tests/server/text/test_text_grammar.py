"""Grammars of answers: each accepts the calls of its dialect, and the parser reads them."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine.errors import InvalidParameter
from engine.grammar.llguidance_backend import LlguidanceBackend
from engine.paths import default_model_dir
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar
from server.text import dialects, harmony, reasoning
from server.text.answer_format import AnswerFormat
from server.text.answer_grammar import AnswerRules
from server.text.enforceable import UnenforceableSchema
from server.text.parser import AnswerParser
from server.text.parts import Text, ToolCallArguments, ToolCallBegin
from server.text.tool_grammar import CallableTool

THINK = reasoning.BY_NAME["think"]
SELF = {"type": "object", "properties": {"a": {"$ref": "#/$defs/a"}}}
SCHEMAS: dict[str, dict[str, Any]] = {
    "order": {
        "type": "object",
        "properties": {
            "dish": {"enum": ["soup", 'a "big" salad']},
            "count": {"$ref": "#/$defs/count"},
            "paid": {"type": ["boolean", "null"]},
        },
        "required": ["dish", "count"],
        "additionalProperties": False,
        "$defs": {"count": {"type": "integer", "minimum": 1, "maximum": 99}},
    },
    "stop": {
        "type": "object",
        "properties": {"now": {"type": "boolean"}, "why": {"const": "late"}},
        "additionalProperties": False,
    },
}
TOOLS = [CallableTool(name, schema, True) for name, schema in SCHEMAS.items()]


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """The demo model's tokenizer, whose markers are text."""
    return Tokenizer.from_dir(default_model_dir())


@pytest.fixture(scope="module")
def special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """The same with the markers of all dialects as special tokens."""
    from tokenizers import Tokenizer as Backend

    root = tmp_path_factory.mktemp("special")
    backend = Backend.from_file(str(Path(default_model_dir()) / "tokenizer.json"))
    marks = {mark for dialect in dialects.DIALECTS for mark in dialect.markers}
    backend.add_special_tokens(sorted(marks))
    backend.save(str(root / "tokenizer.json"))
    (root / "tokenizer_config.json").write_text('{"eos_token": "<|im_end|>"}')
    return Tokenizer.from_dir(root)


def multiplied(schema: dict[str, Any]) -> dict[str, Any]:
    """Short, but ``schema`` written out a hundred million times."""
    levels = {
        f"d{level}": {"anyOf": [{"$ref": f"#/$defs/d{level + 1}"}] * 10} for level in range(7)
    }
    return {"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": {**levels, "d7": schema}}


def backend_of(tokenizer: Tokenizer) -> LlguidanceBackend:
    return LlguidanceBackend(tokenizer, tokenizer.vocab_size, tokenizer.eos_token_ids)


def special_ids(tokenizer: Tokenizer, dialect: dialects.Dialect) -> dict[str, int]:
    template = "tools " + " ".join(dialect.template_markers)
    answers = AnswerFormat.of(template, tokenizer, tool_call_parser=dialect.name)
    return answers.special_ids


def draw(tokenizer: Tokenizer, grammar: Grammar, rng: random.Random) -> list[int]:
    """Draw tokens uniformly from the allowed ones, until only the end is allowed."""
    matcher = backend_of(tokenizer).compile(grammar).matcher()
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    ids: list[int] = []
    while not matcher.is_complete and len(ids) < 2000:
        matcher.fill(mask)
        bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: tokenizer.vocab_size]
        allowed = np.flatnonzero(bits).tolist()
        ends = [id_ for id_ in allowed if id_ in tokenizer.eos_token_ids]
        token_id = ends[0] if ends else rng.choice(allowed)
        if token_id in tokenizer.eos_token_ids:
            break
        matcher.accept([token_id])
        ids.append(token_id)
    return ids


@pytest.mark.parametrize("kind", ["plain", "special"])
@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_whatever_the_grammar_admits_is_read_as_calls(
    name: str, kind: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    dialect = dialects.BY_NAME[name]
    ids_of_marks = special_ids(tokenizer, dialect)
    assert bool(ids_of_marks) == (kind == "special" and bool(dialect.markers))
    rules = AnswerRules(dialect=dialect, tools=TOOLS, is_required=True, special_ids=ids_of_marks)
    grammar = rules.grammar()
    assert grammar is not None
    for seed in range(4):
        ids = draw(tokenizer, grammar, random.Random(seed))
        text = tokenizer.decode(ids, skip_special_tokens=False)
        made = AnswerParser(
            dialect=dialect,
            schemas=SCHEMAS,
            hidden=ids_of_marks,
            reasoning=reasoning.BY_NAME.get(name) if name == "harmony" else None,
        )
        parts = made.push(text) + made.finish()
        begins = [part for part in parts if isinstance(part, ToolCallBegin)]
        assert begins, text
        assert not [part for part in parts if isinstance(part, Text)], text
        for begin in begins:
            arguments = "".join(
                part.text
                for part in parts
                if isinstance(part, ToolCallArguments) and part.index == begin.index
            )
            jsonschema.validate(json.loads(arguments), SCHEMAS[begin.name])


NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "stops": {"type": "array", "items": {"$ref": "#/$defs/stop"}},
        "notes": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "rest": {},
    },
    "required": ["stops"],
    "$defs": {
        "stop": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "nights": {"type": ["integer", "null"]}},
            "required": ["city"],
        }
    },
}


@pytest.mark.parametrize(
    ("arguments", "is_right"),
    [
        ('{stops:[{city:<|"|>Rome<|"|>,nights:2},{city:<|"|>"Bari", {2}<|"|>}]}', True),
        ('{stops:[],notes:null,rest:{a:[1,<|"|>x<|"|>],b:{c:true}}}', True),
        ('{stops:[],notes:<|"|>at noon<|"|>}', True),
        ("{notes:null}", False),
        ("{stops:[{nights:2}]}", False),
        ('{stops:[{city:<|"|>Rome<|"|>,nights:2.5}]}', False),
        ("{stops:[],rest:{a:}}", False),
    ],
)
def test_what_stands_in_braces_satisfies_a_schema(
    plain: Tokenizer, arguments: str, is_right: bool
) -> None:
    text = f"<|tool_call>call:plan{arguments}<tool_call|>"
    tools = [CallableTool("plan", NESTED, True)]
    gemma = dialects.BY_NAME["gemma4"]
    rules = AnswerRules(dialect=gemma, tools=tools, is_required=True, special_ids={})
    assert takes(plain, rules, text) == is_right
    if is_right:
        parts = AnswerParser(dialect=gemma, schemas={"plan": NESTED}, hidden={})
        told = parts.push(text) + parts.finish()
        written = "".join(part.text for part in told if isinstance(part, ToolCallArguments))
        jsonschema.validate(json.loads(written), NESTED)


UNHELD = {
    "json": '{"dish": "soup", "extra": [1, null]}',
    "python": 'dish="soup", extra=[1, null]',
    "xml": "<parameter=dish>\nsoup\n</parameter>\n<parameter=extra>\n[1, null]\n</parameter>\n",
    "invoke": '<parameter name="dish">soup</parameter>\n<parameter name="extra">1</parameter>\n',
    "dsml": '<｜DSML｜parameter name="dish" string="true">soup</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="extra" string="false">[1, null]</｜DSML｜parameter>\n',
    "pairs": "<arg_key>dish</arg_key>\n<arg_value>soup</arg_value>\n",
    "longcat_pairs": "<longcat_arg_key>dish</longcat_arg_key>\n"
    "<longcat_arg_value>soup</longcat_arg_value>\n",
    "braces": 'dish:<|"|>soup<|"|>,extra:[1,{a:null}]',
}


@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_a_tool_that_is_not_strict_takes_any_arguments(name: str, plain: Tokenizer) -> None:
    """Also if the answer is constrained otherwise: one call and no more."""
    dialect = dialects.BY_NAME[name]
    arguments = UNHELD[dialect.arguments].replace('<|"|>', dialect.quote or '<|"|>')
    call = dialect.call_prefix.replace("{}", "order", 1) + arguments + dialect.call_suffix
    tools = [CallableTool("order", SCHEMAS["order"], False)]
    rules = AnswerRules(
        dialect=dialect,
        tools=tools,
        is_parallel=False,
        channels=harmony.HARMONY if name == "harmony" else None,
        special_ids={},
    )
    assert takes(plain, rules, dialect.prefix + call + dialect.suffix)
    twice = dialect.prefix + call + dialect.separator + call + dialect.suffix
    assert not takes(plain, rules, twice)


def takes(tokenizer: Tokenizer, rules: AnswerRules, text: str) -> bool:
    grammar = rules.grammar()
    assert grammar is not None
    matcher = backend_of(tokenizer).compile(grammar).matcher()
    mask = np.zeros(-(-tokenizer.vocab_size // 32), dtype=np.int32)
    for token_id in tokenizer.encode(text, add_special_tokens=False, parse_special=True):
        matcher.fill(mask)
        if not mask[token_id // 32] >> (token_id % 32) & 1:
            return False
        matcher.accept([token_id])
    if matcher.is_complete:
        return True
    matcher.fill(mask)
    end = tokenizer.eos_token_ids[0]
    return bool(mask[end // 32] >> (end % 32) & 1)


CALL = '<tool_call>\n{"name": "stop", "arguments": {"now": true}}\n</tool_call>'
WRONG = '<tool_call>\n{"name": "stop", "arguments": {"now": 1}}\n</tool_call>'


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_text_is_free_until_a_call_begins(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    hermes = dialects.BY_NAME["hermes"]
    ids = special_ids(tokenizer, hermes)
    free = AnswerRules(dialect=hermes, tools=TOOLS, special_ids=ids)
    single = AnswerRules(dialect=hermes, tools=TOOLS, is_parallel=False, special_ids=ids)
    for rules in (free, single):
        assert takes(tokenizer, rules, "Just text, {even} <b>this</b>.")
        assert takes(tokenizer, rules, CALL)
        assert takes(tokenizer, rules, f"I stop.\n{CALL}")
        assert not takes(tokenizer, rules, WRONG)
        assert not takes(tokenizer, rules, f"I stop.\n{WRONG}")
        assert takes(tokenizer, rules, f"{CALL}\n{CALL}") == rules.is_parallel


def test_one_call_where_the_template_takes_no_more(plain: Tokenizer) -> None:
    for is_single in (False, True):
        dialect = dataclasses.replace(dialects.BY_NAME["hermes"], is_single=is_single)
        rules = AnswerRules(dialect=dialect, tools=TOOLS, is_required=True, special_ids={})
        assert takes(plain, rules, CALL)
        assert takes(plain, rules, f"{CALL}\n{CALL}") != is_single


@pytest.mark.parametrize("kind", ["plain", "special"])
def test_channels(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    dialect, marks = dialects.BY_NAME["harmony"], reasoning.BY_NAME["harmony"]
    made: dict[str, Any] = {
        "special_ids": special_ids(tokenizer, dialect),
        "channels": harmony.HARMONY,
    }
    made |= {"content": Grammar("choice", '["yes", "no"]')}
    thought = f"{harmony.REASONING}Well {{.{harmony.END}{harmony.NEXT_MESSAGE}"
    call = harmony.CALL_HEAD.replace("{}", "order") + json.dumps({"dish": "soup", "count": 1})
    for options, texts in (
        ({}, {"final yes": True, "final yet": False, thought + "final yes": False, call: False}),
        ({"reasoning": marks}, {"final no": True, thought * 2 + "final no": True, call: False}),
        (
            {"reasoning": marks, "dialect": dialect, "tools": TOOLS},
            {thought + call: True, call: True, thought + "final yes": True, call[:-1]: False},
        ),
        (
            {"dialect": dialect, "tools": TOOLS, "is_required": True},
            {call: True, "final yes": False, call.replace("order", "other"): False},
        ),
    ):
        rules = AnswerRules(**made, **options)
        for text, is_taken in texts.items():
            whole = text.replace("final ", harmony.CONTENT)
            assert takes(tokenizer, rules, whole) == is_taken, (options, whole)


def test_messages_of_muse(plain: Tokenizer) -> None:
    marks = reasoning.BY_NAME["muse"]
    rules = AnswerRules(
        content=Grammar("choice", '["yes", "no"]'),
        reasoning=marks,
        channels=marks.channels,
        special_ids={},
    )
    thought = " to=self<|message|>Well {.<|eom|><|start|>assistant"
    assert takes(plain, rules, " to=user<|message|>yes")
    assert takes(plain, rules, f"{thought} to=user<|message|>no")
    assert not takes(plain, rules, f"{thought} to=user<|message|>yet")
    assert not takes(plain, rules, "yes")


def test_reasoning_comes_first(plain: Tokenizer) -> None:
    hermes = dialects.BY_NAME["hermes"]
    made: dict[str, Any] = {"dialect": hermes, "tools": TOOLS, "is_required": True}
    made |= {"special_ids": {}}
    none = AnswerRules(**made)
    may = AnswerRules(**made, reasoning=THINK)
    does = AnswerRules(**made, reasoning=THINK, is_thinking=True)
    thought = f"I could write {WRONG}</think>\n\n"
    for rules, texts in (
        (none, {CALL: True, "<think>" + thought + CALL: False}),
        (may, {CALL: True, "<think>" + thought + CALL: True, thought + CALL: False}),
        (does, {thought + CALL: True, thought + WRONG: False, thought: False}),
    ):
        for text, is_taken in texts.items():
            assert takes(plain, rules, text) == is_taken, (rules, text)


@pytest.mark.parametrize(
    ("content", "good", "bad"),
    [
        (Grammar("json_schema", json.dumps(SCHEMAS["stop"])), '{"now": true}', '{"now": 1}'),
        (Grammar("json_object"), '{"a": [1]}', "[1]"),
        (Grammar("regex", r"a/b|c\/\d+"), "c/12", "c12"),
        (Grammar("choice", '["yes", "no \\"x\\""]'), 'no "x"', "maybe"),
        (Grammar("lark", 'start: "a" b\nb: "c" | "d"\n'), "ad", "a"),
    ],
)
def test_content_of_any_grammar(plain: Tokenizer, content: Grammar, good: str, bad: str) -> None:
    alone = AnswerRules(content=content, special_ids={})
    assert alone.grammar() is content
    after = AnswerRules(content=content, reasoning=THINK, is_thinking=True, special_ids={})
    assert takes(plain, after, f"Well.</think>\n\n{good}")
    assert not takes(plain, after, f"Well.</think>\n\n{bad}")
    hermes = dialects.BY_NAME["hermes"]
    beside = AnswerRules(content=content, dialect=hermes, tools=TOOLS, special_ids={})
    assert takes(plain, beside, good)
    assert takes(plain, beside, CALL)
    assert not takes(plain, beside, bad)


def test_nothing_is_held_without_need() -> None:
    free = [CallableTool("f", {}, False)]
    assert (
        AnswerRules(dialect=dialects.BY_NAME["hermes"], tools=free, special_ids={}).grammar()
        is None
    )
    assert AnswerRules(reasoning=THINK, special_ids={}).grammar() is None


@pytest.mark.parametrize(
    ("name", "schema", "keyword"),
    [
        ("pythonic", {"anyOf": [{}]}, "anyOf"),
        ("qwen3_xml", {"properties": {"a": {"type": "string", "pattern": "^a|b"}}}, "pattern"),
        ("qwen3_xml", {"properties": {"a": {"type": "string", "format": "iri"}}}, "iri"),
        ("pythonic", {"properties": {"a b": {}}}, "a b"),
        ("gemma4", {"properties": {"a": {"type": "string", "not": {}}}}, "not"),
        ("gemma4", {"properties": {"a": {"type": "array", "maxItems": 3}}}, "maxItems"),
        ("gemma4", {"properties": {"a": {"$ref": "#/$defs/a"}}, "$defs": {"a": SELF}}, "itself"),
        ("qwen3_xml", {"properties": []}, "'properties' must be an object"),
        ("pythonic", {"properties": {f"a{n}": {} for n in range(2000)}}, "more than 1024"),
        ("gemma4", {"properties": {}, "required": True}, "'required' must be a list"),
        ("glm45", {"properties": {"a": {"type": "string", "anyOf": "b"}}}, "'anyOf' must be"),
        ("qwen3_xml", {"properties": {"a": {"type": "string", "format": ["date"]}}}, "format"),
        ("qwen3_xml", multiplied({"type": "string"}), "too long"),
        ("gemma4", multiplied({"type": "string"}), "too long"),
    ],
)
def test_what_a_dialect_cannot_hold(name: str, schema: dict[str, Any], keyword: str) -> None:
    tools = [CallableTool("f", schema, True)]
    rules = AnswerRules(
        dialect=dialects.BY_NAME[name], tools=tools, is_required=True, special_ids={}
    )
    with pytest.raises(UnenforceableSchema, match=keyword):
        rules.grammar()


def test_what_the_library_refuses_is_left_to_it(plain: Tokenizer) -> None:
    names = {"type": "object", "propertyNames": {"format": ["date"]}}
    tools = [CallableTool("f", names, True)]
    hermes = dialects.BY_NAME["hermes"]
    rules = AnswerRules(dialect=hermes, tools=tools, is_required=True, special_ids={})
    grammar = rules.grammar()
    assert grammar is not None
    with pytest.raises(InvalidParameter, match="propertyNames"):
        backend_of(plain).compile(grammar)
