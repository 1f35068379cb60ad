"""Normalises the arguments that callers of the offline ``LLM`` may pass."""

from __future__ import annotations

import contextlib
import operator
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, cast

from engine.argument_types import show
from engine.beam_search import BeamParams
from engine.errors import InvalidParameter
from engine.types import SamplingParams

Prompt = str | Sequence[int]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, from one or several. Raises InvalidParameter if there is none."""
    several: list[object] = [prompts]
    if not isinstance(prompts, str | bytes | Mapping):
        with contextlib.suppress(TypeError):  # it is no list, and no prompt
            several = list(prompts)
            if several and isinstance(several[0], int):
                several = [several]
    return [as_prompt(cast("Prompt", prompt)) for prompt in several]


def as_prompt(prompt: Prompt) -> Prompt:
    """A text, or a list of token ids. Raises InvalidParameter if it is neither."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, bytes | Mapping):
        with contextlib.suppress(TypeError):
            return [*map(operator.index, prompt)]
    raise InvalidParameter(f"a prompt is a text or a list of token ids, not {show(prompt)}")


def as_params(params: SamplingParams | None) -> SamplingParams:
    """The parameters, by default those of the class. Raises InvalidParameter if they are none."""
    if params is None:
        return SamplingParams()
    if not isinstance(params, SamplingParams):
        raise InvalidParameter(f"parameters are SamplingParams, not {show(params)}")
    return params


def as_beams(beams: BeamParams | None) -> BeamParams:
    """How to search, by default that of the class. Raises InvalidParameter for no BeamParams."""
    if beams is None:
        return BeamParams()
    if not isinstance(beams, BeamParams):
        raise InvalidParameter(f"beams are BeamParams, not {show(beams)}")
    return beams


def params_for(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    """The parameters of each of ``count`` prompts.

    Raises:
        InvalidParameter: there are more or fewer, or they are something else.
    """
    if not isinstance(params, Sequence):
        return [as_params(cast("SamplingParams | None", params))] * count
    if len(params) != count:
        raise InvalidParameter(f"{count} prompts but {len(params)} sets of parameters")
    return [*map(as_params, params)]


def check_conversation(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidParameter for what is no list of messages."""
    is_list = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not is_list or not all(isinstance(message, Mapping) for message in messages):
        raise InvalidParameter(
            "a conversation is a list of messages such as {'role': 'user', 'content': 'Hello'}, "
            f"not {show(messages)}"
        )


def new_id() -> str:
    """A fresh id for a request."""
    return f"offline-{secrets.token_hex(8)}"
