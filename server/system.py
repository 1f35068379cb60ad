"""What operators and orchestrators ask: /health, /ready, /version, /metrics."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter, Request
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from server.errors import asleep, unavailable
from server.openai.endpoint import json_response, state_of
from server.openai.schema import describe

router = APIRouter()


class Status(Struct):
    """The answer of /health and /ready."""

    status: str


class Version(Struct):
    """The answer of /version."""

    version: str


@router.get(
    "/health",
    summary="Whether the process should be kept",
    openapi_extra=describe(None, Status),
)
async def health(request: Request) -> Response:
    """200 while the process can serve or will again; 503 once only a restart can help.

    Needs no key, and says nothing but this.
    """
    if state_of(request).failure is not None:
        raise unavailable("The engine is gone for good.")
    return json_response(Status("ok"))


@router.get("/ready", summary="Whether to send requests here", openapi_extra=describe(None, Status))
async def ready(request: Request) -> Response:
    """200 when a request would be served at once; 503 while loading, draining, restarting, asleep
    or given other weights."""
    state = state_of(request)
    if not state.ready:
        if state.resting is not None:
            raise asleep(f"The server {state.resting}.")
        raise unavailable("The server is not ready.")
    return json_response(Status("ready"))


@router.get("/version", summary="Which build this is", openapi_extra=describe(None, Version))
async def version(request: Request) -> Response:
    """The version of Quire."""
    return json_response(Version(quire_version()))


@router.get("/metrics", summary="Prometheus metrics", openapi_extra=describe(None, "text/plain"))
async def metrics(request: Request) -> Response:
    """All metrics in Prometheus' text format, of all API workers together."""
    state = state_of(request)
    text = generate_latest(state.metrics.exposition(await state.numbers()))
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def quire_version() -> str:
    """The installed version; a checkout that was never installed has none of its own."""
    try:
        return importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"
