"""Reports the progress of prompts to the clients that request it, a few times a second.

Requests that do not ask for progress cost nothing. For those that do, each report costs O(1) per
request, and at most as often a pass over the waiting sequences to count who comes first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass

from engine.prompt_progress import PromptProgress
from engine.scheduler.output import OutputBuilder
from engine.scheduler.policy import Policy
from engine.scheduler.sequence import Sequence, Status

_REPORT_INTERVAL_S = 0.25
_MAX_COUNTED = 1000  # waiting sequences; with more, queue positions are not computed


class ProgressReports:
    """The sequences whose progress is reported, until their first token.

    Args:
        policy: the policy that orders the queue.
    """

    def __init__(self, policy: Policy) -> None:
        self._rank = policy.rank if policy.is_rank_ordered else None
        self._reports: dict[str, _Report] = {}

    def add(self, seq: Sequence) -> None:
        """Report on ``seq`` if its request asks for it.

        A request resumed after an engine restart, whose client has tokens already, is past that.
        """
        if seq.request.report_progress and not seq.request.resumed_token_ids:
            self._reports[seq.id] = _Report(seq)

    def discard(self, seq: Sequence) -> None:
        """Note that ``seq`` has ended. With a first token, it still gets its last report."""
        if seq.first_token_s is None:
            self._reports.pop(seq.id, None)

    def report(self, news: OutputBuilder, live: Iterable[Sequence], now_s: float) -> None:
        """Add changed progress to ``news``, and a last report for sequences with a first token.

        Args:
            news: the output of the step whose result has been processed.
            live: all sequences.
            now_s: the time on the scheduler's clock.
        """
        if not self._reports:
            return
        # Reports are all due at the same times, so one pass over the waiting sequences serves all.
        next_s = (now_s // _REPORT_INTERVAL_S + 1) * _REPORT_INTERVAL_S
        ranks: list[tuple[float, ...]] | None = None
        for report in list(self._reports.values()):
            seq = report.seq
            is_done = seq.first_token_s is not None
            if now_s < report.due_s and not is_done:
                continue
            report.due_s = next_s
            if ranks is None and seq.status is Status.WAITING:
                ranks = self._waiting_ranks(live)
            progress = self._of(seq, ranks or [], now_s)
            if progress != report.last_reported:
                report.last_reported = news.progress[seq.id] = progress
            if is_done:
                del self._reports[seq.id]

    def _of(self, seq: Sequence, ranks: list[tuple[float, ...]], now_s: float) -> PromptProgress:
        total, cached, place = seq.num_prompt, seq.num_cached or 0, None
        if seq.first_token_s is not None:
            processed = total
        elif seq.status is Status.WAITING:
            processed = 0
            if ranks and self._rank is not None:
                place = bisect_left(ranks, self._rank(seq))
        else:  # cached tokens are there from the beginning
            processed = min(max(seq.num_confirmed, cached), total)
        since_s = seq.scheduled_s
        elapsed_s = 0.0 if since_s is None else max(0.0, now_s - since_s)
        return PromptProgress(total, cached, processed, elapsed_s, place)

    def _waiting_ranks(self, live: Iterable[Sequence]) -> list[tuple[float, ...]]:
        """The sorted ranks of the waiting sequences.

        Empty if ranks do not order the queue, or if there are too many to count.
        """
        if self._rank is None:
            return []
        waiting = [seq for seq in live if seq.status is Status.WAITING]
        return sorted(map(self._rank, waiting)) if len(waiting) <= _MAX_COUNTED else []


@dataclass(slots=True)
class _Report:
    seq: Sequence
    last_reported: PromptProgress | None = None
    due_s: float = 0.0
