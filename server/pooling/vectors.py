"""Computation of prompts' vectors by the engine, shared by the pooling endpoints."""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from engine.errors import RequestFailed
from engine.pooling import PoolingParams
from engine.text.output import TextDelta
from engine.types import RequestOutput, SamplingParams
from server.access.caller import Caller
from server.openai.choice import Choice, Job
from server.openai.generation import Generation
from server.pooling.protocol import PoolingRequest
from server.state import Model, ServerState

# Sequences submitted at once, so that a larger request takes no larger part of the queue.
_MAX_SEQS_PER_WAVE = 256
_NO_TOKENS = SamplingParams(max_tokens=0)


class PooledPrompt(NamedTuple):
    """A prompt, and the kind of vector to make of it."""

    token_ids: list[int]
    params: PoolingParams


async def compute_vectors(
    state: ServerState,
    caller: Caller,
    model: Model,
    body: PoolingRequest,
    id: str,
    prompts: Sequence[PooledPrompt],
) -> list[bytes]:
    """Compute the vector of each prompt, in order: little-endian float32.

    The prompts run as one batch of sequences, or several if there are very many.

    Raises:
        ApiError: 503, the queue is full.
        RequestError: the engine refused one of them.
        RequestFailed: one failed because of a fault in the server.
        EngineDead: the engine is gone.
    """
    size = min(_MAX_SEQS_PER_WAVE, state.admission.max_sequences)
    while True:
        generation = state.engine.info.generation
        vectors: list[bytes] = []
        for first in range(0, len(prompts), size):
            wave = prompts[first : first + size]
            wave_id = id if len(prompts) <= size else f"{id}.{first}"
            place = first > 0, first + size < len(prompts)
            with _PoolingGeneration(state, caller, model, body, wave_id, wave, place) as pooling:
                vectors += await pooling.vectors()
        # The weights may be replaced between two batches, and vectors of both are not comparable.
        if len(prompts) <= size or state.engine.info.generation == generation:
            return vectors


def to_floats(vector: bytes) -> tuple[float, ...]:
    """The numbers of a vector; each has exactly the value of its float32."""
    return struct.unpack(f"<{len(vector) // 4}f", vector)


def to_base64(vector: bytes) -> str:
    """Base64 that clients decode as little-endian float32."""
    return base64.b64encode(vector).decode("ascii")


class _PoolingGeneration(Generation):
    """Sequences that end without output tokens, each with a vector.

    ``place`` is whether others precede it, and follow it, in the same request.
    """

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: PoolingRequest,
        id: str,
        prompts: Sequence[PooledPrompt],
        place: tuple[bool, bool],
    ) -> None:
        super().__init__(
            state,
            model,
            id,
            [Job(prompt.token_ids, _NO_TOKENS) for prompt in prompts],
            priority=body.priority or 0,
            cache_salt=body.cache_salt or "",
            caller=caller,
            follows=place[0],
            is_followed=place[1],
        )
        self._params = [prompt.params for prompt in prompts]
        self._vectors: list[bytes | None] = [None] * len(prompts)

    @property
    def operation(self) -> str:
        """See ``Generation.operation``."""
        return "embeddings"

    async def vectors(self) -> list[bytes]:
        """The prompts' vectors in order, once all have ended. Raises as ``steps`` does."""
        async for _ in self.steps():
            pass
        whole = [vector for vector in self._vectors if vector is not None]
        if len(whole) < len(self._vectors):
            raise RequestFailed("the engine returned no vector")
        return whole

    def _make_choices(self) -> list[Choice]:
        choices = super()._make_choices()
        for choice, params in zip(choices, self._params, strict=True):
            choice.request = msgspec.structs.replace(choice.request, pooling=params)
        return choices

    def _process_output(self, choice: Choice, output: RequestOutput) -> TextDelta:
        self._vectors[choice.index] = output.embedding
        return super()._process_output(choice, output)
