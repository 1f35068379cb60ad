"""Joins who guesses with how much guessing pays, for the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.speculation.pace import Acceptance, Pace, prior_acceptance
from engine.speculation.positions import Positions
from engine.speculation.proposer import Drafter, Proposer, make_proposer
from engine.types import DraftStats, Request, StepPlan

_KEPT = 0.9  # how much a request's acceptance remembers, a draft
_PATIENCE = 4  # tokens between two tries, where a try costs the overlap of steps
_COLD = 16  # tokens that a draft model has not seen: above, it reads up on the text first
_PRIOR_WEIGHT = 2.0  # drafts that outweigh what other requests have shown
_REST, _LONGEST_REST = 4, 32  # tokens until a row whose drafts would not pay is looked at again
_BEGIN_S = 1e-5  # of the host, to begin with a request
_WATCHED = 2  # steps, the last of those in which nobody is due, that are observed
_USUAL_OUTPUT = 64.0  # tokens of a request, before one has ended
_KEPT_OUTPUT = 0.95  # how much of it is remembered, a request
_IN_FLIGHT = 4  # steps whose results are not there, at most


class Draft:
    """Who guesses for one sequence, and how well. Written by the Speculator alone."""

    __slots__ = (
        "acceptance",
        "drafter",
        "num_accepted",
        "num_drafted",
        "num_misses",
        "num_prompt",
        "num_seen",
        "num_unguessed",
        "rest",
        "rests_above",
        "rests_until",
        "turned_down_at",
    )

    def __init__(self, drafter: Drafter, acceptance: Acceptance, num_prompt: int) -> None:
        self.drafter = drafter
        self.acceptance = acceptance
        self.num_prompt = num_prompt
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_misses = 0  # looks that found nothing, since one that did
        self.num_seen = 0  # tokens that there were when it last looked
        self.num_unguessed = 0  # tokens planned before the one before them was known
        self.turned_down_at = 0  # tokens that there were when drafts would not have paid; 0: never
        self.rest = _REST  # tokens, after the next time
        self.rests_until = 0  # tokens that there will be when it is looked at again
        self.rests_above = 0  # rows of a step: where they are no more, it is looked at at once


class _Step:
    """What is known of a planned step until its result is there."""

    __slots__ = ("is_trial", "num_accepted", "num_read")

    def __init__(self, *, is_trial: bool) -> None:
        self.is_trial = is_trial
        self.num_read = 0  # tokens of texts that are read up on
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
        self._is_adaptive = config.adaptive
        self._reads = config.in_step  # texts, before it guesses for them
        self._of_all = prior_acceptance()
        self._positions = Positions(config.num_draft_tokens)
        self._usual_output = _USUAL_OUTPUT
        # With rows; oldest first. None: of no interest.
        self._steps: deque[_Step | None] = deque(maxlen=_IN_FLIGHT)
        self._num_rows = 0  # of the step that was begun last
        self._num_idle = 0  # steps yet of as many rows, of which none is due
        self._num_passed = 0  # such steps that have been
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * config.num_draft_tokens
        self._stats: DraftStats | None = None

    @property
    def stats(self) -> DraftStats:
        """What has come of it so far."""
        if self._stats is None:
            self._stats = DraftStats(
                self._num_drafts, self._num_draft_tokens, tuple(self._accepted)
            )
        return self._stats

    def passes_by(self, num_rows: int) -> bool:
        """Whether none of a step's rows is due: it is counted, and has no drafts.

        The first thing that is asked of a step; where it is so, the last.
        """
        if not self._num_idle or num_rows != self._num_rows:
            return False
        self._num_idle -= 1
        self._num_passed += 1
        self._steps.append(None if self._num_idle >= _WATCHED else _Step(is_trial=False))
        return True

    def begin_step(self, num_rows: int) -> bool:
        """So many rows of the step may have drafts; False where it should have none."""
        if not num_rows:
            return False
        self._wake()
        self._num_rows = num_rows
        pays = self._pace.begin(num_rows)
        if not pays:
            self._num_idle = self._pace.num_idle
        self._steps.append(_Step(is_trial=pays and self._pace.is_trial))
        return pays

    def end_step(self, num_idle: int) -> None:
        """Of the rows of the step that was begun none is due for so many tokens."""
        self._num_idle = num_idle

    @property
    def num_idle(self) -> int:
        """Tokens behind this step's for which none of its rows is due."""
        return self._num_idle

    def skip(self, num_tokens: int) -> None:
        """So many of those are made by this step too."""
        self._num_idle -= num_tokens
        self._num_passed += num_tokens
        if self._num_idle < _WATCHED and self._steps and self._steps[-1] is None:
            self._steps[-1] = _Step(is_trial=False)

    def _wake(self) -> None:
        if self._num_passed:
            self._pace.pass_by(self._num_passed)
        self._num_idle = self._num_passed = 0

    def begin(self, request: Request) -> Draft:
        """Guess for a request, with a row in the step that was begun, from now on."""
        self._pace.charge(_BEGIN_S)
        acceptance = Acceptance(self._of_all, _PRIOR_WEIGHT, _KEPT)
        return Draft(self._proposer.begin(request), acceptance, len(request.prompt_token_ids))

    def rest(self, draft: Draft, num_tokens: int) -> int:
        """Tokens for which a text of so many need not be looked at: not long ago it had no drafts,
        among as many rows as now. 0: it is due."""
        if self._num_rows <= draft.rests_above:
            return 0
        return max(0, draft.rests_until - num_tokens)

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
        if self._pace.has_lost:
            return ()
        length = len(token_ids)
        num_unseen = length - draft.num_seen
        is_cold = self._reads and num_unseen > _COLD
        if draft.turned_down_at:
            draft.acceptance.fade(length - draft.turned_down_at)
            self._of_all.fade(length - draft.turned_down_at)
            draft.turned_down_at = 0
        read_s = self._reading_s(draft, length) if is_cold else 0.0
        factors = self._positions.factors
        wanted = min(most, self._pace.claim(draft.acceptance.rate, factors, read_s))
        if wanted <= 0:
            draft.turned_down_at = length
            if self._is_adaptive and not self._pace.is_trial:
                # What others have shown changes slowly.
                num_tokens = draft.rest if draft.num_drafted else _LONGEST_REST
                _rest(draft, length, num_tokens, self._num_rows)
                draft.rest = min(_LONGEST_REST, 2 * draft.rest)
            return ()
        step = self._steps[-1]
        if is_cold and step is not None:
            step.num_read += num_unseen
        self._pace.charge(draft.drafter.look_s(num_unseen))
        draft.num_seen, draft.rest = length, _REST
        drafts = draft.drafter.propose(token_ids, wanted)
        if drafts:
            draft.num_misses = 0
        else:
            draft.num_misses += 1
            _rest(draft, length, self._pace.rest(draft.num_misses), self._num_rows)
        return drafts

    def settle(self, draft: Draft, num_drafts: int, num_accepted: int) -> None:
        """Of a row's drafts the first ``num_accepted`` were kept."""
        draft.num_drafted += num_drafts
        draft.num_accepted += num_accepted
        draft.acceptance.learn(num_drafts, num_accepted)
        self._of_all.learn(num_drafts, num_accepted)
        self._positions.learn(num_drafts, num_accepted)
        step = self._steps[0] if self._steps else None
        if step is not None:
            step.num_accepted += num_accepted
        self._num_drafts += 1
        self._num_draft_tokens += num_drafts
        for position in range(num_accepted):
            self._accepted[position] += 1
        self._stats = None

    def finish(
        self, request: Request, token_ids: Sequence[int], draft: Draft | None = None
    ) -> None:
        """A request has ended with this text. Another may be in its place in the next step."""
        self._wake()
        if draft is not None and draft.turned_down_at:
            self._of_all.fade(len(token_ids) - draft.turned_down_at)
        num_output = len(token_ids) - len(request.prompt_token_ids)
        self._usual_output += (1.0 - _KEPT_OUTPUT) * (num_output - self._usual_output)
        self._proposer.finish(request, token_ids)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """A step took so long. Those that compute prompts too say nothing of what drafts cost.

        Without drafts a step may make several passes: each is what a step with drafts stands for.
        """
        if not plan.rows or not self._steps:
            return
        step = self._steps.popleft()
        if step is None or plan.added:
            return
        num_rows, num_drafts = len(plan.rows), sum(plan.rows.num_drafts.values())
        if not plan.rows.silent and sum(map(len, plan.rows.token_ids)) == num_rows + num_drafts:
            self._pace.observe(
                num_rows,
                num_drafts,
                seconds / plan.num_passes,
                num_tokens=num_rows + step.num_accepted,
                num_read=step.num_read,
                is_trial=step.is_trial,
            )

    def _reading_s(self, draft: Draft, length: int) -> float:
        """Seconds that reading up on a text costs each of the tokens it may yet have."""
        num_output = length - draft.num_prompt
        to_come = max(1.0, num_output, self._usual_output - num_output)
        return self._pace.read_s * (length - draft.num_seen) / to_come


def _rest(draft: Draft, length: int, num_tokens: int, num_rows: int) -> None:
    draft.rests_until = length + num_tokens
    draft.rests_above = num_rows // 2
