"""Admits requests that an engine may have died of so that, if one kills another, it is known which.

The first are admitted alone, each when the one before has made some progress. The more have, the
less likely it is that any is to blame (the engine may have died of something else), and the more
are admitted at once. With *n* suspects this takes about ``4 * (8 + 4 log2(n / 8))`` steps beyond
what their prompts take, and of *n* at most a fifth are under suspicion when the engine dies again.
"""

from __future__ import annotations

from collections.abc import Iterable

from engine.scheduler.sequence import Sequence, Status
from engine.suspects import LEAST_PROGRESS, family_of

_PROVEN_PER_PLACE = 4  # suspects that have made progress for each that may be admitted at once


class SuspectGate:
    """Tells which sequences may be admitted. Written only by the Planner.

    Those behind one that has to wait are not admitted before it, so as not to take its place.
    """

    def __init__(self) -> None:
        self._unproven: list[Sequence] = []  # admitted suspects
        self._num_proven = 0  # since there were none

    def admits(self, seq: Sequence) -> bool:
        """Whether ``seq`` may be admitted now. Those with the same prompt are admitted together."""
        if not seq.request.is_suspect or _is_proven(seq):
            return True
        self._settle()
        families = {family_of(other.request) for other in self._unproven}
        most = max(1, self._num_proven // _PROVEN_PER_PLACE)
        return len(families) < most or family_of(seq.request) in families

    def has_room(self, live: Iterable[Sequence]) -> bool:
        """Whether one more than the ``live`` sequences may be under suspicion."""
        self._settle()
        suspects = [seq for seq in live if seq.request.is_suspect and not _is_proven(seq)]
        return len(suspects) < max(1, self._num_proven // _PROVEN_PER_PLACE)

    def note_admission(self, seq: Sequence) -> None:
        """Note that ``seq`` has been admitted."""
        if seq.request.is_suspect and not _is_proven(seq):
            self._unproven.append(seq)
        elif not self._unproven:
            self._num_proven = 0

    def _settle(self) -> None:
        """Sort out those that have made progress, ended, or were preempted."""
        ended = [seq for seq in self._unproven if seq.status is Status.FINISHED or _is_proven(seq)]
        self._num_proven += len(ended)
        self._unproven = [
            seq for seq in self._unproven if seq.status is Status.RUNNING and not _is_proven(seq)
        ]


def _is_proven(seq: Sequence) -> bool:
    """Whether it has made progress since the engine died of which it is suspected."""
    num_resumed = len(seq.request.resumed_token_ids)
    return len(seq.token_ids) - seq.num_prompt - num_resumed >= LEAST_PROGRESS
