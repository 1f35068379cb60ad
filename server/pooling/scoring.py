"""POST /v1/rerank and /v1/score: how well texts go together.

A model with a head that scores reads both texts at once (a cross-encoder); of any other, each text
becomes an embedding, and the score is the cosine of the two.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from operator import mul
from typing import NamedTuple

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.pooling import PoolingParams, relevance
from server.access.caller import Caller
from server.errors import ApiError, bad_field
from server.openai.endpoint import new_id
from server.openai.schema import describe
from server.pooling.encoding import check_number, cut_length, encode_both, encode_inputs
from server.pooling.respond import respond
from server.pooling.shapes import (
    PoolingRequest,
    PoolingUsage,
    RankedDocument,
    Reranked,
    RerankRequest,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from server.pooling.vectors import PooledPrompt, compute_vectors, pooling_of, to_floats
from server.state import Model, ServerState

router = APIRouter()
_INLINE_BYTES = 2**19  # of vectors; more are multiplied on a thread


class Scores(NamedTuple):
    """Of pairs of texts, in order."""

    scores: list[float]
    usage: PoolingUsage


@router.post(
    "/v1/rerank",
    summary="Order documents by their relevance to a query",
    openapi_extra=describe(RerankRequest, Reranked),
)
@router.post("/rerank", include_in_schema=False)
@router.post("/v2/rerank", include_in_schema=False)
async def rerank(request: Request) -> Response:
    """The documents' scores against the query, the most relevant first."""
    return await respond(request, RerankRequest, RerankCall.prepare)


@router.post(
    "/v1/score",
    summary="Score pairs of texts",
    openapi_extra=describe(ScoreRequest, ScoreList),
)
@router.post("/score", include_in_schema=False)
async def score(request: Request) -> Response:
    """How well each pair goes together: one text with several, or as many with as many."""
    return await respond(request, ScoreRequest, ScoreCall.prepare)


class RerankCall:
    """One request for an order, judged and encoded."""

    def __init__(self, model: Model, body: RerankRequest, judge: Judge) -> None:
        self._model = model
        self._body = body
        self._judge = judge

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: RerankRequest) -> RerankCall:
        """Judge the request against the model and encode its texts."""
        model = await state.model()
        model.check_name(body.model)
        check_number("documents", body.documents, state.settings.max_prompts)
        pairs = [(body.query, document) for document in body.documents]
        judge = await make_judge(state, caller, model, body, pairs, "documents")
        return cls(model, body, judge)

    async def complete(self) -> Reranked:
        """The whole answer."""
        body, id = self._body, new_id("rerank")
        scores, usage = await self._judge.scores(id)
        order = sorted(range(len(scores)), key=lambda index: (-scores[index], index))
        wants_texts = body.return_documents is not False
        results = [
            RerankResult(
                index=index,
                relevance_score=scores[index],
                document=RankedDocument(body.documents[index]) if wants_texts else None,
            )
            for index in order[: body.top_n]
        ]
        return Reranked(id=id, model=self._model.name, results=results, usage=usage)


class ScoreCall:
    """One request for scores, judged and encoded."""

    def __init__(self, model: Model, judge: Judge) -> None:
        self._model = model
        self._judge = judge

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: ScoreRequest) -> ScoreCall:
        """Judge the request against the model and encode its texts."""
        model = await state.model()
        model.check_name(body.model)
        for name in ("text_1", "text_2"):
            check_number(name, getattr(body, name), state.settings.max_prompts)
        first, second = body.text_1, body.text_2
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise bad_field("text_2", f"must hold {len(first)} texts, as many as 'text_1'")
        pairs = list(zip(first, second, strict=True))
        return cls(model, await make_judge(state, caller, model, body, pairs, "text_2"))

    async def complete(self) -> ScoreList:
        """The whole answer."""
        id = new_id("score")
        scores, usage = await self._judge.scores(id)
        return ScoreList(
            id=id,
            created=int(time.time()),
            model=self._model.name,
            data=[Score(index=index, score=value) for index, value in enumerate(scores)],
            usage=usage,
        )


# ---------------------------------------------------------------- both kinds of models


class Judge:
    """Pairs of texts, encoded for the kind of model at hand.

    Args:
        prompts: what is submitted.
        places: for each pair the prompts whose cosine is its score, or one prompt that is scored.
    """

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: PoolingRequest,
        prompts: list[PooledPrompt],
        places: list[tuple[int, ...]],
    ) -> None:
        self._state = state
        self._caller = caller
        self._model = model
        self._body = body
        self._prompts = prompts
        self._places = places

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
            for place in self._places
        ]


async def make_judge(
    state: ServerState,
    caller: Caller,
    model: Model,
    body: PoolingRequest,
    pairs: Sequence[tuple[str, str]],
    param: str,
) -> Judge:
    """Encode ``pairs`` for the model; errors about their texts name ``param``.

    Raises:
        ApiError: 400, the model's head does not score, or a text cannot be taken.
        ContextLengthExceeded: texts are longer than the model takes.
    """
    pooling = pooling_of(model)
    limit = cut_length(body.truncate_prompt_tokens, model)
    if pooling.num_labels:
        if pooling.num_labels > 1:
            message = f"This model tells {pooling.num_labels} labels apart; it gives no one score."
            raise ApiError(400, message, param="model")
        prompts = [
            PooledPrompt(ids, PoolingParams(kind=pooling.kind, scores=True, second_from=second))
            for ids, second in await encode_both(pairs, model, limit, param)
        ]
        return Judge(state, caller, model, body, prompts, [(i,) for i in range(len(pairs))])
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))  # each once
    index_of = {text: index for index, text in enumerate(texts)}
    params = PoolingParams(kind=pooling.kind)
    encoded = await encode_inputs(texts, model, limit, param=param)
    prompts = [PooledPrompt(ids, params) for ids in encoded]
    places = [(index_of[first], index_of[second]) for first, second in pairs]
    return Judge(state, caller, model, body, prompts, places)
