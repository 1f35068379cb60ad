"""Seeded randomness that knows how far the corpus has come."""

import random


class Dice(random.Random):
    """Dice with a stage from 0 to 4.

    1 asks more of what is hard, 2 also knows more phrasings, 3 practises mostly copying and sums,
    4 closes with plain questions again.
    """

    stage: int = 0

    @classmethod
    def seeded(cls, seed: str, stage: int) -> "Dice":
        """Dice from a text seed; equal arguments give equal throws on every machine."""
        dice = cls(seed)
        dice.stage = stage
        return dice


def stage_of(rng: random.Random) -> int:
    """The stage of the dice; 0 for plain `random.Random`."""
    return getattr(rng, "stage", 0)
