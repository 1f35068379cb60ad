"""Joins who guesses with how much guessing pays, for the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.speculation.pace import Acceptance, Pace, prior_acceptance
from engine.speculation.positions import Positions
from engine.speculation.proposer import Drafter, Proposer, make_proposer
from engine.types import DraftStats, Request, StepPlan

_KEPT = 0.9  # how much a request's acceptance remembers, a draft
_PATIENCE = 4  # tokens between two tries, where a try costs the overlap of steps
_COLD = 16  # tokens without drafts, after which a draft model reads up on a text first
_PRIOR_WEIGHT = 2.0  # drafts that outweigh what other requests have shown


class Draft:
    """Who guesses for one sequence, and how well. Written by the Speculator alone."""

    __slots__ = (
        "acceptance",
        "drafter",
        "num_accepted",
        "num_drafted",
        "num_seen",
        "num_unguessed",
    )

    def __init__(self, drafter: Drafter, acceptance: Acceptance) -> None:
        self.drafter = drafter
        self.acceptance = acceptance
        self.num_drafted = 0
        self.num_seen = 0  # tokens that there were when it last drafted
        self.num_unguessed = 0  # tokens planned before the one before them was known
        self.num_accepted = 0


class Speculator:
    """Proposes drafts for planned rows, and learns from what came of them.

    Args:
        config: of speculation.
        proposer: who guesses; the one that ``config`` names when left out.
    """

    def __init__(self, config: SpeculationConfig, proposer: Proposer | None = None) -> None:
        self._proposer = make_proposer(config) if proposer is None else proposer
        self._pace = Pace(config.num_draft_tokens, adaptive=config.adaptive)
        self._of_all = prior_acceptance()
        self._positions = Positions(config.num_draft_tokens)
        self._is_cold = False  # drafts of the newest step cost more than those of later ones will
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * config.num_draft_tokens

    @property
    def stats(self) -> DraftStats:
        """What has come of it so far."""
        return DraftStats(self._num_drafts, self._num_draft_tokens, tuple(self._accepted))

    def begin_step(self, num_rows: int) -> bool:
        """So many rows of the step may have drafts; False where not even sure ones would pay."""
        self._pace.begin(num_rows)
        return self._pace.num_drafts(1.0) > 0

    def begin(self, request: Request) -> Draft:
        """Guess for a request from now on."""
        acceptance = Acceptance(self._of_all, _PRIOR_WEIGHT, _KEPT)
        return Draft(self._proposer.begin(request), acceptance)

    def is_worth_waiting(self, draft: Draft) -> bool:
        """Whether a text should wait for its newest token, so that drafts can follow it.

        Where there was nothing to guess it goes on, and tries again some tokens later.
        """
        draft.num_unguessed += 1
        if draft.num_unguessed % _PATIENCE:
            return False
        return self._pace.num_drafts(draft.acceptance.rate, self._positions.factors) > 0

    def propose(self, draft: Draft, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Drafts behind ``token_ids``: as many as pay for themselves, and at most ``most``."""
        wanted = min(most, self._pace.claim(draft.acceptance.rate, self._positions.factors))
        if wanted <= 0:
            draft.acceptance.fade()
            self._of_all.fade()
            return ()
        drafts = draft.drafter.propose(token_ids, wanted)
        if drafts:
            self._is_cold |= len(token_ids) - draft.num_seen > _COLD
            draft.num_seen = len(token_ids)
        return drafts

    def settle(self, draft: Draft, num_drafts: int, num_accepted: int) -> None:
        """Of a row's drafts the first ``num_accepted`` were kept."""
        draft.num_drafted += num_drafts
        draft.num_accepted += num_accepted
        draft.acceptance.learn(num_drafts, num_accepted)
        self._of_all.learn(num_drafts, num_accepted)
        self._positions.learn(num_drafts, num_accepted)
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for position in range(num_accepted):
            self._accepted[position] += 1

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """A request has ended with this text."""
        self._proposer.finish(request, token_ids)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long. Those that compute prompts too say nothing of what drafts cost."""
        is_cold, self._is_cold = self._is_cold, False
        if plan.added or not plan.rows or is_cold:
            return
        num_drafts = sum(plan.rows.num_drafts.values())
        if not plan.rows.silent and plan.num_tokens == len(plan.rows) + num_drafts:
            self._pace.observe(len(plan.rows), num_drafts, seconds)
