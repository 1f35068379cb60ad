"""A ledger of what drafts gain and lose, which bounds the total loss.

Costs and acceptance are estimates, made with a clock that other processes disturb. So the actual
outcome is recorded as well, in units of steps without drafts: each step's tokens less its time. A
loss is repaid by a small share of the steps without drafts. Until then nothing is tried: no row is
checked and no clock is read.

Trials are expected to lose. If past gains do not cover them, they are paid from separate savings.
"""

from __future__ import annotations

from math import ceil

_SHARE = 0.005  # share of all steps that may be lost in the long run, and as much again by trials
_GRACE = 1.0  # steps that may be lost before anything is gained
_MAX_BALANCE = 8.0  # most that can be saved up from gains
_RESUME = 0.05  # what a pause saves beyond the loss
_TRIAL = 3.0  # savings needed before the first trial


class LossBudget:
    """For steps with about the same number of rows. All amounts are in steps without drafts."""

    __slots__ = ("_balance", "_pause", "_saved")

    def __init__(self) -> None:
        self._balance = _GRACE
        self._saved = -_TRIAL
        self._pause = 0  # remaining steps without attempts

    @property
    def num_paused(self) -> int:
        """How many more steps are to pass without attempts."""
        return self._pause

    @property
    def is_exhausted(self) -> bool:
        """Whether losses exceed their limit."""
        return self._balance < 0.0

    @property
    def has_gained(self) -> bool:
        """Whether drafts have gained here, which covers some losses."""
        return self._balance > _GRACE

    @property
    def can_afford_trial(self) -> bool:
        """Whether drafts may be made that are expected to lose."""
        return self._saved >= 0.0 or self.has_gained

    def skip_steps(self, num_steps: int = 1) -> None:
        """Note steps planned without attempts; a pause has already saved for its steps."""
        if self._pause:
            self._pause = max(0, self._pause - num_steps)
        else:
            self.save(num_steps)

    def pause(self, num_steps: int = 1) -> None:
        """Pause for ``num_steps`` steps including the current one, or longer to repay a loss."""
        num_steps = max(num_steps, ceil((_RESUME - self._balance) / _SHARE))
        self._pause = num_steps - 1
        self.save(num_steps)

    def save(self, num_steps: int = 1) -> None:
        """Save for ``num_steps`` steps."""
        saved = _SHARE * num_steps
        self._saved = min(0.0, self._saved + saved)
        if self._balance < _GRACE:
            self._balance = min(_GRACE, self._balance + saved)

    def record(self, num_steps: float) -> None:
        """Record a gain, or a loss if negative, in steps."""
        self._balance = min(_MAX_BALANCE, self._balance + num_steps)

    def record_trial(self, num_steps: float) -> None:
        """Record the gain or loss of a trial step."""
        if self.has_gained:
            self.record(num_steps)
        else:
            self._saved = min(0.0, self._saved + num_steps)
