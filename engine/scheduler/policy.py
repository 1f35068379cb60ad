"""Scheduling policies: who comes first, and who makes room.

The head of the queue is admitted first. When blocks run out, the running sequence of the greatest
rank is preempted. Work in the background (``Request.background``) comes after all other work,
whatever the policy, and makes room for it at once.

Most policies are a sort key and nothing else: keys are unique and do not change while a sequence
waits, so the sequence with the smallest is never displaced by those behind it, and always comes to
its end. The fair policy (``fair.py``) orders tenants by what they have been given, and the longest
prefix first (``longest_prefix.py``) orders sequences by what is cached of them; both change.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List
from typing import NamedTuple, Protocol

from engine.config import Policy as PolicyName
from engine.plan_rows import PlanRows
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting import SortKey, Waiting, WaitingQueue


class Shortage(NamedTuple):
    """Why there is no room for the head of the queue: too few places, or too few blocks."""

    total: int  # there are
    needed: int  # by the head
    held: Callable[[Sequence], int]  # by one that runs


class Policy(Protocol):
    """A policy of one scheduler."""

    orders_by_rank: bool  # the queue's order is that of ranks, so a place in it is known

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """Who runs is preempted by falling rank, when there are too few blocks."""
        ...

    def new_queue(self) -> Waiting:
        """The queue of those who wait."""
        ...

    def charge(self, seqs: List[Sequence], rows: PlanRows) -> None:
        """A step serves ``seqs`` with ``rows``."""
        ...

    def grant(self, seq: Sequence, num_tokens: int) -> None:
        """A step has given ``seq`` so many tokens more than it was charged for."""
        ...

    def behind(self, running: Iterable[Sequence], head: Sequence) -> list[Sequence]:
        """Who of ``running``, all as urgent as ``head``, gets tokens of a step after ``head``."""
        ...

    def yields(self, seq: Sequence) -> bool:
        """Whether the prompt of ``seq`` should keep steps short for the sake of others."""
        ...

    def victim(
        self, head: Sequence, running: Iterable[Sequence], waiting: Waiting, short: Shortage
    ) -> Sequence | None:
        """Who of ``running``, as urgent as ``head``, makes room for it; None if it must wait."""
        ...


class KeyPolicy:
    """A policy that is a sort key, with all work in the background behind all other."""

    orders_by_rank = True

    def __init__(self, among_equals: SortKey) -> None:
        self._among_equals = among_equals

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """The key."""
        return (seq.request.background, *self._among_equals(seq))

    def new_queue(self) -> Waiting:
        """By the key."""
        return WaitingQueue(self.rank)

    def charge(self, seqs: List[Sequence], rows: PlanRows) -> None:
        """Nothing: what was given does not matter."""

    def grant(self, seq: Sequence, num_tokens: int) -> None:
        """Nothing either."""

    def behind(self, running: Iterable[Sequence], head: Sequence) -> list[Sequence]:
        """Nobody: who runs comes first."""
        return []

    def yields(self, seq: Sequence) -> bool:
        """Nobody does."""
        return False

    def victim(
        self, head: Sequence, running: Iterable[Sequence], waiting: Waiting, short: Shortage
    ) -> Sequence | None:
        """Nobody: who runs stays."""
        return None


def first_come_first_served(seq: Sequence) -> tuple[float, ...]:
    """By arrival."""
    return (seq.order,)


def priority(seq: Sequence) -> tuple[float, ...]:
    """By the request's priority, lower first, then by arrival."""
    return (seq.request.priority, seq.order)


def shortest_job_first(seq: Sequence) -> tuple[float, ...]:
    """By the tokens that are at most still to be computed, then by arrival."""
    return (seq.max_num_tokens - seq.num_computed, seq.order)


def make_policy(
    name: PolicyName, num_cached: Callable[[Sequence], int], num_running: Callable[[], int]
) -> Policy:
    """The policy of that name, for one scheduler, which tells how many tokens of a waiting sequence
    its prefix cache holds now, and how many sequences run."""
    from engine.scheduler.fair import FairPolicy
    from engine.scheduler.longest_prefix import LongestPrefixPolicy

    makers: dict[PolicyName, Callable[[], Policy]] = {
        "fcfs": lambda: KeyPolicy(first_come_first_served),
        "priority": lambda: KeyPolicy(priority),
        "sjf": lambda: KeyPolicy(shortest_job_first),
        "fair": FairPolicy,
        "lpm": lambda: LongestPrefixPolicy(num_cached, num_running),
    }
    return makers[name]()
