"""Scores of pairs of texts, by a cross-encoder or by embeddings.

A model with a scoring head reads both texts at once (a cross-encoder). With any other model each
text is embedded, and the score is the cosine similarity of the two.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from engine.pooling import PoolingParams, relevance
from server.access.caller import Caller
from server.errors import ApiError
from server.pooling.encoding import (
    encode_inputs,
    encode_text_pairs,
    pooling_of,
    truncation_length,
)
from server.pooling.protocol import PairRequest, PoolingRequest, PoolingUsage
from server.pooling.vectors import PooledPrompt, compute_vectors, to_floats
from server.state import Model, ServerState

_INLINE_BYTES = 2**19  # of vectors; more are multiplied on a thread


class Scores(NamedTuple):
    """Scores of pairs of texts, in order."""

    scores: list[float]
    usage: PoolingUsage


class PairScorer:
    """Pairs of texts, encoded for the model's kind of scoring.

    Args:
        prompts: to be submitted.
        prompt_indices: for each pair, the two prompts whose cosine is its score, or the prompt that
            is scored.
    """

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: PoolingRequest,
        prompts: list[PooledPrompt],
        prompt_indices: list[tuple[int, ...]],
    ) -> None:
        self._state = state
        self._caller = caller
        self._model = model
        self._body = body
        self._prompts = prompts
        self._prompt_indices = prompt_indices

    async def scores(self, id: str) -> Scores:
        """Compute them. Raises as ``compute_vectors`` does."""
        vectors = await compute_vectors(
            self._state, self._caller, self._model, self._body, id, self._prompts
        )
        if sum(map(len, vectors)) <= _INLINE_BYTES:
            scores = self._compare(vectors)
        else:
            scores = await asyncio.to_thread(self._compare, vectors)
        num_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        return Scores(scores, PoolingUsage(num_tokens, num_tokens))

    def _compare(self, vectors: Sequence[bytes]) -> list[float]:
        numbers = [to_floats(vector) for vector in vectors]
        pooling = pooling_of(self._model)
        return [
            relevance(numbers[place[0]][0], pooling)
            if len(place) == 1
            else sum(map(mul, numbers[place[0]], numbers[place[1]]))
            for place in self._prompt_indices
        ]


async def make_pair_scorer(
    state: ServerState,
    caller: Caller,
    model: Model,
    body: PairRequest,
    pairs: Sequence[tuple[str, str]],
    param: str,
) -> PairScorer:
    """Encode ``pairs`` for the model; errors about their texts name ``param``.

    Raises:
        ApiError: 400, the model's head does not score, or a text is invalid.
        ContextLengthExceeded: texts are longer than the model's context.
        InvalidParameter: the model takes no instruction.
    """
    pooling = pooling_of(model)
    prompt = pooling.instruction_of(body.instruction)
    limit = truncation_length(body.max_tokens, model)
    if pooling.num_labels:
        if pooling.num_labels > 1:
            message = (
                f"This model classifies into {pooling.num_labels} labels; it gives no single score."
            )
            raise ApiError(400, message, param="model")
        prompts = [
            PooledPrompt(ids, pooling.score_params(second))
            for ids, second in await encode_text_pairs(
                pairs, model, limit, prompt=prompt, param=param
            )
        ]
        return PairScorer(state, caller, model, body, prompts, [(i,) for i in range(len(pairs))])
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each once
    index_of = {text: index for index, text in enumerate(texts)}
    params = PoolingParams(kind=pooling.kind)
    encoded = await encode_inputs(texts, model, limit, prompt=prompt, param=param)
    prompts = [PooledPrompt(ids, params) for ids in encoded]
    places = [(index_of[first], index_of[second]) for first, second in pairs]
    return PairScorer(state, caller, model, body, prompts, places)
