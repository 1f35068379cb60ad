"""Normalises the arguments that callers of the offline ``LLM`` may pass."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import cast

from engine.errors import InvalidParameter
from engine.types import SamplingParams

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several."""
    if isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [cast("Prompt", prompts)]
    return list(cast("Sequence[Prompt]", prompts))


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts. Raises InvalidParameter on a wrong number."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise InvalidParameter(f"{count} prompts but {len(params)} sets of parameters")
    return list(params)


def new_id() -> str:
    """A fresh id for a request."""
    return f"offline-{secrets.token_hex(8)}"
