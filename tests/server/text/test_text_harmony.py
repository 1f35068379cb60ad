"""Answers in harmony channels, whole and in pieces."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.text import dialects, harmony, reasoning
from server.text.parser import AnswerParser
from tests.server.text.test_text_parser import SCHEMAS, joined, read, splits

MARKS = reasoning.BY_NAME["harmony"]
THOUGHT = "<|channel|>analysis<|message|>Hm. {"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
ADD = ("call", "0", "add", '{"a": 1}')


def parser(**options: Any) -> AnswerParser:
    options = {"dialect": dialects.BY_NAME["harmony"], "schemas": SCHEMAS, **options}
    return AnswerParser(reasoning=MARKS, hidden=harmony.MARKERS, **options)


CASES = {
    f"{THOUGHT}{NEXT}{FINAL}Hello\n there!": [("reasoning", "Hm. {"), ("text", "Hello\n there!")],
    f"{FINAL}Hello!<|return|>": [("text", "Hello!")],
    f"{THOUGHT}{NEXT}<|channel|>commentary to=functions.add <|constrain|>json<|message|>"
    '{"a": 1}<|call|>': [("reasoning", "Hm. {"), ADD],
    ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}': [ADD],
    f"{THOUGHT}<|end|><|start|>assistant to=functions.add<|channel|>commentary<|message|>"
    '{"a": 1}': [("reasoning", "Hm. {"), ADD],
    f"<|channel|>commentary<|message|>I look.{NEXT}<|channel|>commentary to=functions.add "
    '<|message|>{"a": 1}': [("text", "I look."), ADD],
    f"{THOUGHT}{NEXT}{THOUGHT}{NEXT}{FINAL}a{NEXT}{FINAL}b": [
        ("reasoning", "Hm. {\n\nHm. {"),
        ("text", "a\n\nb"),
    ],
    "Just text, assistant to=nobody.": [("text", "Just text, assistant to=nobody.")],
    "<|channel|>analysis to=browser.search code<|message|>q<|call|>": [("reasoning", "q")],
    "<|channel|>commentary to=functions.other<|message|>{}<|call|>": [("text", "{}")],
    "<|channel|>commentary to=functions.add<|message|>none<|call|>": [("text", "none")],
    f"{THOUGHT}{NEXT}<|channel|>fin": [("reasoning", "Hm. {")],
    "": [],
}


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("text", CASES)
def test_an_answer_in_channels(text: str, whole: bool) -> None:
    for pieces in ([text], *splits(text)):
        made = parser(buffer_calls=whole)
        assert joined(read(made, pieces)) == CASES[text], pieces
        assert made.has_reasoned == any(row[0] == "reasoning" for row in CASES[text])


def test_without_tools_a_call_is_text() -> None:
    text = "<|channel|>commentary to=functions.add<|message|>{}<|call|>"
    assert joined(read(parser(dialect=None, schemas={}), [text])) == [("text", "{}")]


def test_content_and_arguments_come_as_they_are_written() -> None:
    made = parser()
    assert joined(made.push(f"{THOUGHT}")) == [("reasoning", "Hm. {")]
    assert not made.reasoning_ended
    assert joined(made.push(f"{NEXT}{FINAL}Hel")) == [("text", "Hel")]
    assert made.reasoning_ended
    made = parser()
    head = harmony.CALL_HEAD.replace("{}", "add")
    assert joined(made.push(head + '{"a": ')) == [("call", "0", "add", '{"a": ')]


_PIECES = [
    *harmony.MARKERS,
    "assistant",
    "analysis",
    "final",
    "commentary to=functions.add ",
    "a ",
    "\n",
]
_PIECES += ['{"a": 1}', "{", THOUGHT, FINAL, NEXT, " to=functions.now"]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from(_PIECES), max_size=14).map("".join),
    st.lists(st.integers(0, 200), max_size=6),
    st.booleans(),
    st.booleans(),
)
def test_any_pieces_of_channels(text: str, cuts: list[int], whole: bool, cut: bool) -> None:
    ends = [0, *sorted(min(at, len(text)) for at in cuts), len(text)]
    once = joined(read(parser(buffer_calls=whole), [text], cut=cut))
    pieces = [text[a:b] for a, b in itertools.pairwise(ends)]
    assert joined(read(parser(buffer_calls=whole), pieces, cut=cut)) == once
    assert joined(read(parser(buffer_calls=whole), text, cut=cut)) == once
    assert not any(mark in row[-1] for row in once for mark in harmony.MARKERS if row[0] == "text")


MUSE = {
    " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hello\n there!<|eot|>": [
        ("reasoning", "Hm."),
        ("text", "Hello\n there!"),
    ],
    " to=user<|message|>Hello!<|eot|>": [("text", "Hello!")],
    # Without an end of its own.
    " to=self<|message|>Hm.<|start|>assistant to=user<|message|>Hello!": [
        ("reasoning", "Hm."),
        ("text", "Hello!"),
    ],
    " to=self<|message|>Hm. to=user is whom": [("reasoning", "Hm. to=user is whom")],
    "Just text, to=nobody.": [("text", "Just text, to=nobody.")],
    " to=us": [],
}


@pytest.mark.parametrize("text", MUSE)
def test_messages_of_muse(text: str) -> None:
    """To itself, and to the user."""
    for pieces in ([text], *splits(text)):
        made = AnswerParser(reasoning=reasoning.BY_NAME["muse"], hidden=harmony.MUSE.markers)
        assert joined(read(made, pieces)) == MUSE[text], pieces
        assert made.has_reasoned == any(row[0] == "reasoning" for row in MUSE[text])
