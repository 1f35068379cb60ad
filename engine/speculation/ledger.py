"""What drafts have gained and lost, so that they never lose much, whatever was expected of them.

Costs and acceptance are estimates, from a clock that other processes disturb. What came of them is
counted too, in steps without drafts of as many rows: each step's tokens less its time. A loss is
paid back by a small share of the steps that do without, and nothing is tried before: no row is
looked at and no clock is read until so many steps have passed.

Trials, which are expected to lose, are paid from savings of their own, where past gains do not pay
for them.
"""

from __future__ import annotations

from math import ceil

_SHARE = 0.005  # of all steps that may be lost in the long run, and as much by trials
_GRACE = 1.0  # steps that may be lost before anything was gained
_MOST = 8.0  # that past gains may pay for
_RESUME = 0.05  # that a pause saves, beyond what was lost
_TRIAL = 3.0  # that are saved before the first trial


class Ledger:
    """Of steps with about so many rows; all amounts are in steps without drafts."""

    __slots__ = ("_balance", "_pause", "_saved")

    def __init__(self) -> None:
        self._balance = _GRACE
        self._saved = -_TRIAL
        self._pause = 0  # steps yet for which nothing is tried

    @property
    def num_paused(self) -> int:
        """Steps yet for which nothing is tried."""
        return self._pause

    @property
    def is_empty(self) -> bool:
        """Whether more has been lost than may be."""
        return self._balance < 0.0

    @property
    def has_gained(self) -> bool:
        """Whether drafts have paid here, so that some that lose are paid for."""
        return self._balance > _GRACE

    @property
    def affords_trial(self) -> bool:
        """Whether drafts may be made that are expected to lose."""
        return self._saved >= 0.0 or self.has_gained

    def pass_by(self, num_steps: int = 1) -> None:
        """So many steps are planned in which nothing is tried; those of a pause were saved as it
        began."""
        if self._pause:
            self._pause = max(0, self._pause - num_steps)
        else:
            self.save(num_steps)

    def pause(self, num_steps: int = 1) -> None:
        """Try nothing for so many steps, or for more where there is a loss to pay back: the step
        that is planned is the first."""
        num_steps = max(num_steps, ceil((_RESUME - self._balance) / _SHARE))
        self._pause = num_steps - 1
        self.save(num_steps)

    def save(self, num_steps: int = 1) -> None:
        """So many steps go by."""
        saved = _SHARE * num_steps
        self._saved = min(0.0, self._saved + saved)
        if self._balance < _GRACE:
            self._balance = min(_GRACE, self._balance + saved)

    def book(self, num_steps: float) -> None:
        """So many were gained, or lost if it is negative."""
        self._balance = min(_MOST, self._balance + num_steps)

    def book_trial(self, num_steps: float) -> None:
        """The same of a step that drafts to learn what drafts cost."""
        if self.has_gained:
            self.book(num_steps)
        else:
            self._saved = min(0.0, self._saved + num_steps)
