"""How acceptance changes with a draft's position in its row.

A request's acceptance is one number, learnt from few drafts. But drafts are not all alike. From its
second draft on, a head reads its own output, and each further draft is accepted less often, given
that those before it were. How much less is learnt over all requests.
"""

from __future__ import annotations

_DECAY = 0.995  # weight of the past, per row
_PRIOR_WEIGHT = 8.0  # drafts at a position that outweigh the assumption that all are alike


class PositionFactors:
    """For each position in a row, how many drafts were judged and how many of these accepted.

    Args:
        most: maximum number of drafts in a row.
    """

    def __init__(self, most: int) -> None:
        self._num_verified = [0.0] * most
        self._num_accepted = [0.0] * most
        self._factors = [1.0] * most

    @property
    def factors(self) -> list[float]:
        """For each position, its acceptance relative to the mean over all positions."""
        return self._factors

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a row's drafts; those after the first rejection were not judged."""
        for place, judged in enumerate(self._num_verified):
            self._num_verified[place] = judged * _DECAY + (
                place <= num_accepted and place < num_drafts
            )
            self._num_accepted[place] = self._num_accepted[place] * _DECAY + (place < num_accepted)
        mean = (sum(self._num_accepted) + 1.0) / (sum(self._num_verified) + 2.0)
        self._factors = [
            (kept + _PRIOR_WEIGHT * mean) / ((judged + _PRIOR_WEIGHT) * mean)
            for kept, judged in zip(self._num_accepted, self._num_verified, strict=True)
        ]
