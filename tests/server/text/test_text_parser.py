"""Answers split into parts: every dialect, whole and in pieces of any size, well-formed and not."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Sequence
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from server.text import dialects, reasoning
from server.text import parser as parser_module
from server.text.parser import AnswerParser
from server.text.parts import Part, Text, ToolCallArguments, ToolCallBegin
from server.text.source import Read, Source
from tests.server.text.written_calls import written

NAMES = ("get_weather", "add", "now")
CITY = {"type": "object", "properties": {"city": {"type": "string"}, "b": {"type": "string"}}}
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": CITY, "add": {}, "now": {}}
THINK = reasoning.BY_NAME["think"]

PARIS = {"city": 'Paris "é" \\ {[', "days": [1, -2.5e3, None, True], "x": {"y": {}}}
CALLS = [("get_weather", PARIS), ("add", {"a": 1, "b": 2}), ("now", {})]


def parser(dialect: str | None, **options: Any) -> AnswerParser:
    found = dialects.BY_NAME[dialect] if dialect else None
    if dialect == "harmony":
        options.setdefault("reasoning", reasoning.BY_NAME["harmony"])
    return AnswerParser(dialect=found, schemas=SCHEMAS, **options)


def read(made: AnswerParser, pieces: Iterable[str], *, cut: bool = False) -> list[Part]:
    parts = [part for piece in pieces for part in made.push(piece)]
    return parts + made.finish(truncated=cut)


def joined(parts: Sequence[Part]) -> list[tuple[str, ...]]:
    """The parts with adjacent ones merged and ids removed."""
    known: list[tuple[str, ...]] = []
    for part in parts:
        if isinstance(part, ToolCallBegin):
            known.append(("call", str(part.index), part.name, ""))
        elif isinstance(part, ToolCallArguments):
            row = known[-1]
            assert row[:2] == ("call", str(part.index))
            known[-1] = (*row[:3], "".join(row[3:]) + part.text)
        else:
            kind = "text" if isinstance(part, Text) else "reasoning"
            assert part.text
            if known and known[-1][0] == kind:
                known[-1] = (kind, known[-1][1] + part.text)
            else:
                known.append((kind, part.text))
    return known


def calls_in(parts: Sequence[Part]) -> list[tuple[str, Any]]:
    return [(row[2], json.loads(row[3])) for row in joined(parts) if row[0] == "call"]


def content_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if isinstance(part, Text))


def splits(text: str) -> Iterable[list[str]]:
    """Every split in two (of a long text every other), in single characters, some random ones."""
    for at in range(0, len(text) + 1, 1 + (len(text) > 300)):
        yield [text[:at], text[at:]]
    yield list(text)
    rng = random.Random(len(text))
    for _ in range(20):
        cuts = sorted(rng.choices(range(len(text) + 1), k=rng.randint(2, 8)))
        yield [text[a:b] for a, b in itertools.pairwise([0, *cuts, len(text)])]


def check_all_splits(dialect: str | None, text: str, cut: bool = False, **options: Any) -> None:
    once = joined(read(parser(dialect, **options), [text], cut=cut))
    for pieces in splits(text):
        assert joined(read(parser(dialect, **options), pieces, cut=cut)) == once, pieces


# ---------------------------------------------------------------- well-formed


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", dialects.BY_NAME)
@pytest.mark.parametrize("count", [1, 3])
def test_calls_of_every_dialect(name: str, count: int, whole: bool) -> None:
    dialect = dialects.BY_NAME[name]
    text = written(dialect, CALLS[:count], SCHEMAS)
    parts = read(parser(name, buffer_calls=whole), [text])
    assert calls_in(parts) == CALLS[:count]
    assert content_of(parts) == ""
    begins = [part for part in parts if isinstance(part, ToolCallBegin)]
    assert [part.index for part in begins] == list(range(count))
    for begin in begins:
        if dialect.is_numbered:
            assert begin.id == f"functions.{begin.name}:{begin.index}"
            continue
        id_ = begin.id.removeprefix(dialect.id_prefix)
        assert len(id_) == dialect.id_length
        assert id_.isalnum()
    check_all_splits(name, text, buffer_calls=whole)
    if dialect.opener:
        said = "I look it up.\n\n"
        parts = read(parser(name, buffer_calls=whole), [said + _with_opener(dialect, text)])
        assert joined(parts)[0] == ("text", "I look it up.")
        assert calls_in(parts) == CALLS[:count]
        check_all_splits(name, said + _with_opener(dialect, text) + "\n", buffer_calls=whole)


def _with_opener(dialect: dialects.Dialect, text: str) -> str:
    return text if text.startswith(dialect.opener) else dialect.opener + text


@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_arguments_come_as_they_are_written(name: str) -> None:
    """Not in one piece at the end: most of a long argument is streamed before it is complete."""
    dialect = dialects.BY_NAME[name]
    calls = [("get_weather", {"a": "x" * 50, "b": "y" * 50})]
    made, told = parser(name), 0
    text = written(dialect, calls, SCHEMAS)
    for piece in text[: text.index("yy") + 25]:
        told += sum(len(p.text) for p in made.push(piece) if isinstance(p, ToolCallArguments))
    assert told > (50 if dialect.arguments == "python" else 75)


def test_variants_that_models_write() -> None:
    for text in (
        '<tool_call>{"arguments":{"a":1},"name":"add"}</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}}}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": {"a": 1}\n</tool_call>',
        '<tool_call>\n{"name": "add", "arguments": "{\\"a\\": 1}"}\n</tool_call>',
        '<tool_call>\n{"id": "1", "name": "add", "arguments": {"a": 1}}',
        '<tool_call>[{"name": "add", "arguments": {"a": 1}}]</tool_call>',
    ):
        for whole in (False, True):
            parts = read(parser("hermes", buffer_calls=whole), [text])
            assert calls_in(parts) == [("add", {"a": 1})]
            assert content_of(parts) == ""
            check_all_splits("hermes", text, buffer_calls=whole)
    text = '[TOOL_CALLS]add[CALL_ID]abc123456[ARGS]{"a": 1}'
    assert calls_in(read(parser("mistral_args"), [text])) == [("add", {"a": 1})]
    for text in (
        '<|python_tag|>{"name": "now", "parameters": {}}',
        '{"type": "function", "name": "now", "parameters": {}}\n{"name": "now", "arguments": null}',
    ):
        assert all(call == ("now", {}) for call in calls_in(read(parser("llama3"), [text])))
    pairs = "<arg_key>a</arg_key><arg_value>1</arg_value>"
    for text in (f"<tool_call>add{pairs}</tool_call>", f"<tool_call>\nadd\n{pairs}\n</tool_call>"):
        assert calls_in(read(parser("glm45"), [text])) == [("add", {"a": 1})]
        check_all_splits("glm45", text)
    text = "[add(a=-1, b=(1, 'it\\'s'), c=true)]"
    assert calls_in(read(parser("pythonic"), [text])) == [
        ("add", {"a": -1, "b": [1, "it's"], "c": True})
    ]
    for text in (
        "<|tool_call_start|>[add(a=1)]<|tool_call_end|><|tool_call_start|>[now()]<|tool_call_end|>",
        '<|tool_call_start|>[{"name": "add", "arguments": {"a": 1}}, {"name": "now", '
        '"arguments": {}}]<|tool_call_end|>',
    ):
        parts = read(parser("lfm2"), [text + "Both are on their way."])
        assert calls_in(parts) == [("add", {"a": 1}), ("now", {})]
        assert content_of(parts) == "Both are on their way."
        check_all_splits("lfm2", text + "Both are on their way.")
    text = '<|tool_call>call:add{ a: 1, <|"|>b c<|"|>:[ true, warm ] }'
    assert calls_in(read(parser("gemma4"), [text])) == [("add", {"a": 1, "b c": [True, "warm"]})]
    check_all_splits("gemma4", text)
    for text in ("<function_calls>add(a=null)\n\nnow()", "<function_calls> add(a=None) now( )"):
        assert calls_in(read(parser("olmo3"), [text])) == [("add", {"a": None}), ("now", {})]
        check_all_splits("olmo3", text)


def test_arguments_without_quotes_have_the_types_of_the_schema() -> None:
    text = (
        '<tool_call>\n<function=get_weather>\n<parameter=city>\n\n1 "x"\n\n</parameter>\n'
        "<parameter=days>\n[1, 2]\n</parameter>\n<parameter=b>null</parameter>\n"
        "<parameter=c>\nnot json\n</parameter>\n</function>\n</tool_call>"
    )
    for whole in (False, True):
        parts = read(parser("qwen3_xml", buffer_calls=whole), [text])
        arguments = {"city": '\n1 "x"\n', "days": [1, 2], "b": "null", "c": "not json"}
        assert calls_in(parts) == [("get_weather", arguments)]
        check_all_splits("qwen3_xml", text, buffer_calls=whole)


# ---------------------------------------------------------------- not calls

MALFORMED = [
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": }}</tool_call>'),
    ("hermes", '<tool_call>{"name": "unknown", "arguments": {}}</tool_call>'),
    ("hermes", "Use <tool_call> like this: </tool_call>."),
    ("hermes", '<tool_call>{"name": "add"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "add", "arguments": {"a": "<tool_call>'),
    ("hermes", "1 < 2 and <tool"),
    ("llama3", '{"answer": 42}'),
    ("llama3", '{"name": "Ann", "parameters": {}}'),
    ("llama3", "  {"),
    ("llama3", '{"name": "add", "arguments": "{\\"a\\": NaN}"}'),
    ("llama3", '{"name": "add", "arguments": "{\\"a\\": \\"\\ud83d\\"}"}'),
    ("llama3", '{"name": "add", "arguments": "{}{}"}'),
    ("mistral", "[TOOL_CALLS]"),
    ("mistral", "[TOOL_CALLS][1, 2]"),
    ("mistral_args", '[TOOL_CALLS]nothing[ARGS]{"a": 1}'),
    ("pythonic", "[1] Smith, On Things (1999)"),
    ("pythonic", "[add(a=open('x'))]"),
    ("pythonic", "[add(a=1"),
    ("pythonic", "[add(a='\\ud83d')]"),
    ("lfm2", "<|tool_call_start|>[unknown(a=1)]<|tool_call_end|>"),
    ("lfm2", '<|tool_call_start|>[{"name": "unknown", "arguments": {}}]<|tool_call_end|>'),
    ("gemma4", "<|tool_call>call:unknown{}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:}<tool_call|>"),
    ("gemma4", "<|tool_call>call:add{a:[1}<tool_call|>"),
    ("olmo3", "<function_calls></function_calls>"),
    ("olmo3", "<function_calls>Nothing to call</function_calls>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>function"),
    ("deepseek_v32", "<｜DSML｜function_calls>Nothing to call</｜DSML｜function_calls>"),
    (
        "deepseek_v32",
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n<｜DSML｜parameter name="a">1',
    ),
    ("granite", "<|tool_call|>[]"),
    ("nemotron", "<TOOLCALL>[add(a=1)]</TOOLCALL>"),
    ("glm45", "<tool_call>subtract\n</tool_call>"),
    ("glm45", "<tool_call>add\n<arg_key>a</arg_key>\n1\n</tool_call>"),
    ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>add<|tool_call_argument_begin|>{}"),
    ("qwen3_xml", "<tool_call>\n<function=add>\n<parameter=a>\n1\n</function>\n</tool_call>"),
    ("qwen3_xml", "<tool_call>\n<function=add>\nNothing.</function></tool_call>"),
]


@pytest.mark.parametrize(("dialect", "text"), MALFORMED)
def test_what_is_no_call_is_text(dialect: str, text: str) -> None:
    parts = read(parser(dialect, buffer_calls=True), [text])
    assert joined(parts) == [("text", text)]
    for whole in (False, True):
        check_all_splits(dialect, text, buffer_calls=whole)
        check_all_splits(dialect, text, buffer_calls=whole, cut=True)


@pytest.mark.parametrize(
    "arguments",
    ['{"a": %s}', '"{\\"a\\": %s}"', '" {\\"a\\": %s}\\n"'],
    ids=["plain", "text", "spaced"],
)
def test_arguments_before_the_name_or_in_a_string_may_hold_long_numbers(arguments: str) -> None:
    """A model that repeats itself writes thousands of digits, for which Python makes no number."""
    text = '{"arguments": ' + arguments % ("1" * 5000) + ', "name": "add"}'
    parts = read(parser("llama3", buffer_calls=True), [text])
    assert joined(parts) == [("call", "0", "add", '{"a": %s}' % ("1" * 5000))]


def test_an_unknown_escape_is_itself_and_no_warning() -> None:
    """Regular expressions and Windows' paths: Python's compiler would warn on the server's log."""
    parts = read(parser("pythonic", buffer_calls=True), [r"[add(a='\d+', b='C:\dir')]"])
    assert calls_in(parts) == [("add", {"a": r"\d+", "b": r"C:\dir"})]


@pytest.mark.parametrize("dialect", ["pythonic", "lfm2", "olmo3"])
def test_a_character_may_be_escaped_in_two_halves(dialect: str) -> None:
    """As in JSON, by models that write Python; Python itself reads two halves of none."""
    value = "{'\\ud83d\\ude00': ['\\ud83d\\ude00']}"
    call = {
        "pythonic": f"[add(a={value})]",
        "lfm2": f"<|tool_call_start|>[add(a={value})]<|tool_call_end|>",
        "olmo3": f"<function_calls>add(a={value})</function_calls>",
    }
    parts = read(parser(dialect, buffer_calls=True), [call[dialect]])
    assert calls_in(parts) == [("add", {"a": {"😀": ["😀"]}})]


def test_deepseeks_tags_state_whether_a_value_is_a_string() -> None:
    """Whatever the function's schema is, and whatever the string looks like."""
    begin, end = '<｜DSML｜parameter name="', "</｜DSML｜parameter>\n"
    text = (
        'Let me see.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="add">\n'
        f'{begin}zip" string="true">007{end}{begin}limit" string="false">20{end}'
        f'{begin}raw" string="false">{{"a": [null]}}{end}{begin}quoted" string="true">"x"{end}'
        "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
    )
    expected = {"zip": "007", "limit": 20, "raw": {"a": [None]}, "quoted": '"x"'}
    parts = read(parser("deepseek_v32", buffer_calls=True), [text])
    assert calls_in(parts) == [("add", expected)]
    assert content_of(parts) == "Let me see."
    check_all_splits("deepseek_v32", text)


def test_a_malformed_call_leaves_the_good_ones_whole() -> None:
    good = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    bad = '<tool_call>\n{"name": "add", "arguments": {"a" 1}}\n</tool_call>'
    for text in (bad + good, good + "\n" + bad, good + bad + good):
        parts = read(parser("hermes", buffer_calls=True), [text])
        assert calls_in(parts) == [("add", {"a": 1})] * text.count(good)
        assert content_of(parts) == bad
        check_all_splits("hermes", text, buffer_calls=True)
        check_all_splits("hermes", text)


@pytest.mark.parametrize("name", ["gemma4", "functiongemma", "lfm2", "olmo3", "qwen3_xml"])
def test_calls_that_never_end_are_read_in_time_that_grows_with_the_text(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each runs to the end, turns out to be text, and contains the start of the next one."""
    limit, looks = 500, 0
    look = Source.peek_char

    def counted(source: Source) -> Read[str]:
        nonlocal looks
        looks += 1
        return (yield from look(source))

    monkeypatch.setattr(parser_module, "_MAX_REREAD_CHARS", limit)
    monkeypatch.setattr(Source, "peek_char", counted)
    dialect = dialects.BY_NAME[name]
    begun = dialect.prefix + dialect.call_prefix.replace("{}", "add")
    if dialect.arguments == "xml":
        begun += "<parameter=a>"
    text = f"One. {begun * 100}"
    assert joined(read(parser(name, buffer_calls=True), [text])) == [("text", text)]
    assert looks < 5 * len(text) + 5 * limit
    monkeypatch.setattr(Source, "peek_char", look)
    check_all_splits(name, text[:limit], buffer_calls=True)


def test_a_call_that_breaks_on_a_stream_loses_nothing() -> None:
    text = '<tool_call>{"name": "add", "arguments": {"a": oops}}</tool_call> Sorry.'
    parts = read(parser("hermes"), [text])
    assert joined(parts) == [("call", "0", "add", '{"a": oops}}'), ("text", "Sorry.")]


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_a_call_that_was_cut_off_is_told_as_far_as_it_came(name: str, whole: bool) -> None:
    dialect = dialects.BY_NAME[name]
    text = written(dialect, [("add", {"a": 1, "b": "wide"})], SCHEMAS)
    text = text[: text.index("wi") + 2]
    parts = read(parser(name, buffer_calls=whole), [text], cut=True)
    ((kind, index, called, arguments),) = joined(parts)
    assert (kind, index, called) == ("call", "0", "add")
    assert arguments.startswith('{"a": 1')
    check_all_splits(name, text, cut=True, buffer_calls=whole)


@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_wherever_a_call_is_cut_off_a_stream_tells_what_a_whole_answer_does(name: str) -> None:
    """Within its marks, too, of which the end may only have begun."""
    text = written(dialects.BY_NAME[name], [("add", {"a": 1, "b": "long"})], SCHEMAS)
    for end in range(len(text) + 1):
        told = joined(read(parser(name), [text[:end]], cut=True))
        assert joined(read(parser(name, buffer_calls=True), [text[:end]], cut=True)) == told
        if told and told[0][0] == "call":  # then nothing else, and nothing of its marks
            ((_, _, _, arguments),) = told
            assert "</" not in arguments


@pytest.mark.parametrize("name", dialects.BY_NAME)
def test_wherever_a_forced_call_is_cut_off_none_of_it_is_content(name: str) -> None:
    calls = [("add", {"a": 1, "b": "long"}), ("now", {})]
    text = written(dialects.BY_NAME[name], calls, SCHEMAS)
    for end in range(len(text) + 1):
        told = joined(read(parser(name, is_forced=True), [*text[:end]], cut=True))
        assert [row[0] for row in told] in ([], ["call"], ["call", "call"]), text[:end]
        whole = parser(name, is_forced=True, buffer_calls=True)
        assert joined(read(whole, [text[:end]], cut=True)) == told


def test_special_tokens_never_become_content() -> None:
    hidden = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
    for text, content in (
        ("[TOOL_CALLS][1, 2]", "[1, 2]"),
        ("A[ARGS]B", "AB"),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[CALL_ID]', ""),
    ):
        assert (
            content_of(read(parser("mistral", buffer_calls=True, hidden=hidden), [text])) == content
        )
        check_all_splits("mistral", text, hidden=hidden)


# ---------------------------------------------------------------- reasoning


@pytest.mark.parametrize("dialect", [None, "hermes", "llama3"])
@pytest.mark.parametrize(
    ("text", "is_thinking", "known"),
    [
        ("<think>\nWell.\n</think>\n\nYes. ", False, [("reasoning", "Well."), ("text", "Yes. ")]),
        ("Well.\n</think>\n\nYes.", True, [("reasoning", "Well."), ("text", "Yes.")]),
        ("<think>Well.</think>Yes.", True, [("reasoning", "Well."), ("text", "Yes.")]),
        ("<think>\n\n</think>\n\nYes.", False, [("text", "Yes.")]),
        ("<think>\nWell, <think", False, [("reasoning", "Well, <think")]),
        (" Yes <think>", False, [("text", " Yes <think>")]),
        ("<thin", False, [("text", "<thin")]),
        ("\n ", False, [("text", "\n ")]),
        ("<think>a</think>", False, [("reasoning", "a")]),
    ],
)
def test_reasoning(
    dialect: str | None, text: str, is_thinking: bool, known: list[tuple[str, ...]]
) -> None:
    options = {"reasoning": THINK, "is_thinking": is_thinking}
    assert joined(read(parser(dialect, **options), [text])) == known
    check_all_splits(dialect, text, **options)


def test_reasoning_before_a_call() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"<think>\nI could write {call}\n</think>\n\n{call}"
    parts = read(parser("hermes", reasoning=THINK), [text])
    assert joined(parts) == [
        ("reasoning", f"I could write {call}"),
        ("call", "0", "add", '{"a": 1}'),
    ]
    check_all_splits("hermes", text, reasoning=THINK)


@pytest.mark.parametrize("is_thinking", [False, True])
def test_the_title_of_reasoning_is_none(is_thinking: bool) -> None:
    options = {"reasoning": reasoning.BY_NAME["gemma4"], "is_thinking": is_thinking}
    said = ("" if is_thinking else "<|channel>") + "thought\nWarm, I think.<channel|>It is warm."
    parts = read(parser("gemma4", **options), [said])
    assert joined(parts) == [("reasoning", "Warm, I think."), ("text", "It is warm.")]
    check_all_splits("gemma4", said, **options)


def test_plain_text_passes_at_once() -> None:
    """Once only content can follow, pieces are passed on unchanged."""
    made = parser(None, reasoning=THINK)
    assert made.push("<") == []
    assert made.push("b> is ") == [Text("<b> is ")]
    assert made.is_plain
    assert made.push("<think>\n") == [Text("<think>\n")]
    assert made.push("") == []
    made = parser("hermes")
    assert made.push("One <tool") == [Text("One")]
    assert made.push("s") == [Text(" <tools")]


# ---------------------------------------------------------------- by property

_PIECES = [
    "<tool_call>", "</tool_call>", '{"name": "add", "arguments": ', '{"a": 1}', "}", "{", "[", "]",
    "[TOOL_CALLS]", "[ARGS]", "add", "add(a=1)", "(", ")", ", ", "\n", " ", '"', "\\", "<think>",
    "</think>", "<", "text", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>",
    "<function=add>", "</function>", "<parameter=a>", "</parameter>",
    "```", "<｜tool▁call▁end｜>", "function", "<|python_tag|>", ";", "true", "1", "-", "\\u00e9",
]  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(
    st.sampled_from([None, *dialects.BY_NAME]),
    st.lists(st.sampled_from(_PIECES), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
def test_any_text_in_any_pieces(
    dialect: str | None, text: str, cuts: list[int], whole: bool, cut: bool, hides: bool
) -> None:
    options: dict[str, Any] = {"buffer_calls": whole, "reasoning": THINK}
    if hides and dialect:
        options["hidden"] = dialects.BY_NAME[dialect].markers
    ends = [0, *sorted(min(cut_at, len(text)) for cut_at in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    once = joined(read(parser(dialect, **options), [text], cut=cut))
    assert joined(read(parser(dialect, **options), pieces, cut=cut)) == once
    assert joined(read(parser(dialect, **options), text, cut=cut)) == once
    for row in once:
        if whole and not cut and row[0] == "call":
            assert isinstance(json.loads(row[3]), dict)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(list(dialects.BY_NAME)),
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(
                st.from_regex(r"[a-z_]{1,6}", fullmatch=True),
                st.recursive(
                    st.none()
                    | st.booleans()
                    | st.integers()
                    | st.text(max_size=12)
                    | st.floats(allow_nan=False, allow_infinity=False),
                    lambda inner: (
                        st.lists(inner, max_size=3)
                        | st.dictionaries(st.text(max_size=4), inner, max_size=3)
                    ),
                    max_leaves=6,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
    st.lists(st.integers(0, 400), max_size=8),
)
def test_any_call_comes_back(
    name: str, calls: list[tuple[str, dict[str, Any]]], cuts: list[int]
) -> None:
    # In tags, a schema's string is the raw text: null would come back as its letters.
    texts = [arguments.get(key, "") for _, arguments in calls for key in CITY["properties"]]
    is_tagged = dialects.BY_NAME[name].arguments in ("xml", "invoke", "pairs", "longcat_pairs")
    assume(not is_tagged or all(isinstance(x, str) for x in texts))
    text = written(dialects.BY_NAME[name], calls, SCHEMAS)
    ends = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    parts = read(parser(name), [text[a:b] for a, b in itertools.pairwise(ends)])
    assert calls_in(parts) == calls
    assert joined(read(parser(name, buffer_calls=True), [text])) == joined(parts)
