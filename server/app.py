"""The application: its routes, the middleware around them, and the engine's lifespan.

connection ─► Cors ─► RequestContext ─► ApiKeyMiddleware ─► BodyLimitMiddleware ─► route ─► engine
         preflight    id, headers,      401                 413 415 408
                      last except
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

from fastapi import Depends, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.routing import Match

from engine.client import EngineClient
from server import lora, profile, sleep_mode, system
from server.access import usage_route
from server.access.body import BodyLimitMiddleware
from server.access.keys import ApiKeyMiddleware
from server.access.scopes import check_access
from server.anthropic import batch_routes as message_batches
from server.anthropic import files as anthropic_files
from server.anthropic import routes as messages
from server.batches.service import make_runner
from server.dashboard import routes as dashboard
from server.errors import ApiError, bad_field, shorten
from server.http.context import RequestContext
from server.http.cors import Cors
from server.metrics import Metrics
from server.openai import (
    batches,
    chat,
    completions,
    files,
    models,
    openapi_schema,
    stored_chats,
    tokens,
    transcriptions,
)
from server.openai.responses import conversation_routes as conversations
from server.openai.responses import routes as responses
from server.openai.responses.background import BackgroundResponses
from server.pooling import embeddings, scoring
from server.settings import Settings
from server.state import ServerState, SharedState
from server.tracing import Tracing
from server.validation import reason

# Endpoints of OpenAI's API that are not here, by method and path; other routes would take the last
# part of the path for an id.
_UNSUPPORTED_ENDPOINTS = {
    ("POST", "/v1/responses/compact"): (
        "The endpoint /v1/responses/compact is not supported: nothing here compacts conversations. "
        "To shorten them, send 'truncation': 'auto'."
    ),
}


def create_app(
    settings: Settings, engine: EngineClient, shared: SharedState | None = None
) -> FastAPI:
    """The application that serves ``engine``.

    The application's lifespan starts the engine in the background: liveness is answered at once,
    and requests that arrive while the model loads wait for it. The end of the lifespan closes the
    engine. ``app.state.server`` holds the shared :class:`ServerState`.

    Args:
        settings: the server's settings.
        engine: not started yet.
        shared: what several API workers have in common; None if this is the only process.

    Raises:
        InvalidSettings: the key file cannot be used, or the packages for tracing are missing.
    """
    metrics = Metrics(
        engine,
        prefix=settings.metrics_prefix,
        model_name=settings.model_names[0],
        max_loras=settings.max_loras,
    )
    state = ServerState(settings, engine, metrics, shared or SharedState())
    state.tracing = Tracing.of(settings, system.quire_version())

    app = FastAPI(
        title="Quire",
        version=system.quire_version(),
        lifespan=_lifespan,
        redirect_slashes=False,
        exception_handlers={
            HTTPException: _on_http_exception,
            RequestValidationError: _on_invalid_parameter,
        },
    )
    app.state.server = state
    app.state.dashboard = dashboard.Dashboard(state)
    app.state.responses = BackgroundResponses(state)
    _include_routes(app, settings, state)
    _add_middleware(app, settings, state)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Load the model and run batches in the background while the application serves."""
    state: ServerState = app.state.server
    try:
        async with state.access.open(), app.state.responses.lifespan():
            tasks = [
                asyncio.create_task(state.load()),
                asyncio.create_task(make_runner(state).run()),
            ]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        app.state.dashboard.close()
        await state.close()


def _include_routes(app: FastAPI, settings: Settings, state: ServerState) -> None:
    """Add all routes. Those that a setting disables answer with an error that says so, and are not
    in the schema."""
    rooms = (
        *(chat, stored_chats, completions, responses, conversations, messages),
        *(transcriptions, message_batches, embeddings, scoring, anthropic_files),
        *(files, batches, models, tokens),
        *(system, dashboard, profile, sleep_mode, lora, usage_route),
    )
    is_on = {
        dashboard: settings.is_dashboard_enabled,
        profile: settings.profile is not None,
        sleep_mode: settings.enable_sleep_mode,
        lora: settings.lora_dir is not None,
        usage_route: state.access.usage is not None,
    }
    described = [room for room in rooms if is_on.get(room, True)]
    for room in rooms:
        app.include_router(
            room.router, dependencies=[Depends(check_access)], include_in_schema=room in described
        )
    app.state.described = [route for room in described for route in room.router.routes]
    asks_for_keys = state.access.keys.requires_key
    openapi_schema.install_openapi(
        app, [room.router for room in described], with_keys=asks_for_keys
    )


def _add_middleware(app: FastAPI, settings: Settings, state: ServerState) -> None:
    """Put the middleware around the routes; the one added last is the outermost."""
    app.add_middleware(
        BodyLimitMiddleware,
        max_body_bytes=settings.max_body_bytes,
        stall_timeout_s=settings.body_timeout_s,
        max_bytes_by_path={files.UPLOAD_PATH: settings.max_file_bytes + files.MAX_FORM_BYTES},
    )
    app.add_middleware(ApiKeyMiddleware, keys=state.access.keys)
    app.add_middleware(RequestContext, state=state)
    if settings.cors_origins:
        app.add_middleware(Cors, origins=settings.cors_origins)


async def _on_http_exception(request: Request, error: Exception) -> NoReturn:
    """Convert the framework's own errors: unknown routes and methods."""
    assert isinstance(error, HTTPException)
    unsupported = _UNSUPPORTED_ENDPOINTS.get((request.method, request.url.path))
    if unsupported is not None:
        raise ApiError(404, unsupported)
    if error.status_code == 405 and (methods := _methods(request)):
        message = f"This route takes {' and '.join(methods)}, not {shorten(request.method)}."
        raise ApiError(405, message, headers={"allow": ", ".join(methods)})
    message = _no_route(request) if error.status_code == 404 else ""
    raise ApiError(error.status_code, message, headers=error.headers)


def _methods(request: Request) -> list[str]:
    """The methods that any route accepts for the path; the framework reports only one route's."""
    routes = request.app.state.described
    takes = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    return sorted({method for route in takes for method in route.methods or ()})


def _no_route(request: Request) -> str:
    """Suggest the right URL: a base URL often has a superfluous or missing ``/v1`` or slash."""
    parts = [part for part in request.url.path.split("/") if part]
    end = "/".join(itertools.dropwhile(lambda part: part == "v1", parts))
    for path in (f"/v1/{end}", f"/{end}"):
        if end and any(route.path == path for route in request.app.state.described):
            return f"There is no such route, but there is {path}."
    return "There is no such route; /openapi.json lists all routes."


async def _on_invalid_parameter(request: Request, error: Exception) -> NoReturn:
    """Convert the framework's validation errors for path and query parameters."""
    assert isinstance(error, RequestValidationError)
    problem = error.errors()[0]
    name = str(problem["loc"][-1])
    raise bad_field(shorten(name), reason(problem))
