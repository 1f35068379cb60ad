"""The effect of a noisy tenant on a quiet one's first tokens, if step time grows with its tokens.

Time is simulated, not measured: a step takes 10 ms and 0.35 ms per token, roughly like a model of
100 million parameters on two cores.
"""

from __future__ import annotations

import random

from engine.config import SchedulerConfig
from engine.kv_cache.pool import BlockPool
from engine.scheduler import Scheduler
from engine.types import Request, SamplingParams, StepResult

_STEP_S, _TOKEN_S = 0.010, 0.00035
_PROMPT, _OUTPUT, _PLACES = 64, 32, 64
_SHARE = 11.0  # requests per second: half of the server's capacity
_QUIET = 0.35  # share of its share that the quiet tenant uses
_MAX_QUEUED = 128  # of the noisy tenant; more are rejected


def arrivals(tenant: str, rate: float, length_s: float, seed: int) -> list[tuple[float, str]]:
    """Arrival times and ids of random requests."""
    rng, now, found = random.Random(f"{tenant}{seed}"), 0.0, []
    while (now := now + rng.expovariate(rate)) < length_s:
        found.append((now, f"{tenant}{len(found)}"))
    return found


def first_tokens(noise: float, length_s: float) -> list[float]:
    """Seconds to the quiet tenant's first tokens while the other sends ``noise`` shares."""
    limits = SchedulerConfig(max_num_seqs=_PLACES, max_num_batched_tokens=256, policy="fair")
    scheduler = Scheduler(limits, BlockPool(4000, 16), max_model_len=400, eos_token_ids=())
    coming = arrivals("quiet", _SHARE * _QUIET, length_s, 1)
    coming = sorted([*coming, *arrivals("noisy", _SHARE * noise, length_s, 2)], reverse=True)
    due: dict[str, float] = {}
    waits: list[float] = []
    now, num_noisy = 0.0, 0
    while now < length_s and (coming or scheduler.has_work):
        now = now if scheduler.has_work else max(now, coming[-1][0])
        while coming and coming[-1][0] <= now:
            moment, id = coming.pop()
            tenant = id[:5]
            if tenant == "noisy" and num_noisy >= _MAX_QUEUED:
                continue
            num_noisy += tenant == "noisy"
            due[id] = moment
            prompt = (1000 + len(coming), *range(_PROMPT - 1))  # no two share a prefix
            sampling = SamplingParams(max_tokens=_OUTPUT)
            scheduler.add(Request(id=id, prompt_token_ids=prompt, sampling=sampling, tenant=tenant))
        plan = scheduler.schedule()
        now += _STEP_S + _TOKEN_S * sum(len(row.token_ids) for row in plan.rows)
        ids = tuple(row.id for row in plan.rows if row.is_sampled)
        output = scheduler.update(plan, StepResult(ids, ((5,),) * len(ids)))
        waits += [now - due[id] for id in ids if id in due and id.startswith("quiet")]
        for id in ids:
            due.pop(id, None)
        num_noisy -= sum(id.startswith("noisy") for id in output.timings)
    return sorted(waits)


def test_ten_times_its_share_costs_others_no_more_than_its_share_does() -> None:
    fair, noisy = (first_tokens(noise, 100.0) for noise in (1.0, 10.0))
    assert len(fair) > 300
    assert len(noisy) >= len(fair) - 2
    once, often = (waits[int(0.99 * len(waits))] for waits in (fair, noisy))
    assert often < once * 1.2, (once, often)
