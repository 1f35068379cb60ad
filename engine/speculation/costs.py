"""Costs of steps, learnt for the whole engine by number of rows.

Costs depend on the machine and the model, not on the request, so new requests profit from what
earlier ones have shown. An unknown cost is taken from the nearest number of rows with a known one.
"""

from __future__ import annotations

from engine.speculation.loss_budget import LossBudget

_MIN_SAMPLES = 2  # samples needed before a cost is trusted
_NUM_SAMPLES = 5  # most recent samples kept; the value is their median, or the minimum of fewer
_OUTLIER_FACTOR = 1.5  # a step longer than this multiple of the usual is an outlier
_MAX_AGE_STEPS = 64  # steps after which a cost without new samples is measured again
_MIN_COST_S = 1e-7  # lower bound of any cost, whatever the clock says


def row_bucket(num_rows: int) -> int:
    """Round to three significant bits, so that steps of about equal cost share samples."""
    shift = max(0, num_rows.bit_length() - 3)
    return num_rows >> shift << shift


class MedianEstimate:
    """The median of the newest samples; of the first few, taken with cold caches, the minimum.

    Disturbances only ever make a step slower, and by any amount, so a mean would not be robust.
    """

    __slots__ = ("_samples", "value")

    def __init__(self) -> None:
        self._samples: list[float] = []
        self.value = 0.0

    @property
    def is_known(self) -> bool:
        """Whether there are enough samples."""
        return len(self._samples) >= _MIN_SAMPLES

    def learn(self, sample: float) -> None:
        """Add a sample."""
        samples = self._samples
        samples.append(sample)
        if len(samples) > _NUM_SAMPLES:
            del samples[0]
        is_full = len(samples) == _NUM_SAMPLES
        self.value = sorted(samples)[_NUM_SAMPLES // 2] if is_full else min(samples)


class Costs:
    """The costs of steps with about the same number of rows."""

    __slots__ = ("added", "draft_age", "loss_budget", "plain", "plain_age")

    def __init__(self) -> None:
        self.plain = MedianEstimate()  # seconds of a step without drafts
        self.added = MedianEstimate()  # seconds that each draft adds to it
        self.plain_age = 0  # steps with drafts since the last one without
        self.draft_age = 0  # steps without drafts since the last one with
        self.loss_budget = LossBudget()

    @property
    def must_measure_plain(self) -> bool:
        """Whether too little is known about steps without drafts."""
        return not self.plain.is_known or self.plain_age >= _MAX_AGE_STEPS

    @property
    def may_have_changed(self) -> bool:
        """Whether drafts have not been measured for a long time."""
        return self.draft_age >= _MAX_AGE_STEPS

    def learn(self, num_drafts: int, seconds: float) -> None:
        """Learn from the duration of a step."""
        if num_drafts:
            self.added.learn(max(_MIN_COST_S, (seconds - self.plain.value) / num_drafts))
            self.plain_age += 1
            self.draft_age = 0
        else:
            self.plain.learn(max(_MIN_COST_S, seconds))
            self.plain_age = 0
            self.draft_age += 1

    def gain(self, num_rows: int, num_drafts: int, num_tokens: int, seconds: float) -> float:
        """The gain of a step with drafts, in units of steps without: its tokens less its time."""
        plain_s = self.plain.value
        if self.added.is_known:
            seconds = min(seconds, _OUTLIER_FACTOR * (plain_s + num_drafts * self.added.value))
        return num_tokens / num_rows - seconds / plain_s


class CostTable:
    """The costs for each number of rows seen, and what they have in common."""

    def __init__(self) -> None:
        self._costs: dict[int, Costs] = {}
        self._read = MedianEstimate()  # seconds per token read in bulk

    @property
    def read_s(self) -> float:
        """Seconds per token to read a new text in bulk; 0 until known."""
        return self._read.value if self._read.is_known else 0.0

    def of(self, num_rows: int) -> Costs:
        """The costs of steps with about ``num_rows`` rows."""
        bucket = row_bucket(num_rows)
        found = self._costs.get(bucket)
        if found is None:
            found = self._costs[bucket] = Costs()
        return found

    def added_s(self, num_rows: int) -> float | None:
        """Seconds that a draft adds to a step of ``num_rows`` rows; None if none was ever seen."""
        costs = self.of(num_rows)
        if costs.added.is_known:
            return costs.added.value
        known = [(rows, other.added) for rows, other in self._costs.items() if other.added.is_known]
        if not known:
            return None
        return min(known, key=lambda each: abs(each[0] - num_rows))[1].value

    def learn_read(self, num_rows: int, num_drafts: int, num_read: int, seconds: float) -> None:
        """Learn from the duration of a step that read ``num_read`` tokens in bulk."""
        usual_s = self.of(num_rows).plain.value + num_drafts * (self.added_s(num_rows) or 0.0)
        self._read.learn(max(_MIN_COST_S, (seconds - usual_s) / num_read))
