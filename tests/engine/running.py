"""Runs engines until some requests end, and proposers with occasional wrong drafts."""

from __future__ import annotations

import random
from dataclasses import dataclass

from engine.core import EngineCore
from engine.types import Request


def texts(core: EngineCore, *requests: Request) -> dict[str, list[int]]:
    """The output tokens of each request; checks that no block is held and the books balance."""
    for each in requests:
        core.add(each)
    found: dict[str, list[int]] = {}
    while core.has_work:
        output = core.step()
        assert not output.errors
        for row_id, tokens in zip(output.ids, output.token_ids, strict=True):
            found.setdefault(row_id, []).extend(tokens)
    assert core.check() == []
    return found


def prompts_that_share(seed: int) -> list[list[int]]:
    """Prompts: one that repeats itself, two with a common prefix, and others of several lengths."""
    rng = random.Random(seed)
    stem = [rng.randrange(3, 160) for _ in range(18)]
    return [
        [5, 6, 7, 8, 9, 10] * 4,
        [*stem, 11, 12],
        [*stem, 40],
        *([rng.randrange(3, 160) for _ in range(n)] for n in (1, 5, 33)),
    ]


@dataclass
class Guesser:
    """Knows the text of one request and drafts some of what follows, mostly correctly."""

    text: list[int]
    rng: random.Random
    wrong: range  # ids of wrong drafts
    right: float = 0.8  # share of correct drafts

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        start = len(token_ids)
        known = self.text[start : start + self.rng.randint(0, most)]
        return tuple(
            token if self.rng.random() < self.right else self.rng.choice(self.wrong)
            for token in known
        )

    def lookup_cost_s(self, num_unseen: int) -> float:
        return 0.0
