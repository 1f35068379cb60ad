"""Fair shares among tenants: the virtual token counter (VTC).

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

Each tenant has a counter of the service it has received, divided by its weight. An admitted
sequence adds 1 for each token to be computed, and each sampled token adds 2. Of the tenants with
waiting requests, the one with the smallest counter is served next. Tenants that always have
requests waiting are therefore served in proportion to their weights, whatever they send, and
capacity that one leaves unused goes to the others. A tenant that returns after a pause starts close
to the least-served waiting tenant: it has no debt, and its credit is limited to a burst. (The paper
allows no credit. Then a tenant that uses only part of its share has to wait whenever two of its
requests arrive close together.)

In the paper fairness governs admission only, and running sequences are left alone. Here a waiting
tenant also takes places and blocks back from one that holds more than its share. A long prompt of a
tenant that has received more does not delay a short one of a tenant that has received less.
Otherwise the first tenant to fill the machine would keep all others waiting until its outputs end.
Preemption never leaves a tenant with less than its share, and takes its oldest sequences last, so
these always finish.

A step takes as long as the tokens in it, and new arrivals wait for it to end. While several tenants
come and go, a tenant that has received more than another, and has more waiting than is served at
once, gets only a part of each step for its prompts. In a step that computes a prompt of a tenant
that has received less, it gets none.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Set
from collections.abc import Sequence as List

from engine.plan_rows import PlanRows
from engine.scheduler.policy import Shortage, unfinished_prompts
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting import SequenceQueue, WaitingQueue

_OUTPUT_TOKEN = 2.0  # cost of a sampled token in prompt tokens, as in the paper
_RECENT_STEPS = 1024  # steps for which a tenant counts as recent after being served
_MAX_RECENT = 256  # most recent tenants remembered
_MIN_BACKLOG = 2  # waiting sequences that make a tenant's backlog exceed what is served at once
_MAX_CREDIT = 4096.0  # most credit a returning tenant can claim, for a weight of 1


class FairPolicy:
    """Orders sequences by a service counter for each tenant ever seen."""

    is_rank_ordered = False

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._recent = _RecentTenants(self._counters)
        self._queue = _FairQueue(self._counters, self._recent)

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """Rank by the tenant's counter, then by priority and arrival."""
        counter = self._counters[seq.request.tenant]
        return (seq.request.background, counter, *_within_tenant(seq))

    def new_queue(self) -> SequenceQueue:
        """A queue ordered by the tenants' counters."""
        self._queue = _FairQueue(self._counters, self._recent)
        return self._queue

    def charge(self, seqs: List[Sequence], rows: PlanRows) -> None:
        """Charge for the tokens that a step samples; prompts were charged in full on admission."""
        counters = self._counters
        tenants: set[str] = set()
        for place, seq in enumerate(seqs):
            if place not in rows.unsampled:
                tenant = seq.request.tenant
                tenants.add(tenant)
                counters[tenant] += _OUTPUT_TOKEN / seq.request.weight
        self._recent.end_step(tenants)

    def charge_extra(self, seq: Sequence, num_tokens: int) -> None:
        """Charge for tokens sampled beyond the first, such as accepted drafts."""
        self._counters[seq.request.tenant] += num_tokens * _OUTPUT_TOKEN / seq.request.weight

    def ranked_prompts(self, running: Iterable[Sequence], head: Sequence | None) -> list[Sequence]:
        """Those of the tenants that have received least first, and each tenant's by priority."""
        prompts = unfinished_prompts(running)
        kinds = {(seq.request.tenant, seq.request.priority) for seq in prompts}
        if head is not None:
            kinds.add((head.request.tenant, head.request.priority))
        return sorted(prompts, key=self.rank) if len(kinds) > 1 else []

    def precedes(self, head: Sequence, seq: Sequence) -> bool:
        """Whether the other's tenant has received no less; of one tenant, by priority."""
        own, other = head.request, seq.request
        if own.tenant == other.tenant:
            return own.priority < other.priority
        return self._counters[other.tenant] >= self._counters[own.tenant]

    def should_throttle_prompt(self, seq: Sequence) -> bool:
        """Whether its tenant has a backlog and a recent tenant has received less."""
        tenant, counters = seq.request.tenant, self._counters
        if self._queue.num_waiting(tenant) < _MIN_BACKLOG:
            return False
        return counters[tenant] > counters[self._recent.least_served(tenant)]

    def victim(
        self,
        head: Sequence,
        running: Iterable[Sequence],
        kept: Set[str],
        waiting: SequenceQueue,
        short: Shortage,
    ) -> Sequence | None:
        """The last sequence of a tenant over its share, if the head's stays within its own."""
        assert isinstance(waiting, _FairQueue)
        running = list(running)  # with those that are kept: their tenants hold what they do
        held: Counter[str] = Counter()
        weights = dict(waiting.weights())
        for seq in running:
            held[seq.request.tenant] += short.held(seq)
            weights[seq.request.tenant] = seq.request.weight
        share = short.total / sum(weights.values())  # for a weight of 1
        own, counters = head.request.tenant, self._counters
        if held[own] + short.needed > weights[own] * share:
            return None
        over = {
            tenant
            for tenant, count in held.items()
            if tenant != own
            and count > weights[tenant] * share
            and counters[tenant] >= counters[own]  # else it would be readmitted at once
        }
        candidates = (seq for seq in running if seq.request.tenant in over and seq.id not in kept)
        return max(candidates, key=self.rank, default=None)


def _within_tenant(seq: Sequence) -> tuple[float, ...]:
    return (seq.request.priority, seq.order)


class _RecentTenants:
    """The tenants that arrived or were served in recent steps."""

    def __init__(self, counters: dict[str, float]) -> None:
        self._counters = counters
        self._num_steps = 0
        self._last: dict[str, int] = {}  # last step of each, the oldest first
        self._least: str | None = None  # None: not computed in this step

    def touch(self, tenant: str) -> None:
        """Note that a tenant has started to wait, or has been served."""
        self._last.pop(tenant, None)
        self._last[tenant] = self._num_steps
        self._least = None

    def end_step(self, tenants: Iterable[str]) -> None:
        """Note the tenants that a step serves, and forget those not seen for long."""
        self._num_steps += 1
        for tenant in tenants:
            self.touch(tenant)
        last, oldest = self._last, self._num_steps - _RECENT_STEPS
        while last and (last[first := next(iter(last))] < oldest or len(last) > _MAX_RECENT):
            del last[first]
        self._least = None

    def least_served(self, default: str) -> str:
        """The least-served recent tenant, cached for one step; ``default`` if there is none."""
        if self._least is None:
            self._least = min(self._last, key=self._counters.__getitem__, default=default)
        return self._least


class _FairQueue:
    """A queue with background work behind the rest; each of the two ordered by tenant counters."""

    def __init__(self, counters: dict[str, float], recent: _RecentTenants) -> None:
        self._kinds = (_TenantQueues(counters, recent), _TenantQueues(counters, None))

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``."""
        self._kinds[seq.request.background].push(seq)

    def head(self) -> Sequence | None:
        """The first sequence of the tenant with the smallest counter."""
        first, behind = self._kinds
        return first.head() or behind.head()

    def pop(self, seq: Sequence) -> None:
        """Remove the head."""
        self._kinds[seq.request.background].pop(seq)

    def discard(self, seq: Sequence) -> None:
        """Note that a queued sequence is about to leave the WAITING status."""
        self._kinds[seq.request.background].discard(seq)

    def weights(self) -> dict[str, float]:
        """The weights of tenants with waiting sequences, background work excluded."""
        return self._kinds[0].weights()

    def num_waiting(self, tenant: str) -> int:
        """How many of a tenant's sequences wait, background work excluded."""
        return self._kinds[0].num_waiting[tenant]


class _TenantQueues:
    """A queue per tenant, and a heap of the tenants whose queues are not empty.

    Counters only rise, so a heap entry may be too small but never too large. It is corrected when
    it reaches the top, and serving a tenant does not touch the heap. O(log tenants) amortised.
    """

    def __init__(self, counters: dict[str, float], recent: _RecentTenants | None) -> None:
        self._counters = counters
        self._recent = recent
        self._queues: dict[str, WaitingQueue] = {}
        self._weights: dict[str, float] = {}
        self.num_waiting: Counter[str] = Counter()
        self._heap: list[tuple[float, int, str]] = []  # counter, tie-breaker, tenant
        self._num_entered = 0
        self._last_left = ""  # the tenant whose queue became empty most recently

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._add_tenant(tenant, again=bool(seq.num_preemptions))
        self._weights[tenant] = seq.request.weight
        self.num_waiting[tenant] += 1
        queue.push(seq)

    def head(self) -> Sequence | None:
        while self._fix_heap_top():
            tenant = self._heap[0][2]
            seq = self._queues[tenant].head()
            if seq is not None:
                return seq
            heapq.heappop(self._heap)
            del self._queues[tenant]
            self._last_left = tenant
        return None

    def pop(self, seq: Sequence) -> None:
        request = seq.request
        self._queues[request.tenant].pop(seq)
        self._count_out(request.tenant)
        # Tokens of the cached prefix count as computed and cost nothing.
        self._counters[request.tenant] += (len(seq.token_ids) - seq.num_computed) / request.weight

    def discard(self, seq: Sequence) -> None:
        self._queues[seq.request.tenant].discard(seq)
        self._count_out(seq.request.tenant)

    def weights(self) -> dict[str, float]:
        return self._weights

    def _count_out(self, tenant: str) -> None:
        """Note that one fewer waits. The tenant's queue, if empty, stays until it is at the top."""
        self.num_waiting[tenant] -= 1
        if not self.num_waiting[tenant]:
            del self.num_waiting[tenant], self._weights[tenant]

    def _fix_heap_top(self) -> bool:
        """Correct the smallest entry; false if the heap is empty."""
        heap, counters = self._heap, self._counters
        while heap:
            counter, tie, tenant = heap[0]
            if counters[tenant] <= counter:
                return True
            heapq.heapreplace(heap, (counters[tenant], tie, tenant))
        return False

    def _add_tenant(self, tenant: str, *, again: bool) -> WaitingQueue:
        """Add a tenant that starts to wait, and lift its counter to near the least-served one."""
        least = (
            self._heap[0][0] if self._fix_heap_top() else self._counters.get(self._last_left, 0.0)
        )
        own = self._counters.get(tenant, 0.0)
        counter = self._counters[tenant] = max(own, least - _MAX_CREDIT)
        if self._recent is not None:
            self._recent.touch(tenant)
        self._num_entered += 1
        # Among equal counters a new arrival comes first, but not one that was just preempted.
        tie = self._num_entered if again else -self._num_entered
        heapq.heappush(self._heap, (counter, tie, tenant))
        queue = self._queues[tenant] = WaitingQueue(_within_tenant)
        return queue
