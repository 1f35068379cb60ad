"""How many drafts pay off, given how often they are accepted and what steps cost.

If each draft is accepted with probability ``a``, given that those before it were, a row of ``k``
drafts yields

    E(k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al. 2023, equation 1; if the probability depends on the position, the same sum
of products). It costs its share of the step plus ``k`` times what a draft adds to it. The ``k``
with the most tokens per second is chosen, or none if that is fewer than without drafts. Both costs
are measured for each number of rows (``engine/speculation/costs.py``). With few rows a step is
bound by reading the weights, and drafts are nearly free; with many rows it is bound by computation,
and they are not.

To learn the cost of drafts where none are made, some have to be made at a loss now and then. A
ledger records what trials lose, what drafts that were expected to pay lose, and what lookups cost
(``engine/speculation/loss_budget.py``). Nothing is tried while the losses exceed their limit.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.costs import CostTable

_GAIN = 1.03  # speed-up that drafting must promise; less is noise
_TRIAL_STEPS = 3  # consecutive steps of a trial: the first also reads the texts in bulk
_FIRST_STEPS = 5  # first steps of an engine that draft; in some of them programs are recorded
_TRIAL_ROWS = 8  # rows that draft in a trial; the others lose nothing by it
# Host time in seconds, with cold caches: for a step with a row that is due, to skip a row in it, to
# compute a row's number of drafts, and to look drafts up.
_STEP_S, _ROW_S, _CLAIM_S, _LOOKUP_S = 2e-5, 5e-7, 5e-6, 1.5e-5
# Share of a row's time that failed lookups may cost: at first, and after many failures.
_LOOKUP_SHARE, _MIN_LOOKUP_SHARE = 0.01, 0.001
_MAX_BACKOFF_TOKENS = 32
_PAUSE = 32  # steps to pause at least, if even certain drafts would lose, or too much was lost


class Acceptance:
    """How often drafts are accepted: a success rate that weights recent trials most.

    Without new trials it returns to ``prior``, so that drafting is tried again.
    """

    __slots__ = ("_decay", "_idle_decay", "_prior", "_successes", "_trials", "_weight")

    def __init__(self, prior: Acceptance | float, weight: float, decay: float) -> None:
        self._prior = prior
        self._weight = weight
        self._decay = decay
        # Slower, since unseen drafts may well be as before.
        self._idle_decay = 1.0 - (1.0 - decay) / 4
        self._successes = 0.0
        self._trials = 0.0

    @property
    def rate(self) -> float:
        """The acceptance probability, between 0 and 1 exclusive."""
        prior = self._prior.rate if isinstance(self._prior, Acceptance) else self._prior
        return (self._successes + prior * self._weight) / (self._trials + self._weight)

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """Learn from a row's drafts; those after the first rejection were not judged."""
        trials = min(num_accepted + 1, num_drafts)
        kept = self._decay**trials
        self._successes = self._successes * kept + num_accepted
        self._trials = self._trials * kept + trials

    def fade(self, num_tokens: int = 1) -> None:
        """Discount the past for tokens that came without drafts."""
        left = self._idle_decay**num_tokens
        self._successes *= left
        self._trials *= left


def prior_acceptance() -> Acceptance:
    """The acceptance of all requests together; optimistic, so that every kind of text is tried."""
    return Acceptance(0.7, weight=8.0, decay=0.995)


class DraftLengthController:
    """Decides how many drafts each row of a step should have.

    Args:
        max_drafts: maximum number of drafts in a row.
        adaptive: if false, always draft the maximum.
    """

    def __init__(self, max_drafts: int, *, adaptive: bool = True) -> None:
        self._max_drafts = max_drafts
        self._adaptive = adaptive
        self._cost_table = CostTable()
        self._costs = self._cost_table.of(1)  # of the step being planned
        self._num_rows = 1  # in that step
        # Cost of a row without drafts in seconds; 0: the step should have no drafts.
        self._share_s = 0.0
        self._draft_s = 0.0  # what each draft adds to it
        self._num_first = _FIRST_STEPS  # drafting steps still needed before costs are known
        self._trial: tuple[int, int] = (0, 0)  # number of rows being tried; steps left
        self._num_trial_rows: int | None = None  # rows left to try; None: not a trial

    def begin_step(self, num_rows: int) -> bool:
        """Begin planning a step with one token in each row; false if it should have no drafts."""
        if not self._adaptive:
            return True
        self._num_trial_rows, self._share_s = None, 0.0
        self._num_rows = num_rows
        costs = self._costs = self._cost_table.of(num_rows)
        ledger = costs.loss_budget
        if ledger.num_paused:
            ledger.skip_steps()
            return False
        if costs.must_measure_plain:
            return False
        self._share_s = costs.plain.value / num_rows
        draft_s = self._cost_table.added_s(num_rows)
        self._draft_s = self._share_s if draft_s is None else draft_s
        if self._is_trial(num_rows):
            self._num_trial_rows = _TRIAL_ROWS
        elif ledger.is_exhausted or not self.num_drafts(1.0):
            self._share_s = 0.0
            ledger.pause(_PAUSE)
            return False
        ledger.save()
        self.charge(_STEP_S + num_rows * _ROW_S)
        return True

    def _is_trial(self, num_rows: int) -> bool:
        """Whether this step drafts in order to learn the current cost of drafts."""
        if self._num_first and not self._costs.loss_budget.is_exhausted:
            return True
        rows, num_steps = self._trial
        if num_steps and rows == num_rows:
            self._trial = rows, num_steps - 1
            return True
        costs, ledger = self._costs, self._costs.loss_budget
        is_due = costs.may_have_changed or ledger.has_gained  # a cost may have been overestimated
        if not (is_due and ledger.can_afford_trial) or self.num_drafts(1.0):
            return False
        costs.draft_age = 0
        self._trial = num_rows, _TRIAL_STEPS - 1
        return True

    @property
    def num_idle(self) -> int:
        """How many further steps with as many rows should have no drafts."""
        return self._costs.loss_budget.num_paused

    def skip_steps(self, num_steps: int) -> None:
        """Note steps without drafts, with as many rows as the last one begun."""
        self._costs.loss_budget.skip_steps(num_steps)

    @property
    def is_over_budget(self) -> bool:
        """Whether losses exceed their limit, so that no row needs to be checked."""
        return self._adaptive and self._costs.loss_budget.is_exhausted

    def charge(self, seconds: float) -> None:
        """Charge host time spent on drafting to the current step."""
        if self._share_s:
            self._costs.loss_budget.record(-seconds / self._costs.plain.value)

    def num_drafts(
        self, acceptance: float, factors: Sequence[float] = (), read_s: float = 0.0
    ) -> int:
        """How many drafts a row of this step should have.

        Args:
            acceptance: probability that a draft is accepted.
            factors: multipliers of it for each position (``PositionFactors``).
            read_s: cost of reading the text in bulk, in seconds per token still to come.
        """
        if not self._adaptive:
            return self._max_drafts
        if self._num_trial_rows is not None:
            # The maximum: measured with one draft, the draft model's pass would seem more
            # expensive.
            return self._max_drafts if self._num_trial_rows else 0
        share_s, draft_s = self._share_s, self._draft_s
        if not share_s:
            return 0
        best, best_rate, tokens, kept = 0, _GAIN / share_s, 1.0, 1.0
        for count in range(1, self._max_drafts + 1):
            kept *= min(1.0, acceptance * factors[count - 1]) if factors else acceptance
            tokens += kept
            rate = tokens / (share_s + count * draft_s + tokens * read_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def take_drafts(
        self, acceptance: float, factors: Sequence[float] = (), read_s: float = 0.0
    ) -> int:
        """As ``num_drafts``, for a row that is about to draft that many."""
        self.charge(_CLAIM_S)
        count = self.num_drafts(acceptance, factors, read_s)
        if count and self._num_trial_rows is not None:
            self._num_trial_rows -= 1
        return count

    @property
    def is_trial(self) -> bool:
        """Whether the current step drafts in order to learn what drafts cost."""
        return self._num_trial_rows is not None

    def backoff_tokens(self, num_misses: int) -> int:
        """For how many tokens to skip a row after ``num_misses`` consecutive failed lookups."""
        if not self._adaptive:
            return 0
        share = max(_MIN_LOOKUP_SHARE, _LOOKUP_SHARE / 2 ** (num_misses - 1))
        look_s = _CLAIM_S + _LOOKUP_S + _STEP_S / self._num_rows
        return min(_MAX_BACKOFF_TOKENS, int(look_s / (share * self._share_s)))

    @property
    def read_s(self) -> float:
        """Seconds per token to read a text in bulk before the first draft for it."""
        return self._cost_table.read_s if self._adaptive else 0.0

    def observe(
        self,
        num_rows: int,
        num_drafts: int,
        seconds: float,
        *,
        num_tokens: int = 0,
        num_read: int = 0,
        is_trial: bool = False,
    ) -> None:
        """Learn from the duration of a step with one known token in each row.

        Args:
            num_rows: rows in the step.
            num_drafts: drafts that it verified, over all rows.
            seconds: its duration.
            num_tokens: tokens that it yielded.
            num_read: tokens of texts read in bulk for its drafts.
            is_trial: whether it was a trial.
        """
        if not self._adaptive:
            return
        costs = self._cost_table.of(num_rows)
        if num_drafts and costs.plain.is_known:
            gain = costs.gain(num_rows, num_drafts, max(num_tokens, num_rows), seconds)
            if is_trial and self._num_first:
                self._num_first -= 1
            elif is_trial:
                costs.loss_budget.record_trial(gain)
            elif not num_read:  # what is read serves later drafts too
                costs.loss_budget.record(gain)
        if num_read:
            self._cost_table.learn_read(num_rows, num_drafts, num_read, seconds)
        else:
            costs.learn(num_drafts, seconds)
