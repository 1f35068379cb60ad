"""POST /v1/load_lora_adapter and /v1/unload_lora_adapter, under ``--lora-dir``."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Request
from msgspec import Struct
from pydantic import Field
from starlette.responses import Response

from server.adapters import Adapters
from server.errors import ApiError
from server.openai.api_model import ApiModel
from server.openai.endpoint import json_response, read_request, state_of
from server.openai.openapi_schema import describe

router = APIRouter()

_Name = Annotated[str, Field(min_length=1, max_length=256)]


class LoadAdapterRequest(ApiModel):
    """POST /v1/load_lora_adapter."""

    lora_name: _Name
    lora_path: Annotated[str, Field(min_length=1, max_length=4096)]  # within --lora-dir


class UnloadAdapterRequest(ApiModel):
    """POST /v1/unload_lora_adapter."""

    lora_name: _Name


class AdapterStatus(Struct):
    """The response of both routes."""

    lora_name: str
    loaded: bool


@router.post(
    "/v1/load_lora_adapter",
    summary="Load an adapter from the adapters' directory",
    openapi_extra=describe(LoadAdapterRequest, AdapterStatus, errors=(404,)),
)
async def load_adapter(request: Request) -> Response:
    """Load an adapter and serve it as a model under the given name."""
    adapters = _adapters(request)
    body, headers = await read_request(request, LoadAdapterRequest)
    state = state_of(request)
    await state.model()
    path = adapters.find(body.lora_path)
    await adapters.load(state.engine, body.lora_name, str(path))
    return json_response(AdapterStatus(body.lora_name, loaded=True), headers)


@router.post(
    "/v1/unload_lora_adapter",
    summary="Unload an adapter",
    openapi_extra=describe(UnloadAdapterRequest, AdapterStatus, errors=(404,)),
)
async def unload_adapter(request: Request) -> Response:
    """Stop serving a name; requests already started with it go on."""
    adapters = _adapters(request)
    body, headers = await read_request(request, UnloadAdapterRequest)
    adapters.unload(body.lora_name)
    return json_response(AdapterStatus(body.lora_name, loaded=False), headers)


def _adapters(request: Request) -> Adapters:
    """The adapters. Raises ApiError (404) if they cannot be changed at run time."""
    state = state_of(request)
    if state.settings.lora_dir is None:
        raise ApiError(404, "Adapters are loaded at run time only by a server with --lora-dir.")
    return state.adapters
