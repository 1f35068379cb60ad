"""Tells how far prompts have come, to those who asked, a few times a second.

Nobody pays who did not ask; where somebody did, a look costs O(1) for each who asked, and what it
takes to count who comes before those that wait, at most as often.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from engine.prompt_progress import PromptProgress
from engine.scheduler.output import OutputBuilder
from engine.scheduler.policy import Policy
from engine.scheduler.sequence import Sequence, Status

_EVERY_S = 0.25
_MAX_COUNTED = 1000  # sequences: beyond that nobody's place among them is looked for


class ProgressReports:
    """The sequences that are to be told of, until they have their first token.

    Args:
        policy: orders the queue.
    """

    def __init__(self, policy: Policy) -> None:
        self._rank = policy.rank if policy.orders_by_rank else None
        self._asking: dict[str, _Report] = {}

    def add(self, seq: Sequence) -> None:
        """Tell of ``seq``, if its request asks for that. One that goes on after the engine before
        has died, with tokens that its client has, is past that."""
        if seq.request.tells_progress and not seq.request.resumed_token_ids:
            self._asking[seq.id] = _Report(seq)

    def discard(self, seq: Sequence) -> None:
        """``seq`` has ended; what it has reached with its last step is told all the same."""
        if seq.first_token_s is None:
            self._asking.pop(seq.id, None)

    def tell(self, news: OutputBuilder, live: Iterable[Sequence], now_s: float) -> None:
        """Add what is new to ``news``, and once more of those that have their first token.

        Args:
            news: of the step whose result has been taken in.
            live: all sequences.
            now_s: on the scheduler's clock.
        """
        if not self._asking:
            return
        # All at the same times, so that who waits is looked over once for all who ask.
        next_s = (now_s // _EVERY_S + 1) * _EVERY_S
        ranks: list[tuple[float, ...]] | None = None
        for report in list(self._asking.values()):
            seq = report.seq
            is_done = seq.first_token_s is not None
            if now_s < report.due_s and not is_done:
                continue
            report.due_s = next_s
            if ranks is None and seq.status is Status.WAITING:
                ranks = self._waiting_ranks(live)
            progress = self._of(seq, ranks or [], now_s)
            if progress != report.told:
                report.told = news.progress[seq.id] = progress
            if is_done:
                del self._asking[seq.id]

    def _of(self, seq: Sequence, ranks: list[tuple[float, ...]], now_s: float) -> PromptProgress:
        total, cached, place = seq.num_prompt, seq.num_cached or 0, None
        if seq.first_token_s is not None:
            processed = total
        elif seq.status is Status.WAITING:
            processed = 0
            if ranks and self._rank is not None:
                place = bisect_left(ranks, self._rank(seq))
        else:  # what was found is there from the beginning
            processed = min(max(seq.num_landed, cached), total)
        since_s = seq.scheduled_s
        elapsed_s = 0.0 if since_s is None else max(0.0, now_s - since_s)
        return PromptProgress(total, cached, processed, elapsed_s, place)

    def _waiting_ranks(self, live: Iterable[Sequence]) -> list[tuple[float, ...]]:
        """The ranks of those who wait, sorted; none where these do not order them, or are too many
        to be counted."""
        if self._rank is None:
            return []
        waiting = [seq for seq in live if seq.status is Status.WAITING]
        return sorted(map(self._rank, waiting)) if len(waiting) <= _MAX_COUNTED else []


@dataclass(slots=True)
class _Report:
    seq: Sequence
    told: PromptProgress | None = None
    due_s: float = 0.0
