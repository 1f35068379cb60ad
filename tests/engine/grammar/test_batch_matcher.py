"""Texts that are advanced together come out as each would alone."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest

from engine.grammar import llguidance_backend
from engine.grammar.llguidance_backend import (
    LlguidanceBackend,
    LlguidanceBatchMatcher,
    LlguidanceGrammar,
    LlguidanceMatcher,
)
from engine.types import Grammar

PEOPLE = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 6}, "age": {"type": "integer"}},
        "required": ["name"],
        "additionalProperties": False,
    },
}
GRAMMARS = (
    Grammar("json_schema", json.dumps(PEOPLE)),
    Grammar("json_object"),
    Grammar("regex", "(yes|no|[0-9]{1,4}),?"),
)


@pytest.fixture
def grammars(backend: LlguidanceBackend) -> list[LlguidanceGrammar]:
    return [backend.compile(grammar) for grammar in GRAMMARS]


def choices(line: np.ndarray) -> np.ndarray:
    return np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little"))


def drawn(matcher: LlguidanceMatcher, mask: np.ndarray, chance: random.Random) -> list[int]:
    """Zero to two tokens by which a text may continue; the matcher's state is unchanged."""
    token_ids: list[int] = []
    while len(token_ids) < chance.choice((0, 1, 1, 2)) and not matcher.is_complete:
        token_ids.append(int(chance.choice(choices(mask))))
        matcher.accept(token_ids[-1:])
        matcher.fill(mask)
    matcher.rollback(len(token_ids))
    return token_ids


def test_each_goes_as_it_would_alone(
    backend: LlguidanceBackend, grammars: list[LlguidanceGrammar]
) -> None:
    chance = random.Random(3)
    batch_matcher = LlguidanceBatchMatcher([])
    num_rows, words = 12, -(-backend.vocab_size // 32)
    together = [grammars[row % 3].matcher() for row in range(num_rows)]
    alone = [grammars[row % 3].matcher() for row in range(num_rows)]
    lines = chance.sample(range(40), num_rows)
    masks, expected = np.zeros((40, words), np.int32), np.zeros(words, np.int32)
    told: list[list[int]] = [[] for _ in range(num_rows)]
    for _ in range(25):
        rows = [*zip(together, told, lines, [False] * num_rows, strict=True)]
        assert batch_matcher.advance_and_fill(rows, masks) == ({}, [])
        for row in range(num_rows):
            if told[row]:
                alone[row].accept(told[row])
            alone[row].fill(expected)
            assert (masks[lines[row]] == expected).all()
            told[row] = drawn(alone[row], expected, chance)


def test_who_leaves_the_grammar_is_told_and_the_others_go_on(
    backend: LlguidanceBackend, grammars: list[LlguidanceGrammar]
) -> None:
    batch_matcher = LlguidanceBatchMatcher([])
    matchers = [grammars[0].matcher() for _ in range(3)]
    masks = np.zeros((3, -(-backend.vocab_size // 32)), np.int32)
    batch_matcher.advance_and_fill([(m, [], line, False) for line, m in enumerate(matchers)], masks)
    good = int(choices(masks[0])[0])
    bad = next(id for id in range(backend.vocab_size) if id not in choices(masks[0]))
    told = [[good], [bad], [good, bad]]
    told_rows = [(m, told[line], line, False) for line, m in enumerate(matchers)]
    failures, _ = batch_matcher.advance_and_fill(told_rows, masks)
    assert set(failures) == {1, 2}
    assert "cannot be followed" in str(failures[1])
    alone = grammars[0].matcher()
    alone.accept([good])
    expected = np.zeros_like(masks[0])
    alone.fill(expected)
    assert (masks[0] == expected).all()


def test_what_takes_long_is_paid_for_by_who_took_it(
    backend: LlguidanceBackend,
    grammars: list[LlguidanceGrammar],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch_matcher = LlguidanceBatchMatcher([])
    matchers = [grammars[0].matcher() for _ in range(3)]
    masks = np.zeros((3, -(-backend.vocab_size // 32)), np.int32)
    rows = [(m, [], line, False) for line, m in enumerate(matchers)]
    batch_matcher.advance_and_fill(rows, masks)
    paid = [matcher._time_left_s for matcher in matchers]
    batch_matcher.advance_and_fill(rows, masks)
    assert [matcher._time_left_s for matcher in matchers] == paid  # groups pay nothing
    monkeypatch.setattr(llguidance_backend, "_TIME_BUDGET_PER_TOKEN_S", 0.0)
    monkeypatch.setattr(llguidance_backend, "_TIME_BUDGET_PER_ROW_S", 0.0)
    batch_matcher.advance_and_fill(rows, masks)  # found to be slow: they pay from now on
    batch_matcher.advance_and_fill(rows, masks)
    assert all(m._time_left_s < before for m, before in zip(matchers, paid, strict=True))
