"""What steps cost, learnt from the steps themselves: by their number of rows, for the whole engine.

Costs belong to the machine and the model, not to a request, so the first request of a kind gains
what earlier ones have shown. One that nobody has seen yet is taken from the nearest number of rows
that has one.
"""

from __future__ import annotations

_ENOUGH = 2  # samples of a cost, before it is believed
_KEPT = 0.8  # weight of the past, against the newest sample
_MAX_SAMPLE = 1.5  # one above this many times what is usual is a hiccup of the machine
_FRESH = 64  # steps after which a cost that is not seen is looked at again
_LEAST_S = 1e-7  # of anything, whatever the clock says


class Mean:
    """Of samples, the newest counting most.

    What disturbs a clock makes things slower, never faster: of the first samples, which are made
    with cold caches too, the least is taken.
    """

    __slots__ = ("_num_samples", "value")

    def __init__(self) -> None:
        self._num_samples = 0
        self.value = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it has been seen often enough."""
        return self._num_samples >= _ENOUGH

    def learn(self, sample: float) -> None:
        """Take a sample in."""
        if self._num_samples == 0:
            self.value = sample
        elif not self.is_known:
            self.value = min(self.value, sample)
        else:
            self.value += (1.0 - _KEPT) * (sample - self.value)
        self._num_samples += 1


class Costs:
    """Of steps with about so many rows."""

    __slots__ = ("added", "draft_age", "plain", "plain_age")

    def __init__(self) -> None:
        self.plain = Mean()  # seconds of a step without drafts
        self.added = Mean()  # seconds that each draft adds to it
        self.plain_age = 0  # steps since one without drafts
        self.draft_age = 0  # steps since one with

    @property
    def must_measure_plain(self) -> bool:
        """Whether too little is known of a step without drafts."""
        return not self.plain.is_known or self.plain_age >= _FRESH

    @property
    def may_have_changed(self) -> bool:
        """Whether it is long since drafts were seen."""
        return self.draft_age >= _FRESH

    def learn(self, num_drafts: int, seconds: float) -> None:
        """A step took so long."""
        if self.plain.is_known:
            added_s = self.added.value if self.added.is_known else seconds
            usual_s = self.plain.value + num_drafts * added_s
            seconds = min(seconds, _MAX_SAMPLE * usual_s)
        if num_drafts:
            self.added.learn(max(_LEAST_S, (seconds - self.plain.value) / num_drafts))
            self.plain_age += 1
            self.draft_age = 0
        else:
            self.plain.learn(max(_LEAST_S, seconds))
            self.plain_age = 0
            self.draft_age += 1


class CostBook:
    """The costs of each number of rows that has come, and what all of them have in common."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self._read = Mean()  # seconds a token that is read before the first guess for a text

    @property
    def read_s(self) -> float:
        """Seconds a token of a text that nobody has guessed for yet; 0 before it is known."""
        return self._read.value if self._read.is_known else 0.0

    def of(self, num_rows: int) -> Costs:
        """Of steps with so many rows."""
        bucket = _bucket(num_rows)
        found = self._costs.get(bucket)
        if found is None:
            found = self._costs[bucket] = Costs()
        return found

    def added_s(self, num_rows: int) -> float | None:
        """Seconds that a draft adds to a step of so many rows; None: no draft was ever seen."""
        costs = self.of(num_rows)
        if costs.added.is_known:
            return costs.added.value
        known = [(rows, other.added) for rows, other in self._costs.items() if other.added.is_known]
        if not known:
            return None
        return min(known, key=lambda each: abs(each[0] - num_rows))[1].value

    def learn_read(self, num_rows: int, num_drafts: int, num_read: int, seconds: float) -> None:
        """A step of so many rows took so long, before whose drafts so many tokens were read."""
        usual_s = self.of(num_rows).plain.value + num_drafts * (self.added_s(num_rows) or 0.0)
        self._read.learn(max(_LEAST_S, (seconds - usual_s) / num_read))


def _bucket(num_rows: int) -> int:
    """Numbers of rows that cost about the same: three significant bits."""
    shift = max(0, num_rows.bit_length() - 3)
    return num_rows >> shift << shift
