"""Combines a proposer with the decision of how much to draft, for the scheduler."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from engine.config import SpeculationConfig
from engine.speculation.draft_length import Acceptance, DraftLengthController, prior_acceptance
from engine.speculation.position_factors import PositionFactors
from engine.speculation.proposer import Drafter, Proposer, make_proposer
from engine.stats import DraftStats
from engine.types import Request, StepPlan

_ACCEPTANCE_DECAY = 0.9  # weight of the past in a request's acceptance, per draft
_PATIENCE = 4  # tokens between two tries, where a try costs the overlap of steps
_COLD = 16  # with more tokens unread, a draft model first reads them in bulk
_PRIOR_WEIGHT = 2.0  # own drafts that outweigh the acceptance of all requests
_MIN_BACKOFF, _MAX_BACKOFF = 4, 32  # tokens until a row whose drafts would not pay is checked again
_BEGIN_S = 1e-5  # host time to start on a request
_NUM_OBSERVED_IDLE = 2  # the last idle steps of a run, which are still observed
_DEFAULT_OUTPUT_TOKENS = 64.0  # tokens of an output, assumed before any request has ended
_OUTPUT_DECAY = 0.95  # weight of the past, per request
_MAX_IN_FLIGHT = 4  # most steps without a result


class DraftState:
    """The drafting state of one sequence, with its acceptance. Written only by the Speculator."""

    __slots__ = (
        "acceptance",
        "backoff_tokens",
        "declined_at",
        "drafter",
        "num_accepted",
        "num_drafted",
        "num_misses",
        "num_prompt",
        "num_seen",
        "num_undrafted",
        "skip_above_rows",
        "skip_until",
    )

    def __init__(self, drafter: Drafter, acceptance: Acceptance, num_prompt: int) -> None:
        self.drafter = drafter
        self.acceptance = acceptance
        self.num_prompt = num_prompt
        self.num_drafted = 0
        self.num_accepted = 0
        self.num_misses = 0  # consecutive lookups that found nothing
        self.num_seen = 0  # length of the text at the last lookup
        self.num_undrafted = 0  # tokens planned before their predecessor was known
        self.declined_at = 0  # length of the text when drafts would not have paid; 0: never
        self.backoff_tokens = _MIN_BACKOFF  # tokens to rest for, the next time
        self.skip_until = 0  # length of the text at which the row is due again
        self.skip_above_rows = 0  # the row is due at once if a step has no more rows than this


class _Step:
    """What is remembered of a planned step until its result arrives."""

    __slots__ = ("is_trial", "num_accepted", "num_read")

    def __init__(self, *, is_trial: bool) -> None:
        self.is_trial = is_trial
        self.num_read = 0  # tokens of texts read in bulk
        self.num_accepted = 0


class Speculator:
    """Proposes drafts for planned rows, and learns from the results.

    Args:
        config: of speculation.
        proposer: makes the drafts; default: the one that ``config`` names.
    """

    def __init__(self, config: SpeculationConfig, proposer: Proposer | None = None) -> None:
        self._proposer = make_proposer(config) if proposer is None else proposer
        self._length_controller = DraftLengthController(
            config.num_draft_tokens, adaptive=config.adaptive
        )
        self._is_adaptive = config.adaptive
        self._reads = config.drafts_in_runner  # whether texts are read before drafting for them
        self._global_acceptance = prior_acceptance()
        self._positions = PositionFactors(config.num_draft_tokens)
        self._mean_output_tokens = _DEFAULT_OUTPUT_TOKENS
        # Steps with rows, oldest first. None: not observed.
        self._steps: deque[_Step | None] = deque(maxlen=_MAX_IN_FLIGHT)
        self._num_rows = 0  # of the step begun last
        self._num_idle = 0  # further steps with as many rows in which none is due
        self._num_skipped = 0  # such steps that have passed
        self._num_drafts = 0
        self._num_draft_tokens = 0
        self._accepted = [0] * config.num_draft_tokens
        self._stats: DraftStats | None = None

    @property
    def stats(self) -> DraftStats:
        """Statistics so far."""
        if self._stats is None:
            self._stats = DraftStats(
                self._num_drafts, self._num_draft_tokens, tuple(self._accepted)
            )
        return self._stats

    def try_skip_step(self, num_rows: int) -> bool:
        """Whether none of a step's rows is due; if so, the step is counted and has no drafts.

        To be called first for every step. If it returns true, the step is not begun.
        """
        if not self._num_idle or num_rows != self._num_rows:
            return False
        self._num_idle -= 1
        self._num_skipped += 1
        self._steps.append(None if self._num_idle >= _NUM_OBSERVED_IDLE else _Step(is_trial=False))
        return True

    def begin_step(self, num_rows: int) -> bool:
        """Begin a step with ``num_rows`` rows that may draft; false if it should have no drafts."""
        if not num_rows:
            return False
        self._end_idle()
        self._num_rows = num_rows
        pays = self._length_controller.begin_step(num_rows)
        if not pays:
            self._num_idle = self._length_controller.num_idle
        self._steps.append(_Step(is_trial=pays and self._length_controller.is_trial))
        return pays

    def end_step(self, num_idle: int) -> None:
        """Note that no row of the step just begun is due for the next ``num_idle`` tokens."""
        self._num_idle = num_idle

    @property
    def num_idle(self) -> int:
        """For how many tokens after this step's none of its rows is due."""
        return self._num_idle

    def skip(self, num_tokens: int) -> None:
        """Note that this step also makes ``num_tokens`` of those tokens."""
        self._num_idle -= num_tokens
        self._num_skipped += num_tokens
        if self._num_idle < _NUM_OBSERVED_IDLE and self._steps and self._steps[-1] is None:
            self._steps[-1] = _Step(is_trial=False)

    def _end_idle(self) -> None:
        if self._num_skipped:
            self._length_controller.skip_steps(self._num_skipped)
        self._num_idle = self._num_skipped = 0

    def begin(self, request: Request) -> DraftState:
        """Start drafting for a request that has a row in the current step."""
        self._length_controller.charge(_BEGIN_S)
        acceptance = Acceptance(self._global_acceptance, _PRIOR_WEIGHT, _ACCEPTANCE_DECAY)
        return DraftState(self._proposer.begin(request), acceptance, len(request.prompt_token_ids))

    def tokens_until_due(self, draft: DraftState, num_tokens: int) -> int:
        """For how many tokens a row need not be checked; 0: it is due.

        It rests if its drafts recently did not pay in steps with about as many rows as now.
        """
        if self._num_rows <= draft.skip_above_rows:
            return 0
        return max(0, draft.skip_until - num_tokens)

    def should_wait_for_token(self, draft: DraftState) -> bool:
        """Whether a sequence should wait for its newest token, so that drafts can follow it.

        If there was nothing to draft it continues, and tries again some tokens later.
        """
        draft.num_undrafted += 1
        if draft.num_undrafted % _PATIENCE:
            return False
        return (
            self._length_controller.num_drafts(draft.acceptance.rate, self._positions.factors) > 0
        )

    def propose(self, draft: DraftState, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """Drafts to follow ``token_ids``: as many as pay off, and at most ``most``."""
        if self._length_controller.is_over_budget:
            return ()
        length = len(token_ids)
        num_unseen = length - draft.num_seen
        is_cold = self._reads and num_unseen > _COLD
        if draft.declined_at:
            draft.acceptance.fade(length - draft.declined_at)
            self._global_acceptance.fade(length - draft.declined_at)
            draft.declined_at = 0
        read_s = self._reading_s(draft, length) if is_cold else 0.0
        factors = self._positions.factors
        wanted = min(
            most, self._length_controller.take_drafts(draft.acceptance.rate, factors, read_s)
        )
        if wanted <= 0:
            draft.declined_at = length
            if self._is_adaptive and not self._length_controller.is_trial:
                # The acceptance of all requests changes slowly.
                num_tokens = draft.backoff_tokens if draft.num_drafted else _MAX_BACKOFF
                _back_off(draft, length, num_tokens, self._num_rows)
                draft.backoff_tokens = min(_MAX_BACKOFF, 2 * draft.backoff_tokens)
            return ()
        step = self._steps[-1]
        if is_cold and step is not None:
            step.num_read += num_unseen
        self._length_controller.charge(draft.drafter.lookup_cost_s(num_unseen))
        draft.num_seen, draft.backoff_tokens = length, _MIN_BACKOFF
        drafts = draft.drafter.propose(token_ids, wanted)
        if drafts:
            draft.num_misses = 0
        else:
            draft.num_misses += 1
            _back_off(
                draft,
                length,
                self._length_controller.backoff_tokens(draft.num_misses),
                self._num_rows,
            )
        return drafts

    def record_acceptance(self, draft: DraftState, num_drafts: int, num_accepted: int) -> None:
        """Learn that the first ``num_accepted`` of a row's drafts were accepted."""
        draft.num_drafted += num_drafts
        draft.num_accepted += num_accepted
        draft.acceptance.learn(num_drafts, num_accepted)
        self._global_acceptance.learn(num_drafts, num_accepted)
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
        self, request: Request, token_ids: Sequence[int], draft: DraftState | None = None
    ) -> None:
        """Note that a request has ended with this text. Another may replace it in the next step."""
        self._end_idle()
        if draft is not None and draft.declined_at:
            self._global_acceptance.fade(len(token_ids) - draft.declined_at)
        num_output = len(token_ids) - len(request.prompt_token_ids)
        self._mean_output_tokens += (1.0 - _OUTPUT_DECAY) * (num_output - self._mean_output_tokens)
        self._proposer.finish(request, token_ids)

    def observe(self, plan: StepPlan, seconds: float) -> None:
        """Learn from the duration of a step. Steps that also compute prompts are ignored.

        A step without drafts may make several passes; each pass counts as a step.
        """
        if not plan.rows or not self._steps:
            return
        step = self._steps.popleft()
        if step is None or plan.added:
            return
        num_rows, num_drafts = len(plan.rows), sum(plan.rows.num_drafts.values())
        if not plan.rows.unsampled and sum(map(len, plan.rows.token_ids)) == num_rows + num_drafts:
            self._length_controller.observe(
                num_rows,
                num_drafts,
                seconds / plan.num_passes,
                num_tokens=num_rows + step.num_accepted,
                num_read=step.num_read,
                is_trial=step.is_trial,
            )

    def _reading_s(self, draft: DraftState, length: int) -> float:
        """The cost of reading a text in bulk, in seconds per token still expected of its output."""
        num_output = length - draft.num_prompt
        to_come = max(1.0, num_output, self._mean_output_tokens - num_output)
        return self._length_controller.read_s * (length - draft.num_seen) / to_come


def _back_off(draft: DraftState, length: int, num_tokens: int, num_rows: int) -> None:
    draft.skip_until = length + num_tokens
    draft.skip_above_rows = num_rows // 2
