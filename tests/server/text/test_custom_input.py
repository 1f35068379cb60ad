"""The input of custom tools, in the arguments of the functions that stand for them."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.text.custom_input import CustomInputs, InputReader, input_pattern, to_arguments
from server.text.parts import Text, ToolCallArguments, ToolCallBegin


def read(arguments: str, *cuts: int) -> str:
    """The input, from arguments that arrive in pieces."""
    reader, ends = InputReader(), [0, *sorted(cuts), len(arguments)]
    pieces = [arguments[begin:end] for begin, end in pairwise(ends)]
    return "".join(map(reader.push, pieces)) + reader.finish()


@given(st.text(), st.booleans(), st.data())
def test_the_input_is_found_however_it_is_split(
    text: str, ascii: bool, data: st.DataObject
) -> None:
    arguments = json.dumps({"input": text}, ensure_ascii=ascii)
    assert to_arguments(text) == json.dumps({"input": text}, ensure_ascii=False)
    cuts = data.draw(st.lists(st.integers(0, len(arguments)), max_size=8))
    assert read(arguments, *cuts) == text
    spaced = arguments.replace(" ", "\n\t ", 1).replace("{", " { ", 1)
    assert read(spaced, *cuts) == text


@given(st.text(st.characters(categories=["L", "S", "P"])), st.data())
def test_what_is_cut_off_is_the_beginning(text: str, data: st.DataObject) -> None:
    arguments = json.dumps({"input": text})
    begun = arguments[: data.draw(st.integers(0, len(arguments)))]
    cuts = data.draw(st.lists(st.integers(0, len(begun)), max_size=4))
    if begun.startswith('{"input": "'):
        assert text.startswith(read(begun, *cuts))
    assert read(begun, *cuts) == read(begun)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ('{"mood": 1, "input": "x"}', "x"),
        ('{"mood": 1}', ""),
        ('{"input": 5}', '{"input": 5}'),
        ("[1]", "[1]"),
        ("", ""),
        (r'{"input": "a\ud83d"}', "a\ufffd"),
        (r'{"input": "a\ud83dz"}', "a\ufffdz"),
        (r'{"input": "\\ud83d"}', r"\ud83d"),
        ('{"input": "x"} and more', "x"),
    ],
)
def test_odd_arguments(arguments: str, found: str) -> None:
    for cuts in ((), range(len(arguments))):
        assert read(arguments, *cuts) == found


def test_the_input_is_sent_while_it_is_written() -> None:
    reader = InputReader()
    pieces = ('{"inp', 'ut": "', "a", "\\", 'n"', "}")
    assert [reader.push(piece) for piece in pieces] == ["", "", "a", "", "\n", ""]


def test_only_custom_tools_have_inputs() -> None:
    inputs = CustomInputs({"run"})
    found = inputs.read([Text("Well."), ToolCallBegin(0, "1", "run")], is_last=False)
    pieces = [ToolCallArguments(0, '{"input": "l'), ToolCallArguments(0, 's"}')]
    found += inputs.read(pieces, is_last=False)
    found += inputs.read(
        [
            ToolCallBegin(1, "2", "add"),
            ToolCallArguments(1, '{"input": 1}'),
            ToolCallBegin(2, "3", "run"),
            ToolCallArguments(2, "[2]"),
        ],
        is_last=True,
    )
    assert found == [
        Text("Well."),
        ToolCallBegin(0, "1", "run", is_custom=True),
        ToolCallArguments(0, "l", is_custom=True),
        ToolCallArguments(0, "s", is_custom=True),
        ToolCallBegin(1, "2", "add"),
        ToolCallArguments(1, '{"input": 1}'),
        ToolCallBegin(2, "3", "run", is_custom=True),
        ToolCallArguments(2, "[2]", is_custom=True),
    ]


@pytest.mark.parametrize(
    ("definition", "pattern"),
    [
        ("^a|b$", "a|b"),
        ("(?i)^a$", "(?i)a"),
        (r"^a\$", r"a\$"),
        (r"a\\$", r"a\\"),
        ("a", "a"),
    ],
)
def test_anchors_change_nothing_in_whole_texts(definition: str, pattern: str) -> None:
    assert input_pattern("regex", definition) == pattern
