"""A seeded random generator that carries the stage of the corpus."""

import random


class StagedRandom(random.Random):
    """A random generator with a stage from 0 to 4.

    Stage 1 asks more of what is hard, 2 adds phrasings, 3 practises mostly copying and sums, and 4
    closes with plain questions again.
    """

    stage: int = 0

    @classmethod
    def seeded(cls, seed: str, stage: int) -> "StagedRandom":
        """A generator from a text seed; equal arguments give equal draws on every machine."""
        dice = cls(seed)
        dice.stage = stage
        return dice


def stage_of(rng: random.Random) -> int:
    """The stage of the generator; 0 for a plain `random.Random`."""
    return getattr(rng, "stage", 0)
