"""POST /v1/rerank and /v1/score: similarity or relevance of texts."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.access.caller import Caller
from server.errors import bad_field
from server.openai.endpoint import new_id
from server.openai.openapi_schema import describe
from server.pooling.encoding import check_count
from server.pooling.pair_scoring import PairScorer, make_pair_scorer
from server.pooling.protocol import (
    RankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    Score,
    ScoreList,
    ScoreRequest,
)
from server.pooling.respond import respond
from server.state import Model, ServerState

router = APIRouter()

_RERANK, _SCORE = describe(RerankRequest, RerankResponse), describe(ScoreRequest, ScoreList)


@router.post(
    "/v1/rerank", summary="Order documents by their relevance to a query", openapi_extra=_RERANK
)
@router.post("/rerank", summary="The same, by Jina's name", openapi_extra=_RERANK)
@router.post("/v2/rerank", summary="The same, by Cohere's name", openapi_extra=_RERANK)
async def rerank(request: Request) -> Response:
    """Score the documents against the query and sort them, the most relevant first."""
    return await respond(request, RerankRequest, RerankCall.prepare)


@router.post("/v1/score", summary="Score pairs of texts", openapi_extra=_SCORE)
@router.post("/score", summary="The same, by vLLM's name", openapi_extra=_SCORE)
async def score(request: Request) -> Response:
    """Score pairs of texts: one text with several, or two lists of equal length."""
    return await respond(request, ScoreRequest, ScoreCall.prepare)


class RerankCall:
    """A validated and encoded rerank request."""

    def __init__(self, model: Model, body: RerankRequest, scorer: PairScorer) -> None:
        self._model = model
        self._body = body
        self._scorer = scorer

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: RerankRequest) -> RerankCall:
        """Validate the request against the model and encode its texts."""
        model = await state.model()
        model.check_name(body.model)
        check_count("documents", body.documents, state.settings.max_prompts)
        pairs = [(body.query, document) for document in body.documents]
        judge = await make_pair_scorer(state, caller, model, body, pairs, "documents")
        return cls(model, body, judge)

    async def complete(self) -> RerankResponse:
        """The whole response."""
        body, id = self._body, new_id("rerank")
        scores, usage = await self._scorer.scores(id)
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
        return RerankResponse(id=id, model=self._model.name, results=results, usage=usage)


class ScoreCall:
    """A validated and encoded score request."""

    def __init__(self, model: Model, scorer: PairScorer) -> None:
        self._model = model
        self._scorer = scorer

    @classmethod
    async def prepare(cls, state: ServerState, caller: Caller, body: ScoreRequest) -> ScoreCall:
        """Validate the request against the model and encode its texts."""
        model = await state.model()
        model.check_name(body.model)
        one, other = body.text_fields
        first, second = getattr(body, one), getattr(body, other)
        for name, texts in ((one, first), (other, second)):
            check_count(name, texts, state.settings.max_prompts)
        if len(first) == 1:
            first = first * len(second)
        if len(first) != len(second):
            raise bad_field(other, f"must hold {len(first)} texts, as many as {one!r}")
        pairs = list(zip(first, second, strict=True))
        return cls(model, await make_pair_scorer(state, caller, model, body, pairs, other))

    async def complete(self) -> ScoreList:
        """The whole response."""
        id = new_id("score")
        scores, usage = await self._scorer.scores(id)
        return ScoreList(
            id=id,
            created=int(time.time()),
            model=self._model.name,
            data=[Score(index=index, score=value) for index, value in enumerate(scores)],
            usage=usage,
        )
