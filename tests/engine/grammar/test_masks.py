"""Token bitmasks: what a row may choose, on the host and as mirrored on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.grammar.backend import CompiledGrammar, GrammarFailed
from engine.sampling.masks import MaskLines
from engine.types import Grammar, Request, SamplingParams

VOCAB, EOS, PROMPT = 70, 5, (1, 2, 3)
ANY = Grammar("json_object")


class Script:
    """A grammar of one text: each token in turn, then the end."""

    num_bytes = 1
    batch_matcher = None

    def __init__(self, *text: int, breaks_at: int = 99) -> None:
        self._text = text
        self._breaks_at = breaks_at
        self._at = 0

    def matcher(self) -> Script:
        return Script(*self._text, breaks_at=self._breaks_at)

    def accept(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if token != self._text[self._at]:
                raise GrammarFailed("off the script")
            self._at += 1

    def fill(self, mask: np.ndarray) -> None:
        if self._at >= self._breaks_at:
            raise GrammarFailed("the script broke")
        token = EOS if self.is_complete else self._text[self._at]
        mask[:] = 0
        mask[token // 32] = np.array(1 << token % 32, np.uint32).view(np.int32)

    def rollback(self, num_tokens: int) -> None:
        self._at -= num_tokens

    @property
    def is_complete(self) -> bool:
        return self._at == len(self._text)


class Choice(Script):
    """A grammar in which some tokens are always allowed."""

    def __init__(self, token_ids: set[int]) -> None:
        super().__init__()
        self._token_ids = token_ids

    def matcher(self) -> Script:
        return self

    def accept(self, token_ids: Sequence[int]) -> None:
        if not self._token_ids.issuperset(token_ids):
            raise GrammarFailed("none of these")

    def fill(self, mask: np.ndarray) -> None:
        mask[:] = 0
        for token in self._token_ids:
            mask[token // 32] |= np.array(1 << token % 32, np.uint32).view(np.int32)


class Rows:
    """Rows of a runner, one step per call; ``mirrored`` as on a device with its own memory."""

    def __init__(self, mirrored: bool = False) -> None:
        self.lines = MaskLines(VOCAB, (EOS,), torch.device("cpu"))
        if mirrored:
            self.lines._device = torch.device("meta")
        self.line_of: dict[int, int] = {}

    def put(
        self,
        slot: int,
        output: Sequence[int] = (),
        grammar: CompiledGrammar | None = None,
        **sampling: object,
    ) -> Rows:
        params = SamplingParams(grammar=ANY if grammar else None, **sampling)
        request = Request(id=str(slot), prompt_token_ids=PROMPT, sampling=params)
        self.line_of[slot] = self.lines.allocate(slot, request, output, grammar)
        return self

    def allowed(self, slot: int, output: Sequence[int] = ()) -> set[int]:
        """The tokens allowed for the slot, given this output of its last row."""
        tokens = (PROMPT + tuple(output))[-1:]
        row = (slot, len(PROMPT) + len(output) - 1, tokens)
        failures, _ = self.lines.update([row], self.send)
        assert not failures, failures
        return self.read(slot)

    def read(self, slot: int) -> set[int]:
        words = self.lines.lines[self.line_of[slot]].numpy().view(np.uint32)
        return {token for token in range(VOCAB) if words[token // 32] >> token % 32 & 1}

    @staticmethod
    def send(arrays: Sequence[np.ndarray]) -> list[torch.Tensor]:
        assert all(array.dtype == np.int32 for array in arrays)
        return [torch.from_numpy(array.copy()) for array in arrays]


EVERY = set(range(VOCAB))


@pytest.fixture(params=[False, True], ids=["shared", "mirrored"])
def rows(request: pytest.FixtureRequest) -> Rows:
    return Rows(request.param)


def test_allowed_tokens_are_all_that_come(rows: Rows):
    rows.put(0, allowed_token_ids=(0, 31, 32, 69))
    assert rows.allowed(0) == {0, 31, 32, 69}
    assert rows.allowed(0, [31]) == {0, 31, 32, 69}


def test_a_bad_word_is_not_completed(rows: Rows):
    rows.put(0, bad_token_ids=((7,), (8, 9), (8, 8, 10)))
    assert rows.allowed(0) == EVERY - {7}
    assert rows.allowed(0, [8]) == EVERY - {7, 9}
    assert rows.allowed(0, [8, 8]) == EVERY - {7, 9, 10}
    assert rows.allowed(0, [8, 8, 11]) == EVERY - {7}


def test_a_grammar_is_followed(rows: Rows):
    rows.put(0, grammar=Script(40, 41))
    assert rows.allowed(0) == {40}
    assert rows.allowed(0, [40]) == {41}
    assert rows.allowed(0, [40, 41]) == {EOS}


def test_a_row_that_comes_back_goes_on_where_it_was(rows: Rows):
    rows.put(0, [40], grammar=Script(40, 41))
    assert rows.allowed(0, [40]) == {41}


def test_rows_of_one_grammar_go_their_own_ways(rows: Rows):
    script = Script(40, 41)
    for slot in range(9):
        rows.put(slot, [40][: slot % 2], grammar=script)
    assert [rows.allowed(slot, [40][: slot % 2]) for slot in range(9)] == [
        {41} if slot % 2 else {40} for slot in range(9)
    ]


def test_the_end_is_put_off_while_there_is_something_else(rows: Rows):
    rows.put(0, min_tokens=3, allowed_token_ids=(6, EOS))
    assert rows.allowed(0) == {6}
    assert rows.allowed(0, [6, 6]) == {6}
    assert rows.allowed(0, [6, 6, 6]) == {6, EOS}
    rows.put(1, grammar=Script(), min_tokens=3, ignore_eos=True)
    assert rows.allowed(1) == {EOS}


def test_ends_are_put_off_where_a_grammar_lets_them_come(rows: Rows):
    rows.put(0, grammar=Choice({40, EOS, 69}), ignore_eos=True)
    assert rows.allowed(0) == {40, 69}
    rows.put(1, grammar=Choice({40, EOS, 69}), min_tokens=2, stop_token_ids=(69,))
    assert rows.allowed(1) == {40}
    assert rows.allowed(1, [40, 40]) == {40, EOS, 69}


def test_many_tokens_are_banned_as_few_are(rows: Rows):
    rows.put(0, bad_token_ids=tuple((token,) for token in range(0, VOCAB, 2)))
    assert rows.allowed(0) == {token for token in EVERY if token % 2}


def test_a_grammar_wins_over_all_other_wishes(rows: Rows):
    rows.put(0, grammar=Script(40), allowed_token_ids=(50,), bad_token_ids=((40,),))
    assert rows.allowed(0) == {40}


def test_a_row_that_fails_harms_no_other(rows: Rows):
    rows.put(0, grammar=Script(40, 41, breaks_at=1)).put(1, grammar=Script(50, 51))
    step = [(0, 3, [40]), (1, 3, [50])]
    failures, _ = rows.lines.update(step, rows.send)
    assert list(failures) == [0]
    assert failures[0].code == "grammar_timeout"
    assert rows.read(1) == {51}


def test_lines_are_used_again(rows: Rows):
    for round_ in range(50):
        for slot in range(6):
            rows.put(slot, allowed_token_ids=(round_, slot))
            assert rows.allowed(slot) == {round_, slot}
        for slot in range(6):
            rows.lines.free(slot)
    assert len(rows.lines) == 0
    assert rows.lines.lines.shape[0] <= 8
