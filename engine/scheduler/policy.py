"""Scheduling policies: a policy is a sort key, and nothing else.

The waiting sequence with the smallest key is admitted first; when blocks run out, the running
sequence with the greatest key is preempted. Keys are unique and do not change while a sequence
waits. The sequence with the smallest key is therefore never displaced by those behind it, which
is what makes every policy live: it always comes to its end.

Work in the background (``Request.background``) comes after all other work, whatever the policy.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.config import Policy
from engine.scheduler.sequence import Sequence

SortKey = Callable[[Sequence], tuple[int, ...]]


def first_come_first_served(seq: Sequence) -> tuple[int, ...]:
    """By arrival."""
    return (seq.order,)


def priority(seq: Sequence) -> tuple[int, ...]:
    """By the request's priority, lower first, then by arrival."""
    return (seq.request.priority, seq.order)


def shortest_job_first(seq: Sequence) -> tuple[int, ...]:
    """By the tokens that are at most still to be computed, then by arrival."""
    return (seq.max_num_tokens - seq.num_computed, seq.order)


POLICIES: dict[Policy, SortKey] = {
    "fcfs": first_come_first_served,
    "priority": priority,
    "sjf": shortest_job_first,
}


def sort_key(policy: Policy) -> SortKey:
    """The key of ``policy``, with all work in the background behind all other."""
    among_equals = POLICIES[policy]

    def key(seq: Sequence) -> tuple[int, ...]:
        return (seq.request.background, *among_equals(seq))

    return key
