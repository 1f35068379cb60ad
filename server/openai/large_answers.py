"""Whole responses, made and encoded choice by choice so that the event loop stays free.

The log-probabilities of one long choice are a hundred thousand objects, and a response may have 128
choices.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from server.openai.best_of import ChoiceOutput
from server.openai.outputs import to_json

_T = TypeVar("_T")
_INLINE_ENTRIES = 256  # positions with log-probabilities, each with up to 20 alternatives
_INLINE_BYTES = 64 * 1024


async def build_choices(
    build: Callable[[int, ChoiceOutput], _T], wholes: Sequence[ChoiceOutput]
) -> list[_T]:
    """``build(index, whole)`` for each choice; large ones are built on a thread."""
    built: list[_T] = []
    num_entries = 0  # since the event loop last ran
    for index, whole in enumerate(wholes):
        size = len(whole.logprobs) + len(whole.choice.prompt_logprobs)
        num_entries += size
        if size > _INLINE_ENTRIES:
            built.append(await asyncio.to_thread(build, index, whole))
        else:
            built.append(build(index, whole))
        if num_entries > _INLINE_ENTRIES:
            await asyncio.sleep(0)
            num_entries = 0
    return built


async def encode_answer(answer: Any) -> bytes:
    """``answer`` as JSON.

    The encoder keeps the interpreter's lock, so a thread would not help: the event loop runs
    between the choices instead.
    """
    choices = getattr(answer, "choices", ())
    if len(choices) < 2:
        return to_json(answer)
    encoded: list[msgspec.Raw] = []
    num_bytes = 0  # since the event loop last ran
    for choice in choices:
        data = to_json(choice)
        encoded.append(msgspec.Raw(data))
        num_bytes += len(data)
        if num_bytes > _INLINE_BYTES:
            await asyncio.sleep(0)
            num_bytes = 0
    return to_json(msgspec.structs.replace(answer, choices=encoded))
