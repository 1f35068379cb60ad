"""Scheduling policies: which sequence is admitted next, and which is preempted.

The head of the queue is admitted first. When blocks run out, the running sequence with the greatest
rank is preempted. Under every policy, background work (``Request.background``) comes after all
other work and is preempted for it at once.

Most policies are just a sort key. Keys are unique and constant while a sequence waits, so later
arrivals with greater keys never overtake the sequence with the smallest key, and it always
finishes. The fair policy (``fair.py``) orders tenants by the service they have received, and the
longest-prefix policy (``longest_prefix.py``) orders sequences by their cached prefixes; both change
while a sequence waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Set
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from engine.config import Policy as PolicyName
from engine.plan_rows import PlanRows
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting import SequenceQueue, SortKey, WaitingQueue


class Shortage(NamedTuple):
    """Why the head of the queue cannot be admitted: a shortage of places or of blocks."""

    total: int  # in existence
    needed: int  # by the head of the queue
    held: Callable[[Sequence], int]  # by a given running sequence


class Policy(Protocol):
    """The policy of one scheduler."""

    is_rank_ordered: bool  # the queue is sorted by rank, so a sequence's position in it is known

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """The sequence's rank. When blocks run out, the greatest rank is preempted first."""
        ...

    def new_queue(self) -> SequenceQueue:
        """Make the queue of waiting sequences."""
        ...

    def charge(self, seqs: List[Sequence], rows: PlanRows) -> None:
        """Account for a step that serves ``seqs`` with ``rows``."""
        ...

    def charge_extra(self, seq: Sequence, num_tokens: int) -> None:
        """Account for ``num_tokens`` that a step gave ``seq`` beyond what it was charged for."""
        ...

    def ranked_prompts(self, running: Iterable[Sequence], head: Sequence | None) -> list[Sequence]:
        """Those of ``running`` with a prompt to compute, in the order in which a step serves them.

        ``head`` is the next to be admitted, if it is equally urgent. Empty if they are served in
        the order of admission, before any newcomer.
        """
        ...

    def precedes(self, head: Sequence, seq: Sequence) -> bool:
        """Whether ``head``, which waits, is served before ``seq``, a ranked prompt."""
        ...

    def should_throttle_prompt(self, seq: Sequence) -> bool:
        """Whether the prompt of ``seq`` should be held back to keep steps short for others."""
        ...

    def victim(
        self,
        head: Sequence,
        running: Iterable[Sequence],
        kept: Set[str],
        waiting: SequenceQueue,
        short: Shortage,
    ) -> Sequence | None:
        """The one of ``running``, equally urgent, to preempt for ``head``; None if it must wait.

        It is none of those whose ids are ``kept``, which the step that is planned depends on.
        """
        ...


class KeyPolicy:
    """A policy defined by a sort key, with background work after all other work."""

    is_rank_ordered = True

    def __init__(self, key: SortKey) -> None:
        self._key = key

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """The sort key."""
        return (seq.request.background, *self._key(seq))

    def new_queue(self) -> SequenceQueue:
        """A heap ordered by the key."""
        return WaitingQueue(self.rank)

    def charge(self, seqs: List[Sequence], rows: PlanRows) -> None:
        """Do nothing: service received does not affect the order."""

    def charge_extra(self, seq: Sequence, num_tokens: int) -> None:
        """Do nothing."""

    def ranked_prompts(self, running: Iterable[Sequence], head: Sequence | None) -> list[Sequence]:
        """Nothing: running sequences always come first."""
        return []

    def precedes(self, head: Sequence, seq: Sequence) -> bool:
        """False, as above."""
        return False

    def should_throttle_prompt(self, seq: Sequence) -> bool:
        """Never."""
        return False

    def victim(
        self,
        head: Sequence,
        running: Iterable[Sequence],
        kept: Set[str],
        waiting: SequenceQueue,
        short: Shortage,
    ) -> Sequence | None:
        """None: running sequences are not displaced."""
        return None


class PriorityPolicy(KeyPolicy):
    """By priority. A long prompt in progress does not delay those of higher priority."""

    def __init__(self) -> None:
        super().__init__(priority)

    def ranked_prompts(self, running: Iterable[Sequence], head: Sequence | None) -> list[Sequence]:
        """By priority, if they or the head differ in it."""
        prompts = unfinished_prompts(running)
        priorities = {seq.request.priority for seq in prompts}
        if head is not None:
            priorities.add(head.request.priority)
        return sorted(prompts, key=self.rank) if len(priorities) > 1 else []

    def precedes(self, head: Sequence, seq: Sequence) -> bool:
        """Whether its priority is higher."""
        return head.request.priority < seq.request.priority


def unfinished_prompts(running: Iterable[Sequence]) -> list[Sequence]:
    """The sequences that have several tokens to compute."""
    return [s for s in running if len(s.token_ids) + s.num_pending - s.num_computed > 1]


def first_come_first_served(seq: Sequence) -> tuple[float, ...]:
    """Order by arrival."""
    return (seq.order,)


def priority(seq: Sequence) -> tuple[float, ...]:
    """Order by the request's priority, lowest first, then by arrival."""
    return (seq.request.priority, seq.order)


def shortest_job_first(seq: Sequence) -> tuple[float, ...]:
    """Order by the most tokens that may still have to be computed, then by arrival."""
    return (seq.max_num_tokens - seq.num_computed, seq.order)


def make_policy(
    name: PolicyName, num_cached: Callable[[Sequence], int], num_changes: Callable[[], int]
) -> Policy:
    """Make the named policy for one scheduler.

    ``num_cached`` gives the number of a waiting sequence's tokens that are in the prefix cache now,
    ``num_changes`` how often room or prefixes may have come (``SchedulerState.num_changes``).
    """
    from engine.scheduler.fair import FairPolicy
    from engine.scheduler.longest_prefix import LongestPrefixPolicy

    makers: dict[PolicyName, Callable[[], Policy]] = {
        "fcfs": lambda: KeyPolicy(first_come_first_served),
        "priority": PriorityPolicy,
        "sjf": lambda: KeyPolicy(shortest_job_first),
        "fair": FairPolicy,
        "lpm": lambda: LongestPrefixPolicy(num_cached, num_changes),
    }
    return makers[name]()
