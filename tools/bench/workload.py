"""The 256-sequence benchmark: prompts and outputs of 100 to 1024 tokens, from seed 0."""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """One sequence."""

    prompt: list[int]
    num_output: int


def make_jobs(count: int, *, longest: int = 1024, shortest: int = 100) -> list[Job]:
    """Make ``count`` sequences.

    All prompts are drawn before the first output length, so that 256 of them have the 142,827 input
    and 133,966 output tokens of published results.
    """
    rng = random.Random(0)
    prompts = [
        [rng.randint(0, 10_000) for _ in range(rng.randint(shortest, longest))]
        for _ in range(count)
    ]
    return [Job(prompt, rng.randint(shortest, longest)) for prompt in prompts]


def full_jobs(*, is_tiny: bool) -> list[Job]:
    """The whole benchmark."""
    return make_jobs(6, longest=24, shortest=4) if is_tiny else make_jobs(256)


def sample_jobs(*, is_tiny: bool) -> list[Job]:
    """The first quarter of the benchmark, for slow peers."""
    jobs = full_jobs(is_tiny=is_tiny)
    return jobs[: max(2, len(jobs) // 4)]
