"""POST /v1/embeddings: a vector for each input."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from engine.pooling import PoolingParams
from server.access.caller import Caller
from server.errors import bad_field
from server.openai.endpoint import new_id
from server.openai.openapi_schema import describe
from server.pooling.encoding import (
    check_count,
    encode_inputs,
    find_prompt,
    pooling_of,
    truncation_length,
)
from server.pooling.protocol import Embedding, EmbeddingList, EmbeddingRequest, PoolingUsage
from server.pooling.respond import respond
from server.pooling.vectors import (
    PooledPrompt,
    compute_vectors,
    to_base64,
    to_floats,
)
from server.state import Model, ServerState

router = APIRouter()


@router.post(
    "/v1/embeddings",
    summary="Make embeddings of texts",
    openapi_extra=describe(EmbeddingRequest, EmbeddingList),
)
async def create_embeddings(request: Request) -> Response:
    """Embed each text, or list of token ids, in the order of the input."""
    return await respond(request, EmbeddingRequest, EmbeddingCall.prepare)


class EmbeddingCall:
    """A validated and encoded request, ready to be answered once."""

    def __init__(
        self,
        state: ServerState,
        caller: Caller,
        model: Model,
        body: EmbeddingRequest,
        prompts: list[PooledPrompt],
    ) -> None:
        self._state = state
        self._caller = caller
        self._model = model
        self._body = body
        self._prompts = prompts

    @classmethod
    async def prepare(
        cls, state: ServerState, caller: Caller, body: EmbeddingRequest
    ) -> EmbeddingCall:
        """Validate the request against the model and encode its inputs."""
        model = await state.model()
        model.check_name(body.model)
        pooling = pooling_of(model)
        if body.dimensions is not None and body.dimensions > pooling.size:
            problem = f"must be at most {pooling.size}, the size of this model's embeddings"
            raise bad_field("dimensions", problem)
        check_count("input", body.input, state.settings.max_prompts)
        prompt_name = getattr(body, body.prompt_field)
        prompt = find_prompt(pooling, prompt_name, body.prompt_field)
        if prompt_name and not all(isinstance(text, str) for text in body.input):
            raise bad_field(body.prompt_field, "can only stand before texts, not before token ids")
        encoded = await encode_inputs(
            body.input,
            model,
            truncation_length(body.max_tokens, model),
            add_special_tokens=body.add_special_tokens is not False,
            prompt=prompt,
        )
        params = PoolingParams(
            kind=pooling.kind,
            dimensions=body.dimensions,
            normalize=pooling.normalize if body.normalize is None else body.normalize,
        )
        return cls(state, caller, model, body, [PooledPrompt(ids, params) for ids in encoded])

    async def complete(self) -> EmbeddingList:
        """The whole response."""
        vectors = await compute_vectors(
            self._state, self._caller, self._model, self._body, new_id("embd"), self._prompts
        )
        convert: Any = to_base64 if self._body.encoding_format == "base64" else to_floats
        num_tokens = sum(len(prompt.token_ids) for prompt in self._prompts)
        return EmbeddingList(
            data=[
                Embedding(index=i, embedding=convert(vector)) for i, vector in enumerate(vectors)
            ],
            model=self._model.name,
            usage=PoolingUsage(num_tokens, num_tokens),
        )
