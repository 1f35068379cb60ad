"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.openai.endpoint import json_response, state_of
from server.openai.outputs import ModelCard, ModelList
from server.openai.schema import describe
from server.state import Model

router = APIRouter()


@router.get("/v1/models", summary="List the models", openapi_extra=describe(None, ModelList))
async def list_models(request: Request) -> Response:
    """The names under which the model is served."""
    model = await state_of(request).model()
    return json_response(ModelList(data=[_card(model, name) for name in model.names]))


# A name may hold a slash, as in org/name.
@router.get(
    "/v1/models/{model_id:path}",
    summary="Describe a model",
    openapi_extra=describe(None, ModelCard),
)
async def retrieve_model(request: Request, model_id: str) -> Response:
    """One of the names under which the model is served."""
    model = await state_of(request).model()
    model.check_name(model_id)
    return json_response(_card(model, model_id))


def _card(model: Model, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=model.created, max_model_len=model.info.max_model_len, root=model.name
    )
