"""Arrival times and lengths of requests, random or from a trace."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from loadtest.workloads import Shape, draw_lengths


class Arrival(NamedTuple):
    """One request."""

    at_s: float
    num_prompt: int  # tokens
    num_output: int
    num_shared: int = 0  # first prompt tokens that all requests share


class TraceLine(msgspec.Struct, forbid_unknown_fields=True):
    """A line of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class TraceError(ValueError):
    """A trace cannot be used; the message is one line that names the file and line."""


def draw(shape: Shape, rate: float, count: int, seed: int) -> list[Arrival]:
    """Draw ``count`` requests at the times of a Poisson process of ``rate`` requests per second.

    The same seed gives the same lengths at any rate, and the same gaps up to scale. They are those
    that ``quire bench --rate`` sends in its first run with the same seed.
    """
    rng = random.Random(f"{seed} arrivals")
    gaps = (rng.expovariate(rate) for _ in range(count - 1))
    times = itertools.accumulate(gaps, initial=0.0)
    lengths = draw_lengths(shape, count, random.Random(f"{seed} run 0"))
    return [
        Arrival(at_s, each.shared + each.own, each.output, each.shared)
        for at_s, each in zip(times, lengths, strict=True)
    ]


def read_trace(path: Path) -> list[Arrival]:
    """Read the requests of a JSON Lines file, one :class:`TraceLine` per line.

    Raises:
        TraceError: a line is invalid, or there is none.
        OSError: the file cannot be read.
    """
    decoder = msgspec.json.Decoder(TraceLine)
    arrivals: list[Arrival] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if not line.strip():
            continue
        try:
            item = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise TraceError(f"{path}, line {number}: {error}") from None
        if item.at_s < 0 or item.prompt_tokens < 1 or item.output_tokens < 1:
            problem = "at_s must not be negative, and there must be tokens"
            raise TraceError(f"{path}, line {number}: {problem}")
        arrivals.append(Arrival(item.at_s, item.prompt_tokens, item.output_tokens))
    if not arrivals:
        raise TraceError(f"{path}: there is no request in it")
    return sorted(arrivals)


def rate_of(arrivals: Sequence[Arrival]) -> float:
    """Requests per second, from the first to the last."""
    span_s = arrivals[-1].at_s - arrivals[0].at_s
    return (len(arrivals) - 1) / span_s if span_s > 0 else float(len(arrivals))


def at_rate(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """The same requests, with their times scaled to ``rate`` requests per second."""
    scale, first_s = rate_of(arrivals) / rate, arrivals[0].at_s
    return [arrival._replace(at_s=(arrival.at_s - first_s) * scale) for arrival in arrivals]
