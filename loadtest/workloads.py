"""Workloads: seeded lists of prompts and output lengths.

    fixed           all prompts of one length, and all outputs
    random          lengths drawn uniformly around the given ones
    shared-prefix   one long prefix shared by all prompts, followed by a part of their own
    chat            lengths as in conversations: most short, a few long (log-normal)

The same seed gives the same requests on every server.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

WorkloadName = Literal["fixed", "random", "shared-prefix", "chat"]
WORKLOADS: tuple[WorkloadName, ...] = ("fixed", "random", "shared-prefix", "chat")

PLAIN_TOKENS = range(300, 1300)  # ids in every vocabulary, none of them special

# Sigma of the natural logarithm of lengths. Public logs of assistant conversations have heavy tails
# of about this width: the 95th percentile is some five times the median.
_CHAT_SIGMA = 1.0


@dataclass(frozen=True)
class Shape:
    """Lengths in tokens."""

    workload: WorkloadName = "fixed"
    input_len: int = 256  # of a prompt; the mean, for chat
    output_len: int = 64  # of an output; the mean, for chat
    range_ratio: float = 0.5  # random: lengths within [len * (1 - ratio), len * (1 + ratio)]
    prefix_len: int = 0  # shared-prefix: how much of input_len all prompts share
    max_total: int | None = None  # largest sum of prompt and output


@dataclass(frozen=True)
class Lengths:
    """The lengths of one request, in tokens."""

    shared: int  # the prefix that all prompts share
    own: int
    output: int


def draw_lengths(shape: Shape, count: int, rng: random.Random) -> list[Lengths]:
    """Draw the lengths of ``count`` requests of ``shape``."""
    return [_fit(_draw(shape, rng), shape.max_total) for _ in range(count)]


def _draw(shape: Shape, rng: random.Random) -> Lengths:
    match shape.workload:
        case "fixed":
            return Lengths(0, shape.input_len, shape.output_len)
        case "random":
            own = _uniform(shape.input_len, shape.range_ratio, rng)
            return Lengths(0, own, _uniform(shape.output_len, shape.range_ratio, rng))
        case "shared-prefix":
            shared = min(shape.prefix_len or shape.input_len * 3 // 4, shape.input_len - 1)
            return Lengths(shared, shape.input_len - shared, shape.output_len)
        case "chat":
            own = _log_normal(shape.input_len, rng)
            return Lengths(0, own, _log_normal(shape.output_len, rng))


def _uniform(middle: int, ratio: float, rng: random.Random) -> int:
    return max(1, rng.randint(round(middle * (1 - ratio)), round(middle * (1 + ratio))))


def _log_normal(mean: int, rng: random.Random) -> int:
    """A length of the given mean: exp(N(mu, sigma)) has mean exp(mu + sigma^2 / 2)."""
    mu = math.log(mean) - _CHAT_SIGMA**2 / 2
    return max(1, round(rng.lognormvariate(mu, _CHAT_SIGMA)))


def _fit(lengths: Lengths, max_total: int | None) -> Lengths:
    """Shorten ``lengths`` to fit the context, the prompt first."""
    if max_total is None or lengths.shared + lengths.own + lengths.output <= max_total:
        return lengths
    output = min(lengths.output, max_total // 2)
    own = max(1, max_total - lengths.shared - output)
    return Lengths(lengths.shared, own, output)


# ---------------------------------------------------------------- text

_ONSETS = ("b", "br", "c", "ch", "d", "f", "g", "h", "l", "m", "n", "p", "r", "s", "st", "t", "w")
_VOWELS = ("a", "e", "i", "o", "u", "ai", "ea", "ou")
_CODAS = ("", "", "n", "r", "s", "t", "l", "nd", "ck")


def make_words(count: int, rng: random.Random) -> list[str]:
    """``count`` pronounceable words of one to three syllables; no existing text is copied."""
    return ["".join(_syllable(rng) for _ in range(rng.choice((1, 2, 2, 3)))) for _ in range(count)]


def make_text(count: int, rng: random.Random) -> str:
    """``count`` words, as sentences of about ten."""
    words = make_words(count, rng)
    for start in range(0, count, 10):
        words[start] = words[start].capitalize()
        words[min(start + 9, count - 1)] += "."
    return " ".join(words)


def _syllable(rng: random.Random) -> str:
    return rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_CODAS)


# ---------------------------------------------------------------- prompts

Prompt = str | list[int]


@dataclass(frozen=True)
class SampleRequest:
    """One request: its prompt, and the largest number of output tokens."""

    prompt: Prompt
    max_tokens: int


def make_requests(
    lengths: Sequence[Lengths],
    rng: random.Random,
    *,
    token_pool: Sequence[int] | None = None,
    tokens_per_word: float = 1.0,
) -> list[SampleRequest]:
    """Build the requests of the given lengths.

    Args:
        lengths: the lengths of each request.
        rng: the source of their contents.
        token_pool: ids to draw prompts from, so that lengths are exact; without it, prompts are
            text made of words.
        tokens_per_word: the ratio for the server's tokenizer, used for text.
    """
    longest = max((item.shared for item in lengths), default=0)

    def make(count: int) -> Prompt:
        if token_pool is not None:
            return rng.choices(token_pool, k=count)
        return make_text(max(1, round(count / tokens_per_word)), rng)

    prefix = make(longest) if longest else None
    asks = []
    for item in lengths:
        own = make(item.own)
        if isinstance(prefix, list) and isinstance(own, list):
            own = prefix[: item.shared] + own
        elif isinstance(prefix, str) and isinstance(own, str):
            own = f"{prefix} {own}"
        asks.append(SampleRequest(own, item.output))
    return asks
