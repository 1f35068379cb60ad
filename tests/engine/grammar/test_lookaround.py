"""Patterns of schema generators: without look-around they match no more than with it."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.grammar.lookaround import without_lookaround

# As zod 4.1 and pydantic 2.12 write them.
EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+"
    r"[A-Za-z]{2,}$"
)
DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
PLACES = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d{0,2}0*$"
DIGITS = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,4}0*$)\d*\.\d*0*$)"
BOTH = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,3}|(?=[\d.]{1,6}0*$)\d{0,3}\.\d{0,2}0*$)"
FRACTION = r"^(?!^[-+.]*$)[+-]?0*(?:\d{0,0}|(?=[\d.]{1,3}0*$)\d{0,0}\.\d{0,2}0*$)"
EXAMPLES = {
    EMAIL: (["a@b.co", "a.b'c+d-@x-1.example.org"], [".a@b.co", "a..b@c.de", "a'@b.co"]),
    DURATION: (["P3W", "P1Y2M3D", "PT1,5S", "P1DT2H", "PT2H3S"], ["P", "PT", "P1W2D", "P1DT"]),
    DECIMAL: (["0", "-1.50", "+12345678901"], ["", "-", ".", "1.2.3"]),
    PLACES: (["1.25", "-100"], ["1.255", "."]),
    DIGITS: (["123", "1.23", "0.123", "12.3"], ["1234", "12.34"]),
    BOTH: (["123.45", "0.5", "-7"], ["1234.5", "1.234"]),
    FRACTION: (["0.25", "0"], ["1.25", "0.255"]),
}


@pytest.mark.parametrize("pattern", EXAMPLES)
def test_what_the_others_pattern_allows(pattern: str) -> None:
    other = without_lookaround(pattern)
    assert "(?" not in other
    right, wrong = EXAMPLES[pattern]
    for text in right:
        assert re.search(pattern, text), text
        assert re.search(other, text), text
    for text in wrong:
        assert not re.search(other, text), text


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(list(EXAMPLES)), st.data())
def test_it_allows_nothing_else(pattern: str, data: st.DataObject) -> None:
    text = data.draw(st.from_regex(re.compile(without_lookaround(pattern), re.ASCII)))
    assert re.search(pattern, text.removesuffix("\n"))


def test_other_patterns_stay_as_they_are() -> None:
    endless = DIGITS.replace("3", "9" * 9)  # as many alternatives
    for pattern in ("^a$", "(?=look)ahead", r"^(?!\.)x", endless):
        assert without_lookaround(pattern) == pattern
