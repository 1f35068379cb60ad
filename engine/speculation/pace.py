"""How many drafts pay for themselves: by how often they are kept, and by what a step costs.

With drafts kept at a rate ``a`` each, given that those before them were, a row of ``k`` drafts
yields

    E(k) = 1 + a + ... + a^k = (1 - a^(k+1)) / (1 - a)

tokens (Leviathan et al. 2023, equation 1; where a draft's rate depends on its place in the row, the
same sum of products), and costs its share of the step plus ``k`` times what a draft adds to it. The
``k`` with the most tokens a second is taken, none where that is less than without. Both costs are
measured, for each number of rows (``engine/speculation/costs.py``): with few rows a step costs the
reading of the weights, and drafts are nearly free; with many it costs the multiplications, and they
are not.

To learn what drafts cost where there are none, some must be made in vain now and then. What that
loses, and drafts that were thought to pay, and looking for some, is kept account of
(``engine/speculation/ledger.py``): nothing is tried while more has been lost than may be.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.costs import CostBook

_GAIN = 1.03  # what drafting must promise over not drafting: below it is noise
_TRIAL_STEPS = 3  # in a row that draft to learn what it costs: the first reads up on the texts
_FIRST_STEPS = 5  # of an engine, that draft: programs are recorded in some of them
_TRIAL_ROWS = 8  # of such a step: the others lose nothing by it
# Seconds of the host, which comes to all of this with cold caches: for a step in which some row is
# due, to pass a row by in it, to ask for a row's number, and to look for something to guess by.
_STEP_S, _ROW_S, _CLAIM_S, _LOOK_S = 2e-5, 5e-7, 5e-6, 1.5e-5
# Of a row's time that looking in vain may cost: at first, and where it always was in vain.
_LOOK_SHARE, _LEAST_LOOK_SHARE = 0.01, 0.001
_MAX_REST = 32
_PAUSE = 32  # steps at least, where not even sure drafts would pay, or too much was lost


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

    def fade(self, num_tokens: int = 1) -> None:
        """So many tokens have come without a draft."""
        left = self._faded**num_tokens
        self._successes *= left
        self._trials *= left


def prior_acceptance() -> Acceptance:
    """Of all requests together; hopeful at first, so that each kind of text is tried."""
    return Acceptance(0.7, weight=8.0, kept=0.995)


class Pace:
    """Decides for each step and row.

    Args:
        most: drafts of a row.
        adaptive: False takes the most at any time.
    """

    def __init__(self, most: int, *, adaptive: bool = True) -> None:
        self._most = most
        self._adaptive = adaptive
        self._book = CostBook()
        self._costs = self._book.of(1)  # of the step that is planned
        self._num_rows = 1  # of it
        # Seconds of one of its rows, without drafts; 0: it should have none.
        self._share_s = 0.0
        self._draft_s = 0.0  # that each draft adds to it
        self._num_first = _FIRST_STEPS  # that must still have drafts until their cost is known
        self._trial: tuple[int, int] = (0, 0)  # rows for which steps are tried; steps left
        self._num_trial_rows: int | None = None  # that this step may still try; None: it is none

    def begin(self, num_rows: int) -> bool:
        """A step of so many rows, each with one token to compute, is about to be planned; False
        where it should have no drafts."""
        if not self._adaptive:
            return True
        self._num_trial_rows, self._share_s = None, 0.0
        self._num_rows = num_rows
        costs = self._costs = self._book.of(num_rows)
        ledger = costs.ledger
        if ledger.num_paused:
            ledger.pass_by()
            return False
        if costs.must_measure_plain:
            return False
        self._share_s = costs.plain.value / num_rows
        draft_s = self._book.added_s(num_rows)
        self._draft_s = self._share_s if draft_s is None else draft_s
        if self._is_trial(num_rows):
            self._num_trial_rows = _TRIAL_ROWS
        elif ledger.is_empty or not self.num_drafts(1.0):
            self._share_s = 0.0
            ledger.pause(_PAUSE)
            return False
        ledger.save()
        self.charge(_STEP_S + num_rows * _ROW_S)
        return True

    def _is_trial(self, num_rows: int) -> bool:
        """Whether this step drafts to learn what drafts cost by now."""
        if self._num_first and not self._costs.ledger.is_empty:
            return True
        rows, num_steps = self._trial
        if num_steps and rows == num_rows:
            self._trial = rows, num_steps - 1
            return True
        costs, ledger = self._costs, self._costs.ledger
        is_due = costs.may_have_changed or ledger.has_gained  # a cost was believed that is none
        if not (is_due and ledger.affords_trial) or self.num_drafts(1.0):
            return False
        costs.draft_age = 0
        self._trial = num_rows, _TRIAL_STEPS - 1
        return True

    @property
    def num_idle(self) -> int:
        """Steps after the one that is planned, of as many rows, that should have no drafts."""
        return self._costs.ledger.num_paused

    def pass_by(self, num_steps: int) -> None:
        """So many steps, of as many rows as the last that was begun, had no drafts."""
        self._costs.ledger.pass_by(num_steps)

    @property
    def has_lost(self) -> bool:
        """Whether more has been lost than may be: no row need be looked at."""
        return self._adaptive and self._costs.ledger.is_empty

    def charge(self, seconds: float) -> None:
        """Looking for drafts takes the planned step so long."""
        if self._share_s:
            self._costs.ledger.book(-seconds / self._costs.plain.value)

    def num_drafts(
        self, acceptance: float, factors: Sequence[float] = (), read_s: float = 0.0
    ) -> int:
        """How many drafts a row of this step should have.

        Args:
            acceptance: the chance that one is kept.
            factors: by what that differs at each place (``Positions``).
            read_s: seconds for each token to come that reading up on the text would take.
        """
        if not self._adaptive:
            return self._most
        if self._num_trial_rows is not None:
            # The most: of one alone the draft model's pass would seem to cost more than it does.
            return self._most if self._num_trial_rows else 0
        share_s, draft_s = self._share_s, self._draft_s
        if not share_s:
            return 0
        best, best_rate, tokens, kept = 0, _GAIN / share_s, 1.0, 1.0
        for count in range(1, self._most + 1):
            kept *= min(1.0, acceptance * factors[count - 1]) if factors else acceptance
            tokens += kept
            rate = tokens / (share_s + count * draft_s + tokens * read_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best

    def claim(self, acceptance: float, factors: Sequence[float] = (), read_s: float = 0.0) -> int:
        """The same for a row that is about to draft them."""
        self.charge(_CLAIM_S)
        count = self.num_drafts(acceptance, factors, read_s)
        if count and self._num_trial_rows is not None:
            self._num_trial_rows -= 1
        return count

    @property
    def is_trial(self) -> bool:
        """Whether the step that is planned drafts to learn what drafts cost."""
        return self._num_trial_rows is not None

    def rest(self, num_misses: int) -> int:
        """Tokens for which a row is not looked at, when there was nothing to guess by so many times
        in a row."""
        if not self._adaptive:
            return 0
        share = max(_LEAST_LOOK_SHARE, _LOOK_SHARE / 2 ** (num_misses - 1))
        look_s = _CLAIM_S + _LOOK_S + _STEP_S / self._num_rows
        return min(_MAX_REST, int(look_s / (share * self._share_s)))

    @property
    def read_s(self) -> float:
        """Seconds a token that must be read before the first guess for a text."""
        return self._book.read_s if self._adaptive else 0.0

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
        """A step of rows with one known token each took so long.

        Args:
            num_rows: of it.
            num_drafts: verified by it, in all.
            seconds: that it took.
            num_tokens: that came of it.
            num_read: tokens of texts that were read up on for its drafts.
            is_trial: whether it drafted to learn what that costs.
        """
        if not self._adaptive:
            return
        costs = self._book.of(num_rows)
        if num_drafts and costs.plain.is_known:
            gain = costs.gain(num_rows, num_drafts, max(num_tokens, num_rows), seconds)
            if is_trial and self._num_first:
                self._num_first -= 1
            elif is_trial:
                costs.ledger.book_trial(gain)
            elif not num_read:  # what is read serves drafts to come
                costs.ledger.book(gain)
        if num_read:
            self._book.learn_read(num_rows, num_drafts, num_read, seconds)
        else:
            costs.learn(num_drafts, seconds)
