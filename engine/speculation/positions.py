"""How acceptance changes along a row's drafts.

A request's acceptance is one number, learnt from few drafts. But drafts are not all alike: a head
reads what it made itself from its second guess on, and each further one is kept less often, given
that those before it were. How much less is learnt over all requests together.
"""

from __future__ import annotations

_KEPT = 0.995  # weight of the past, a row
_DOUBT = 8.0  # drafts at a place, before it is believed to differ from the others


class Positions:
    """Of drafts by their place in a row: how many were judged, and how many of these kept.

    Args:
        most: drafts of a row.
    """

    def __init__(self, most: int) -> None:
        self._judged = [0.0] * most
        self._kept = [0.0] * most
        self._factors = [1.0] * most

    @property
    def factors(self) -> list[float]:
        """Of each place: its acceptance over that of all places together."""
        return self._factors

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """A row's drafts; those behind the first that was refused were not judged."""
        for place, judged in enumerate(self._judged):
            self._judged[place] = judged * _KEPT + (place <= num_accepted and place < num_drafts)
            self._kept[place] = self._kept[place] * _KEPT + (place < num_accepted)
        mean = (sum(self._kept) + 1.0) / (sum(self._judged) + 2.0)
        self._factors = [
            (kept + _DOUBT * mean) / ((judged + _DOUBT) * mean)
            for kept, judged in zip(self._kept, self._judged, strict=True)
        ]
