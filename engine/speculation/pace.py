"""How many drafts pay for themselves: by how often they are kept, and by what a step costs.

With drafts kept at a rate ``a`` each, given that those before them were, a row of ``k`` drafts
yields

    E(k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al. 2023, equation 1; where a draft's rate depends on its place in the row, the
same sum of products), and costs its share of the step plus ``k`` times what a draft adds to it. The
``k`` with the most tokens a second is taken, none where that is less than without. Both costs are
measured, for each number of rows: with few rows a step costs the reading of the weights, and drafts
are nearly free; with many it costs the multiplications, and they are not.
"""

from __future__ import annotations

from collections.abc import Sequence

_GAIN = 1.03  # what drafting must promise over not drafting: below it is noise
_SAMPLES = 4  # of a cost, before it is believed
_KEPT_PLAIN, _KEPT_ADDED = 0.8, 0.9  # weights of the past, against the newest sample
_MAX_SAMPLE = 3.0  # one above this many times the estimate is a hiccup of the machine
_COLD = 8  # steps without drafts, after which those that draft first do more than their share
_DOUBT = 0.2  # weight of what was learnt before such a pause
_PROBES = 3  # steps that draft to learn what it costs by now
_PROBED_ROWS = 8  # of a step that drafts to learn: the others lose nothing by it
_FRESH = 64  # steps after which the cost that is not seen is looked at again
_MAX_FRESH = 1024
_LEAST_S = 1e-7  # of a step, whatever the clock says


class Acceptance:
    """How often drafts are kept: successes over trials, the newest counting most.

    Without trials it goes back to ``prior``, so that what was given up is tried again.
    """

    __slots__ = ("_faded", "_kept", "_prior", "_successes", "_trials", "_weight")

    def __init__(self, prior: Acceptance | float, weight: float, kept: float) -> None:
        self._prior = prior
        self._weight = weight
        self._kept = kept
        self._faded = 1.0 - (1.0 - kept) / 4  # what was not seen may well be as it was
        self._successes = 0.0
        self._trials = 0.0

    @property
    def rate(self) -> float:
        """Between 0 and 1, exclusive."""
        prior = self._prior.rate if isinstance(self._prior, Acceptance) else self._prior
        return (self._successes + prior * self._weight) / (self._trials + self._weight)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Drafts behind the first that was refused were not judged."""
        trials = min(num_accepted + 1, num_drafts)
        kept = self._kept**trials
        self._successes = self._successes * kept + num_accepted
        self._trials = self._trials * kept + trials

    def fade(self) -> None:
        """A token has come without a draft."""
        self._successes *= self._faded
        self._trials *= self._faded


def prior_acceptance() -> Acceptance:
    """Of all requests together; hopeful at first, so that each kind of text is tried."""
    return Acceptance(0.7, weight=8.0, kept=0.995)


class _Mean:
    """Of samples with weights, the newest counting most; the very first is cold and does not."""

    __slots__ = ("_kept", "_total", "_weight", "num_samples")

    def __init__(self, kept: float) -> None:
        self._kept = kept
        self._total = 0.0
        self._weight = 0.0
        self.num_samples = 0

    @property
    def is_known(self) -> bool:
        """Whether it has been seen often enough."""
        return self.num_samples >= _SAMPLES

    @property
    def value(self) -> float:
        """The mean; 0 before there is one."""
        return self._total / self._weight if self._weight else 0.0

    def learn(self, sample: float, weight: float = 1.0) -> None:
        """Take a sample in."""
        self.num_samples += 1
        if self.num_samples > 1:
            self._total = self._total * self._kept + sample * weight
            self._weight = self._weight * self._kept + weight

    def doubt(self) -> None:
        """It was long ago: what comes now counts more."""
        self._total *= _DOUBT
        self._weight *= _DOUBT


class _Costs:
    """Of steps with about so many rows."""

    __slots__ = ("_added", "_plain", "draft_age", "num_probes", "patience", "plain_age")

    def __init__(self) -> None:
        self._plain = _Mean(_KEPT_PLAIN)  # seconds of a step without drafts
        self._added = _Mean(_KEPT_ADDED)  # what one draft added, weighted by their number
        self.plain_age = 0  # steps since one without drafts
        self.draft_age = 0  # steps since one with
        self.patience = _FRESH  # until drafts are tried again
        self.num_probes = 0  # steps for which they still are

    @property
    def plain_s(self) -> float:
        """Seconds of a step without drafts."""
        return self._plain.value

    @property
    def draft_s(self) -> float:
        """Seconds that a draft adds."""
        return max(self._added.value, _LEAST_S)

    @property
    def must_measure_plain(self) -> bool:
        """Whether too little is known of a step without drafts."""
        return not self._plain.is_known or self.plain_age >= _FRESH

    def must_measure_drafts(self) -> bool:
        """Whether too little is known of what drafts add; after long, it is looked at again."""
        if self.draft_age >= self.patience and not self.num_probes:
            self.num_probes = _PROBES
            self.patience = min(2 * self.patience, _MAX_FRESH)  # in vain so far: ever more rarely
        return not self._added.is_known or self.num_probes > 0

    def learn(self, num_drafts: int, seconds: float) -> None:
        """A step took so long."""
        if self._plain.is_known:  # a hiccup of the machine says nothing
            usual = self.plain_s + num_drafts * (self.draft_s if self._added.is_known else seconds)
            seconds = min(seconds, _MAX_SAMPLE * usual)
        if num_drafts:
            if self.draft_age < _COLD:
                self._added.learn((seconds - self.plain_s) / num_drafts, num_drafts)
            else:
                self._added.doubt()
            if self.num_probes:
                self.num_probes -= 1
            else:
                self.patience = _FRESH
            self.plain_age += 1
            self.draft_age = 0
        else:
            self._plain.learn(seconds)
            self.plain_age = 0
            self.draft_age += 1


class Pace:
    """Decides for each step and row.

    Args:
        most: drafts of a row.
        adaptive: False takes the most at any time.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self._most = most
        self._adaptive = adaptive
        self._costs: dict[int, _Costs] = {}
        self._now = _Costs()
        self._num_rows = 1
        self._forced: int | None = None
        self._num_unprobed = 0  # rows of this step that may still be made to draft

    def begin(self, num_rows: int) -> None:
        """A step of so many rows, each with one token to compute, is about to be planned."""
        if not self._adaptive:
            return
        self._num_rows = num_rows
        self._now = costs = self._costs.setdefault(_bucket(num_rows), _Costs())
        # A cost that was never seen, or not for long, is measured.
        if costs.must_measure_plain:
            self._forced, self._num_unprobed = 0, 0
        elif costs.must_measure_drafts():
            # The most: of one alone the draft model's pass would seem to cost more than it does.
            self._forced, self._num_unprobed = self._most, _PROBED_ROWS
        else:
            self._forced = None

    def num_drafts(self, acceptance: float, factors: Sequence[float] = ()) -> int:
        """How many drafts a row of this step should have; ``factors``: by what its acceptance at
        each place differs (``Positions``)."""
        if not self._adaptive:
            return self._most
        if self._forced is not None:
            return self._forced if self._num_unprobed else 0
        share_s, draft_s = self._now.plain_s / self._num_rows, self._now.draft_s
        best, best_rate, tokens, kept = 0, _GAIN / share_s, 1.0, 1.0
        for count in range(1, self._most + 1):
            kept *= min(1.0, acceptance * factors[count - 1]) if factors else acceptance
            tokens += kept
            rate = tokens / (share_s + count * draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def claim(self, acceptance: float, factors: Sequence[float] = ()) -> int:
        """The same for a row that is about to draft them."""
        count = self.num_drafts(acceptance, factors)
        if count and self._forced is not None:
            self._num_unprobed -= 1
        return count

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step of rows with one known token each took so long, with so many drafts in all."""
        if not self._adaptive:
            return
        costs = self._costs.setdefault(_bucket(num_rows), _Costs())
        costs.learn(num_drafts, max(seconds, _LEAST_S))


def _bucket(num_rows: int) -> int:
    """Numbers of rows that cost about the same: three significant bits."""
    shift = max(0, num_rows.bit_length() - 3)
    return num_rows >> shift << shift
