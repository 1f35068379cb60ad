"""Fair shares among tenants: the virtual token counter (VTC).

    Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024.

Each tenant has a counter of the service it was given, over its weight: an admitted sequence counts
1 for each token that has to be computed, and each token that a step chooses counts 2. Whoever
waits and has the smallest counter comes next, so that those who always have something waiting are
served in proportion to their weights, whatever they send; and what one does not use, the others
may. A tenant that comes back after a pause starts near where the least served of those waiting
are: it owes nothing, and has saved up at most a burst. (In the paper it has saved up nothing; then
a tenant that uses a part of its share waits whenever two of its requests come close together.)

The paper admits fairly and lets run whoever runs. Here a tenant that waits also takes places and
blocks back from one that holds more than its share of them, and a long prompt of a tenant that
has been given more does not hold up a short one of a tenant that has been given less. Otherwise
the first tenant to fill the machine would make all others wait for its outputs' ends. Nobody is
left with less than its share that way, and its oldest go last: so they come to their ends.

A step is as long as the tokens in it, and who arrives waits for its end. So while several tenants
come and go, one that has been given more than another and has more waiting than is served gets a
part of each step only for its prompts, and none of a step that computes a prompt of one that has
been given less.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as List

from engine.plan_rows import PlanRows
from engine.scheduler.policy import Shortage
from engine.scheduler.sequence import Sequence
from engine.scheduler.waiting import Waiting, WaitingQueue

_OUTPUT_TOKEN = 2.0  # its cost in tokens of a prompt, as in the paper
_RECENT_STEPS = 1024  # for which a tenant that was served counts as one that may come back
_MAX_RECENT = 256  # such tenants: the last ones
_MANY = 2  # that wait, besides who runs, are more than are served at once
_BURST = 4096.0  # most that a tenant, for a weight of 1, may have left to others and then claims


class FairPolicy:
    """Counters of all tenants there have been."""

    orders_by_rank = False

    def __init__(self) -> None:
        self._counters: dict[str, float] = {}
        self._recent = _Recent(self._counters)
        self._queue = _FairQueue(self._counters, self._recent)

    def rank(self, seq: Sequence) -> tuple[float, ...]:
        """Who has been given most comes last, then by priority and arrival."""
        counter = self._counters[seq.request.tenant]
        return (seq.request.background, counter, *_within_tenant(seq))

    def new_queue(self) -> Waiting:
        """By the tenants' counters."""
        self._queue = _FairQueue(self._counters, self._recent)
        return self._queue

    def charge(self, seqs: List[Sequence], rows: PlanRows) -> None:
        """Raise the counters by the tokens that a step chooses; prompts are counted as a whole."""
        counters = self._counters
        tenants: set[str] = set()
        for place, seq in enumerate(seqs):
            if place not in rows.silent:
                tenant = seq.request.tenant
                tenants.add(tenant)
                counters[tenant] += _OUTPUT_TOKEN / seq.request.weight
        self._recent.end_step(tenants)

    def grant(self, seq: Sequence, num_tokens: int) -> None:
        """Raise the counter by drafts that were kept."""
        self._counters[seq.request.tenant] += num_tokens * _OUTPUT_TOKEN / seq.request.weight

    def behind(self, running: Iterable[Sequence], head: Sequence) -> list[Sequence]:
        """Who has a prompt to compute, of a tenant that has been given more."""
        tenant = head.request.tenant
        least = self._counters[tenant]
        return sorted(
            (
                seq
                for seq in running
                if seq.num_tokens - seq.num_computed > 1
                and seq.request.tenant != tenant
                and self._counters[seq.request.tenant] >= least
            ),
            key=self.rank,
        )

    def yields(self, seq: Sequence) -> bool:
        """Whether its tenant has more waiting, and another of late has been given less."""
        tenant, counters = seq.request.tenant, self._counters
        if self._queue.num_waiting(tenant) < _MANY:
            return False
        return counters[tenant] > counters[self._recent.least(tenant)]

    def victim(
        self, head: Sequence, running: Iterable[Sequence], waiting: Waiting, short: Shortage
    ) -> Sequence | None:
        """The last of who holds more than its share, for one that then holds no more than its."""
        assert isinstance(waiting, _FairQueue)
        running = list(running)
        held: Counter[str] = Counter()
        weights = dict(waiting.weights())
        for seq in running:
            held[seq.request.tenant] += short.held(seq)
            weights[seq.request.tenant] = seq.request.weight
        share = short.total / sum(weights.values())  # of a weight of 1
        own, counters = head.request.tenant, self._counters
        if held[own] + short.needed > weights[own] * share:
            return None
        over = {
            tenant
            for tenant, count in held.items()
            if tenant != own
            and count > weights[tenant] * share
            and counters[tenant] >= counters[own]  # else it would be back at once
        }
        candidates = (seq for seq in running if seq.request.tenant in over)
        return max(candidates, key=self.rank, default=None)


def _within_tenant(seq: Sequence) -> tuple[float, ...]:
    return (seq.request.priority, seq.order)


class _Recent:
    """The tenants that came, or were served, in the last steps."""

    def __init__(self, counters: dict[str, float]) -> None:
        self._counters = counters
        self._num_steps = 0
        self._last: dict[str, int] = {}  # step of each, the earliest first
        self._least: str | None = None  # None: not looked for

    def come(self, tenant: str) -> None:
        """A tenant that did not wait does."""
        self._last.pop(tenant, None)
        self._last[tenant] = self._num_steps
        self._least = None

    def end_step(self, tenants: Iterable[str]) -> None:
        """A step serves these; who was not here for long is forgotten."""
        self._num_steps += 1
        for tenant in tenants:
            self.come(tenant)
        last, oldest = self._last, self._num_steps - _RECENT_STEPS
        while last and (last[first := next(iter(last))] < oldest or len(last) > _MAX_RECENT):
            del last[first]
        self._least = None

    def least(self, default: str) -> str:
        """Who had been given least when the step first asked; ``default`` if there is nobody."""
        if self._least is None:
            self._least = min(self._last, key=self._counters.__getitem__, default=default)
        return self._least


class _FairQueue:
    """Those in the background apart, behind the others; each kind by its tenants' counters."""

    def __init__(self, counters: dict[str, float], recent: _Recent) -> None:
        self._kinds = (_TenantQueues(counters, recent), _TenantQueues(counters, None))

    def push(self, seq: Sequence) -> None:
        """Queue ``seq``."""
        self._kinds[seq.request.background].push(seq)

    def head(self) -> Sequence | None:
        """The first of the tenant with the smallest counter."""
        first, behind = self._kinds
        return first.head() or behind.head()

    def pop(self, seq: Sequence) -> None:
        """Take the head off."""
        self._kinds[seq.request.background].pop(seq)

    def discard(self, seq: Sequence) -> None:
        """Note that a queued sequence is no longer WAITING."""
        self._kinds[seq.request.background].discard(seq)

    def weights(self) -> dict[str, float]:
        """The weights of the tenants that wait, not in the background."""
        return self._kinds[0].weights()

    def num_waiting(self, tenant: str) -> int:
        """How many of a tenant's sequences wait, not in the background."""
        return self._kinds[0].num_waiting[tenant]


class _TenantQueues:
    """A queue for each tenant, and a heap of the tenants whose queues are not empty.

    Counters only rise. So a tenant's entry in the heap may be too small but never too large: it is
    put right when it comes up, and serving costs nothing here. O(log tenants) amortised.
    """

    def __init__(self, counters: dict[str, float], recent: _Recent | None) -> None:
        self._counters = counters
        self._recent = recent
        self._queues: dict[str, WaitingQueue] = {}
        self._weights: dict[str, float] = {}
        self.num_waiting: Counter[str] = Counter()
        self._heap: list[tuple[float, int, str]] = []  # counter, tie-breaker, tenant
        self._num_entered = 0
        self._last_left = ""  # the tenant whose queue was the last to become empty

    def push(self, seq: Sequence) -> None:
        tenant = seq.request.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._enter(tenant, again=bool(seq.num_preemptions))
        self._weights[tenant] = seq.request.weight
        self.num_waiting[tenant] += 1
        queue.push(seq)

    def head(self) -> Sequence | None:
        while self._settle():
            tenant = self._heap[0][2]
            seq = self._queues[tenant].head()
            if seq is not None:
                return seq
            heapq.heappop(self._heap)
            del self._queues[tenant], self._weights[tenant], self.num_waiting[tenant]
            self._last_left = tenant
        return None

    def pop(self, seq: Sequence) -> None:
        request = seq.request
        self._queues[request.tenant].pop(seq)
        self.num_waiting[request.tenant] -= 1
        # What its cached prefix spares is computed already.
        self._counters[request.tenant] += (len(seq.token_ids) - seq.num_computed) / request.weight

    def discard(self, seq: Sequence) -> None:
        self._queues[seq.request.tenant].discard(seq)
        self.num_waiting[seq.request.tenant] -= 1

    def weights(self) -> dict[str, float]:
        return self._weights

    def _settle(self) -> bool:
        """Put the smallest entry right. Returns whether there is one."""
        heap, counters = self._heap, self._counters
        while heap:
            counter, tie, tenant = heap[0]
            if counters[tenant] <= counter:
                return True
            heapq.heapreplace(heap, (counters[tenant], tie, tenant))
        return False

    def _enter(self, tenant: str, *, again: bool) -> WaitingQueue:
        """A tenant that did not wait does: lift its counter to about that of the least served."""
        least = self._heap[0][0] if self._settle() else self._counters.get(self._last_left, 0.0)
        own = self._counters.get(tenant, 0.0)
        counter = self._counters[tenant] = max(own, least - _BURST)
        if self._recent is not None:
            self._recent.come(tenant)
        self._num_entered += 1
        # Among equals the one that has just come is first, but not the one just preempted.
        tie = self._num_entered if again else -self._num_entered
        heapq.heappush(self._heap, (counter, tie, tenant))
        queue = self._queues[tenant] = WaitingQueue(_within_tenant)
        return queue
