"""How many drafts pay for themselves: by how often they are kept, and by what a step costs.

With drafts kept at a rate ``a`` each, given that those before them were, a row of ``k`` drafts
yields

    E(k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al. 2023, equation 1), and costs its share of the step plus ``k`` times what a
draft adds to it. The ``k`` with the most tokens a second is taken, none where that is less than
without. Both costs are measured, for each number of rows: with few rows a step costs the reading of
the weights, and drafts are nearly free; with many it costs the multiplications, and they are not.
"""

from __future__ import annotations

from dataclasses import dataclass

_GAIN = 1.03  # what drafting must promise over not drafting: below it is noise
_KEPT = 0.9  # weight of the past, against the newest sample
_MAX_SAMPLE = 3.0  # a sample above this many times the estimate is a hiccup of the machine
_FRESH = 64  # steps after which the cost that is not seen is looked at again
_MAX_FRESH = 1024
_LEAST_S = 1e-7  # of a step, whatever the clock says


class Acceptance:
    """How often drafts are kept: successes over trials, the newest counting most.

    Without trials it goes back to ``prior``, so that what was given up is tried again.
    """

    __slots__ = ("_kept", "_prior", "_successes", "_trials", "_weight")

    def __init__(self, prior: Acceptance | float, weight: float, kept: float) -> None:
        self._prior = prior
        self._weight = weight
        self._kept = kept
        self._successes = 0.0
        self._trials = 0.0

    @property
    def rate(self) -> float:
        """Between 0 and 1, exclusive."""
        prior = self._prior if isinstance(self._prior, float) else self._prior.rate
        return (self._successes + prior * self._weight) / (self._trials + self._weight)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Drafts behind the first that was refused were not judged."""
        trials = min(num_accepted + 1, num_drafts)
        for _ in range(trials):
            self.fade()
        self._successes += num_accepted
        self._trials += trials

    def fade(self) -> None:
        """A token has come without a draft."""
        self._successes *= self._kept
        self._trials *= self._kept


def prior_acceptance() -> Acceptance:
    """Of all requests together; hopeful at first, so that each kind of text is tried."""
    return Acceptance(0.7, weight=8.0, kept=0.995)


@dataclass(slots=True)
class _Costs:
    """Of a step with about so many rows."""

    step_s: float | None = None  # without drafts
    added_s: float = 0.0  # what drafts have added to steps, lately
    num_drafts: float = 0.0  # so many of them
    plain_age: int = 0  # steps since one without drafts
    draft_age: int = 0  # steps since one with
    patience: int = _FRESH  # until drafts are tried again

    @property
    def draft_s(self) -> float | None:
        """What one draft adds; None: never measured."""
        return self.added_s / self.num_drafts if self.num_drafts else None


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

    def begin(self, num_rows: int) -> None:
        """A step of so many rows, each with one token to compute, is about to be planned."""
        if not self._adaptive:
            return
        self._num_rows = num_rows
        self._now = costs = self._costs.setdefault(_bucket(num_rows), _Costs())
        # A cost that was never seen, or not for long, is measured.
        if costs.step_s is None or costs.plain_age >= _FRESH:
            self._forced = 0
        elif costs.draft_s is None or costs.draft_age >= costs.patience:
            self._forced = 1
        else:
            self._forced = None

    def num_drafts(self, acceptance: float) -> int:
        """How many drafts a row of this step should have."""
        if not self._adaptive:
            return self._most
        if self._forced is not None:
            return self._forced
        costs = self._now
        step_s, draft_s = costs.step_s, costs.draft_s
        assert step_s is not None
        assert draft_s is not None
        share_s = step_s / self._num_rows
        best, best_rate, tokens, kept = 0, _GAIN / share_s, 1.0, 1.0
        for count in range(1, self._most + 1):
            kept *= acceptance
            tokens += kept
            rate = tokens / (share_s + count * draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def observe(self, num_rows: int, num_drafts: int, seconds: float) -> None:
        """A step of rows with one known token each took so long, with so many drafts in all."""
        if not self._adaptive:
            return
        seconds = max(seconds, _LEAST_S)
        costs = self._costs.setdefault(_bucket(num_rows), _Costs())
        if not num_drafts:
            costs.step_s = _blend(costs.step_s, seconds)
            costs.plain_age = 0
            costs.draft_age += 1
            return
        costs.plain_age += 1
        if costs.step_s is None:
            return
        usual = costs.step_s + num_drafts * (costs.draft_s or seconds)
        added = max(min(seconds, _MAX_SAMPLE * usual) - costs.step_s, 0.0)
        costs.added_s = costs.added_s * _KEPT + added
        costs.num_drafts = costs.num_drafts * _KEPT + num_drafts
        # Tried in vain, again and again: ever more rarely.
        tried = self._forced == 1 and costs.draft_age >= costs.patience
        costs.patience = min(2 * costs.patience, _MAX_FRESH) if tried else _FRESH
        costs.draft_age = 0


def _blend(old: float | None, new: float) -> float:
    """Down at once, up slowly: what disturbs a step only ever makes it longer."""
    if old is None:
        return new
    if new < old:
        return 0.5 * (old + new)
    return old * _KEPT + min(new, _MAX_SAMPLE * old) * (1.0 - _KEPT)


def _bucket(num_rows: int) -> int:
    """Numbers of rows that cost about the same: three significant bits."""
    shift = max(0, num_rows.bit_length() - 3)
    return num_rows >> shift << shift
