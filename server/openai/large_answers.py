"""The choices of whole responses, made one by one so that the event loop stays free.

The log-probabilities of one long choice are a hundred thousand objects, and a response may have 128
choices. Each choice is encoded as soon as it is built, so that the objects of only one exist at a
time: collecting the garbage of all would stop every thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from server.openai.best_of import ChoiceOutput
from server.openai.outputs import to_json

_INLINE_ENTRIES = 256  # positions with log-probabilities, each with up to 20 alternatives


async def build_choices(
    build: Callable[[int, ChoiceOutput], msgspec.Struct], wholes: Sequence[ChoiceOutput]
) -> list[Any]:
    """``build(index, whole)`` for each choice, as JSON; large ones are built on a thread."""

    def encoded(index: int, whole: ChoiceOutput) -> msgspec.Raw:
        return msgspec.Raw(to_json(build(index, whole)))

    built: list[Any] = []
    num_entries = 0  # since the event loop last ran
    for index, whole in enumerate(wholes):
        size = len(whole.logprobs) + len(whole.choice.prompt_logprobs)
        num_entries += size
        if size > _INLINE_ENTRIES:
            built.append(await asyncio.to_thread(encoded, index, whole))
        else:
            built.append(encoded(index, whole))
        if num_entries > _INLINE_ENTRIES:
            await asyncio.sleep(0)
            num_entries = 0
    return built
