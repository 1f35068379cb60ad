"""GET /v1/models and /v1/models/{id}."""

from __future__ import annotations

from fastapi import APIRouter, Request
from starlette.responses import Response

from server.adapter_table import ServedAdapter
from server.openai.endpoint import json_response, state_of
from server.openai.openapi_schema import describe
from server.openai.outputs import ModelCard, ModelList
from server.state import Model

router = APIRouter()


@router.get("/v1/models", summary="List the models", openapi_extra=describe(None, ModelList))
async def list_models(request: Request) -> Response:
    """List the names under which models are served."""
    state = state_of(request)
    model = await state.model()
    cards = [_card(model, name) for name in model.names]
    cards += [_adapter_card(model, served) for served in state.adapters]
    return json_response(ModelList(data=cards))


# A name may contain a slash, as in org/name.
@router.get(
    "/v1/models/{model_id:path}",
    summary="Describe a model",
    openapi_extra=describe(None, ModelCard),
)
async def retrieve_model(request: Request, model_id: str) -> Response:
    """Retrieve one of the served models."""
    state = state_of(request)
    model = await state.model()
    for served in state.adapters:
        if served.adapter.name == model_id:
            return json_response(_adapter_card(model, served))
    model.check_name(model_id)
    return json_response(_card(model, model_id))


def _adapter_card(model: Model, served: ServedAdapter) -> ModelCard:
    return ModelCard(
        id=served.adapter.name,
        created=served.created,
        max_model_len=model.info.max_model_len,
        root=model.name,
        parent=model.name,
    )


def _card(model: Model, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=model.created, max_model_len=model.info.max_model_len, root=model.name
    )
