"""Routes for operators and orchestrators: /health, /ready, /version, /metrics."""

from __future__ import annotations

import importlib.metadata

from fastapi import APIRouter, Request
from msgspec import UNSET, Struct, UnsetType
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.responses import Response

from server.errors import asleep, unavailable
from server.openai.endpoint import json_response, state_of
from server.openai.openapi_schema import describe
from server.state import ServerState

router = APIRouter()


class Engines(Struct):
    """Counts for a server with several engines."""

    serving: int  # able to take requests now
    total: int


class Status(Struct, omit_defaults=True):
    """The response of /health and /ready."""

    status: str
    engines: Engines | UnsetType = UNSET  # if there are several


class Version(Struct):
    """The response of /version."""

    version: str


@router.head("/health", include_in_schema=False)
@router.get(
    "/health",
    summary="Whether the process should be kept",
    openapi_extra=describe(None, Status),
)
async def health(request: Request) -> Response:
    """200 while the process serves or can recover; 503 once only a restart can help.

    Needs no key, and reveals only this and how many of several engines serve.
    """
    if state_of(request).failure is not None:
        raise unavailable("The engine is gone for good.")
    return json_response(Status("ok", _engines(state_of(request))))


@router.head("/ready", include_in_schema=False)
@router.get("/ready", summary="Whether to send requests here", openapi_extra=describe(None, Status))
async def ready(request: Request) -> Response:
    """200 if a request would be served at once, by at least one of several engines.

    503 while loading, draining, restarting, asleep or replacing weights.
    """
    state = state_of(request)
    if not state.ready:
        if state.sleep_message is not None:
            raise asleep(f"The server {state.sleep_message}.")
        raise unavailable(_reason(state))
    return json_response(Status("ready", _engines(state)))


@router.get("/version", summary="Which build this is", openapi_extra=describe(None, Version))
async def version(request: Request) -> Response:
    """The version of Quire."""
    return json_response(Version(quire_version()))


@router.get("/metrics", summary="Prometheus metrics", openapi_extra=describe(None, "text/plain"))
async def metrics(request: Request) -> Response:
    """All metrics of all API workers, in Prometheus' text format."""
    state = state_of(request)
    text = generate_latest(state.metrics.exposition(await state.collect_metrics()))
    return Response(text, headers={"content-type": CONTENT_TYPE_LATEST})


def _reason(state: ServerState) -> str:
    """Why the server is not ready, if it does not sleep."""
    if state.draining:
        return "The server is shutting down."
    if state.failure is not None:
        return "The engine is gone for good."
    if not state.is_loaded:
        return "The server is not ready: its model is being loaded."
    if state.engine.alive:
        return "The server is not ready: its engine does not answer."
    return "The server is not ready: its engine is being restarted."


def _engines(state: ServerState) -> Engines | UnsetType:
    members = state.engine.members
    if len(members) == 1:
        return UNSET
    serving = [one for one in members if one.alive and one.responsive and one.activity == "serving"]
    return Engines(len(serving), len(members))


def quire_version() -> str:
    """The installed version, or a placeholder in a checkout that was never installed."""
    try:
        return importlib.metadata.version("quire")
    except importlib.metadata.PackageNotFoundError:
        return "0+checkout"
