"""What steps cost, learnt from the steps themselves: by their number of rows, for the whole engine.

Costs belong to the machine and the model, not to a request, so the first request of a kind gains
what earlier ones have shown. One that nobody has seen yet is taken from the nearest number of rows
that has one.
"""

from __future__ import annotations

from engine.speculation.ledger import Ledger

_ENOUGH = 2  # samples of a cost, before it is believed
_REMEMBERED = 5  # samples, the newest: the one in the middle is believed, of fewer the least
_MAX_SAMPLE = 1.5  # a step above this many times what is usual is a hiccup of the machine
_FRESH = 64  # steps after which a cost that is not seen is looked at again
_LEAST_S = 1e-7  # of anything, whatever the clock says


def alike(num_rows: int) -> int:
    """Three significant bits of a number of rows: those that cost about the same share them."""
    shift = max(0, num_rows.bit_length() - 3)
    return num_rows >> shift << shift


class Usual:
    """Of the newest samples the one in the middle; of the first, made with cold caches, the least.

    What disturbs a clock makes things slower, never faster, and by any amount: no mean stands that.
    """

    __slots__ = ("_samples", "value")

    def __init__(self) -> None:
        self._samples: list[float] = []
        self.value = 0.0

    @property
    def is_known(self) -> bool:
        """Whether it has been seen often enough."""
        return len(self._samples) >= _ENOUGH

    def learn(self, sample: float) -> None:
        """Take a sample in."""
        samples = self._samples
        samples.append(sample)
        if len(samples) > _REMEMBERED:
            del samples[0]
        is_full = len(samples) == _REMEMBERED
        self.value = sorted(samples)[_REMEMBERED // 2] if is_full else min(samples)


class Costs:
    """Of steps with about so many rows."""

    __slots__ = ("added", "draft_age", "ledger", "plain", "plain_age")

    def __init__(self) -> None:
        self.plain = Usual()  # seconds of a step without drafts
        self.added = Usual()  # seconds that each draft adds to it
        self.plain_age = 0  # steps with drafts since one without
        self.draft_age = 0  # steps without since one with
        self.ledger = Ledger()

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
        if num_drafts:
            self.added.learn(max(_LEAST_S, (seconds - self.plain.value) / num_drafts))
            self.plain_age += 1
            self.draft_age = 0
        else:
            self.plain.learn(max(_LEAST_S, seconds))
            self.plain_age = 0
            self.draft_age += 1

    def gain(self, num_rows: int, num_drafts: int, num_tokens: int, seconds: float) -> float:
        """What a step with drafts has gained, in steps without: its tokens less its time."""
        plain_s = self.plain.value
        if self.added.is_known:
            seconds = min(seconds, _MAX_SAMPLE * (plain_s + num_drafts * self.added.value))
        return num_tokens / num_rows - seconds / plain_s


class CostBook:
    """The costs of each number of rows that has come, and what all of them have in common."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self._read = Usual()  # seconds a token that is read before the first guess for a text

    @property
    def read_s(self) -> float:
        """Seconds a token of a text that nobody has guessed for yet; 0 before it is known."""
        return self._read.value if self._read.is_known else 0.0

    def of(self, num_rows: int) -> Costs:
        """Of steps with so many rows."""
        bucket = alike(num_rows)
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
