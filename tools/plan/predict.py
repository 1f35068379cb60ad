"""From traffic and limits to latencies, a replica's maximum rate, and the replicas needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from loadtest.summary import spread
from tools.plan.simulate import Replica, simulate
from tools.plan.traffic import Arrival, at_rate, rate_of

_PRECISION = 0.03  # relative precision of the greatest rate


class Slo(msgspec.Struct, frozen=True):
    """Limits that 99 of 100 requests must meet, in milliseconds; None: no limit."""

    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None


class Prediction(msgspec.Struct, frozen=True):
    """One replica's performance at one rate. Spreads have mean, p50, p95, p99, min and max."""

    rate: float  # requests per second
    requests: int
    refused: int  # requests that could never fit the context or the KV cache
    output_tokens_per_s: float
    ttft_ms: dict[str, float] | None
    tpot_ms: dict[str, float] | None
    e2e_ms: dict[str, float] | None
    preemptions: int

    @property
    def is_short(self) -> bool:
        """Whether all requests come within the time that one takes.

        Then no steady state is reached, and a rate within the limits says nothing about longer
        traffic.
        """
        return self.e2e_ms is not None and self.requests / self.rate < self.e2e_ms["p50"] / 1e3

    def meets(self, slo: Slo) -> bool:
        """Whether the limits are met."""
        return not self.refused and all(
            limit is None or found is None or found["p99"] <= limit
            for limit, found in (
                (slo.ttft_p99_ms, self.ttft_ms),
                (slo.tpot_p99_ms, self.tpot_ms),
            )
        )


def predict(replica: Replica, arrivals: Sequence[Arrival], front_ms: float = 0.0) -> Prediction:
    """Predict the latencies of requests.

    Args:
        replica: the replica that serves them all.
        arrivals: the requests, ordered by time.
        front_ms: the latency outside the engine, added to each first token.
    """
    simulated = simulate(replica, arrivals)
    outcomes = simulated.outcomes
    return Prediction(
        rate=rate_of(arrivals),
        requests=len(outcomes),
        refused=simulated.num_rejected,
        output_tokens_per_s=simulated.num_output / max(simulated.duration_s, 1e-9),
        ttft_ms=spread([each.ttft_s * 1e3 + front_ms for each in outcomes]),
        tpot_ms=spread([each.tpot_s * 1e3 for each in outcomes if each.tpot_s is not None]),
        e2e_ms=spread([each.e2e_s * 1e3 + front_ms for each in outcomes]),
        preemptions=sum(each.num_preemptions for each in outcomes),
    )


def find_max_rate(
    replica: Replica, arrivals: Sequence[Arrival], slo: Slo, front_ms: float = 0.0
) -> Prediction | None:
    """The highest rate at which one replica meets the limits, by bisection.

    The same requests arrive at each rate, closer together or further apart. None if not even a
    single request alone meets the limits.
    """

    def at(rate: float) -> Prediction:
        return predict(replica, at_rate(arrivals, rate), front_ms)

    alone = predict(replica, arrivals[:1], front_ms).e2e_ms
    if alone is None:
        return None
    # So far apart that about one is in flight: close to what is needed to find the rest quickly.
    first = at(1e3 / max(alone["max"], 1e-3))
    if first.meets(slo):
        low, high = first, first.rate
        while True:
            high *= 2.0
            found = at(high)
            if not found.meets(slo):
                break
            low = found
            if high > 1e6:
                return low  # nothing limits the rate; see Prediction.is_short
    else:
        high = first.rate
        low = at(high / len(arrivals))  # each request is alone, or nearly so
        if not low.meets(slo):
            return None
    while high / low.rate > 1.0 + _PRECISION:
        found = at((high * low.rate) ** 0.5)
        if found.meets(slo):
            low = found
        else:
            high = found.rate
    return low


def replicas_for(
    replica: Replica,
    arrivals: Sequence[Arrival],
    slo: Slo,
    rate: float,
    at_max_rate: Prediction,
    front_ms: float = 0.0,
) -> tuple[int, Prediction]:
    """How many replicas meet the limits at ``rate``, and the performance of each.

    Each gets an equal share, as of a Poisson process that is split at random; a load balancer that
    looks at queues does no worse.

    Args:
        replica: one of them.
        arrivals: the requests with which each is simulated, at its share of the rate.
        slo: the limits.
        rate: requests per second, over all replicas.
        at_max_rate: the greatest rate of one replica, from ``find_max_rate``.
        front_ms: see ``predict``.
    """
    # Start below the estimate by the precision of the greatest rate, since fewer may suffice.
    count = max(1, math.ceil(rate / (at_max_rate.rate * (1 + _PRECISION))))
    while True:
        found = predict(replica, at_rate(arrivals, rate / count), front_ms)
        if found.meets(slo):
            return count, found
        count += max(1, count // 100)
