"""Ranges of numbers: what lies outside of one is never admitted, its bounds only if inclusive."""

from __future__ import annotations

import itertools
import json
from decimal import Decimal
from typing import Any

import pytest

from engine.errors import InvalidParameter
from engine.grammar.llguidance_backend import LlguidanceBackend, LlguidanceGrammar
from engine.grammar.number_ranges import missing_bound
from engine.text.tokenizer import Tokenizer
from engine.types import Grammar

BOUNDS = ["-10", "-1.5", "-1", "-0.5", "0", "0.001", "0.5", "1", "1.5", "2", "10", "10.25"]
NUMBERS = [
    *("-11", "-10", "-10.0", "-2", "-1.5", "-1.51", "-1.0", "-1", "-0.75", "-0.5", "-0.001", "-0"),
    *("0", "0.0", "0.001", "0.3", "0.5", "0.51", "1", "1.0", "1.00", "1.25", "1.5", "1.51", "2"),
    *("2.0", "7", "10", "10.0", "10.1", "10.25", "10.26", "11"),
]


def compiled(backend: LlguidanceBackend, **bounds: object) -> LlguidanceGrammar:
    return backend.compile(Grammar("json_schema", json.dumps({"type": "number", **bounds})))


def takes(grammar: LlguidanceGrammar, token_ids: list[int]) -> bool:
    library = grammar.matcher().library
    return library.try_consume_tokens(token_ids) == len(token_ids) and library.is_accepting()


@pytest.mark.parametrize("low_name", ["minimum", "exclusiveMinimum"])
@pytest.mark.parametrize("high_name", ["maximum", "exclusiveMaximum"])
def test_no_number_outside_is_admitted(
    backend: LlguidanceBackend, demo_tokenizer: Tokenizer, low_name: str, high_name: str
) -> None:
    """As the library does by itself with ``0 < x <= 0.5``, where it admits 0."""
    encoded = {text: demo_tokenizer.encode(text, add_special_tokens=False) for text in NUMBERS}
    for low, high in itertools.combinations(BOUNDS, 2):
        grammar = compiled(backend, **{low_name: json.loads(low), high_name: json.loads(high)})
        for text, token_ids in encoded.items():
            number, is_inside = Decimal(text), Decimal(low) < Decimal(text) < Decimal(high)
            is_inside |= low_name == "minimum" and number == Decimal(low)
            is_inside |= high_name == "maximum" and number == Decimal(high)
            if takes(grammar, token_ids):
                assert is_inside, (low, high, text)
            elif is_inside:  # the library writes numbers in one way
                assert number == 0 or text.endswith("0"), (low, high, text)


def test_the_closer_of_two_bounds_counts(
    backend: LlguidanceBackend, demo_tokenizer: Tokenizer
) -> None:
    def admitted(*texts: str, **bounds: object) -> list[str]:
        grammar = compiled(backend, **bounds)
        encoded = {text: demo_tokenizer.encode(text, add_special_tokens=False) for text in texts}
        return [text for text, token_ids in encoded.items() if takes(grammar, token_ids)]

    both = {"minimum": 0.2, "exclusiveMinimum": 0, "maximum": 0.5}
    assert admitted("0", "0.1", "0.2", "0.5", "0.6", **both) == ["0.2", "0.5"]
    same = {"minimum": 0, "exclusiveMinimum": 0, "maximum": 0.5}
    assert admitted("0", "0.1", "0.5", **same) == ["0.1", "0.5"]
    below = {"minimum": -7.25, "maximum": -7.1, "exclusiveMaximum": -7}
    assert admitted("-7", "-7.05", "-7.1", "-7.25", "-7.3", **below) == ["-7.1", "-7.25"]


@pytest.mark.parametrize(
    "schema",
    [
        {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"exclusiveMinimum": 0, "allOf": [{"allOf": [{"maximum": 0.5}]}]},
        {"exclusiveMinimum": 0, "$ref": "#/$defs/half"},
        {"allOf": [{"$ref": "#/$defs/half"}, {"$ref": "#/$defs/positive"}]},
    ],
)
def test_bounds_may_come_from_several_schemas(
    backend: LlguidanceBackend, demo_tokenizer: Tokenizer, schema: dict[str, Any]
) -> None:
    parts = {"half": {"type": "number", "maximum": 0.5}, "positive": {"exclusiveMinimum": 0}}
    grammar = compiled(backend, **schema, **{"$defs": parts})
    for text, is_inside in (("0", False), ("0.0", False), ("0.1", True), ("0.5", True)):
        token_ids = demo_tokenizer.encode(text, add_special_tokens=False)
        assert takes(grammar, token_ids) == is_inside, text


def test_schemas_that_refer_to_each_other_for_ever_are_read_all_the_same() -> None:
    loop = {"allOf": [{"$ref": "#/$defs/a"}] * 20}
    schema = {"exclusiveMinimum": 0, "maximum": 0.5, **loop, "$defs": {"a": loop}}
    assert missing_bound(schema, schema) == {"minimum": 1e-9}
    assert missing_bound(loop, schema) == {}


def test_a_range_without_numbers_is_refused(backend: LlguidanceBackend) -> None:
    for bounds in (
        {"exclusiveMinimum": 0, "maximum": 0},
        {"exclusiveMinimum": 0.5, "exclusiveMaximum": 0.5},
        {"minimum": 1, "exclusiveMaximum": 0},
    ):
        with pytest.raises(InvalidParameter):
            compiled(backend, **bounds)
