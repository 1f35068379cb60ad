"""Seeded randomness that knows how far the corpus has come."""

import random


class Dice(random.Random):
    """`focused` dice draw smaller sums and ask more for what is hard to learn."""

    focused: bool = False

    @classmethod
    def seeded(cls, seed: str, focused: bool) -> "Dice":
        """Dice from a text seed; equal arguments give equal throws on every machine."""
        dice = cls(seed)
        dice.focused = focused
        return dice


def is_focused(rng: random.Random) -> bool:
    """False for plain `random.Random`."""
    return getattr(rng, "focused", False)
