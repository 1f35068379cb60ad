"""Reads the server's own metrics from ``/metrics``, if it has that page.

Understands the names ``quire:*`` and ``vllm:*``; for other servers there are no figures.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection
from typing import Any

from loadtest.client import Client, HttpError

_SAMPLE = re.compile(r"^(\w+):(\w+)(?:\{.*\})?\s+(\S+)")
_PREFIXES = ("quire", "vllm")
_POLL_S = 0.1


async def scrape(client: Client) -> dict[str, float]:
    """Read every sample by name (without prefix and ``_total``), summed over labels.

    Empty if the server has no metrics page or none that is understood.
    """
    try:
        text = (await client.fetch("GET", "/metrics")).decode("utf-8", "replace")
    except (HttpError, OSError, TimeoutError):
        return {}
    return parse_samples(text)


async def scrape_when_idle(
    client: Client, gauges: Collection[str], patience_s: float
) -> dict[str, float]:
    """Read the samples until all of ``gauges`` are 0, for at most ``patience_s`` seconds.

    The last ones read are returned, in any case.
    """
    samples = await scrape(client)
    for _ in range(int(patience_s / _POLL_S)):
        if samples and not any(samples[name] for name in gauges):
            break
        await asyncio.sleep(_POLL_S)
        samples = await scrape(client)
    return samples


def parse_samples(text: str) -> dict[str, float]:
    """Parse a Prometheus text page into the samples that :func:`scrape` returns."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] in _PREFIXES and not match[2].endswith(("_bucket", "_created")):
            name = match[2].removesuffix("_total")
            samples[name] = samples.get(name, 0.0) + float(match[3])
    return samples


def differences(before: dict[str, float], after: dict[str, float]) -> dict[str, Any]:
    """What the server did during a run, as far as its metrics show.

    ``prefix_hit_rate``, ``acceptance`` (of drafts) and ``kv_waste`` are shares from 0 to 1; the
    last is the mean share, over all steps, of slots in held KV blocks that held no token.
    ``accepted_length`` is the mean number of accepted draft tokens over the steps that had drafts.
    """
    if not after:
        return {}

    def gained(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    told: dict[str, Any] = {}
    for key, name in (
        ("preemptions", "num_preemptions"),
        ("prompt_tokens", "prompt_tokens"),
        ("generation_tokens", "generation_tokens"),
    ):
        if name in after:
            told[key] = round(gained(name))
    if gained("prefix_cache_queries") > 0:
        told["prefix_hit_rate"] = gained("prefix_cache_hits") / gained("prefix_cache_queries")
    if gained("spec_decode_num_drafts") > 0:
        drafts, kept = gained("spec_decode_num_drafts"), gained("spec_decode_num_accepted_tokens")
        told["acceptance"] = kept / gained("spec_decode_num_draft_tokens")
        told["accepted_length"] = kept / drafts
    if gained("kv_slots_held") > 0:
        told["kv_waste"] = gained("kv_slots_wasted") / gained("kv_slots_held")
    return told
