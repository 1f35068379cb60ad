"""What callers of the offline ``LLM`` may hand in, brought into one form."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

from engine.errors import InvalidParameter
from engine.types import SamplingParams

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, of one or of several."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts. Raises InvalidParameter for too many or few."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidParameter(f"{count} prompts but {len(params)} sets of parameters")
    return list(params)


def new_id() -> str:
    """A fresh id for a request."""
    return f"offline-{secrets.token_hex(8)}"
