"""GET /dashboard, the page, and GET /dashboard/state, which it polls twice a second.

The page is the same for everybody and reveals nothing, so it needs no key; it asks its reader for
one if the state needs it. The state is for administrators: no row of ``access/scopes.py`` names it.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from engine.client import EngineClient
from engine.errors import EngineDead
from server.dashboard.page import Page
from server.dashboard.poller import SnapshotPoller
from server.dashboard.state import DashboardState, Status, add_snapshot, describe_model
from server.errors import ApiError, bad_field
from server.openai.endpoint import json_response, state_of
from server.openai.openapi_schema import describe
from server.state import ServerState
from server.system import quire_version

router = APIRouter()

_Engine = Annotated[int, Query(ge=0, description="Which of several engines, from 0.")]


class Dashboard:
    """The state shared by the routes of one application; on ``app.state.dashboard``."""

    def __init__(self, state: ServerState) -> None:
        self.page = Page()
        # By number.
        self.pollers = [SnapshotPoller(state, i) for i in range(len(state.engine.members))]

    def close(self) -> None:
        """Stop taking snapshots."""
        for poller in self.pollers:
            poller.close()


@router.get("/dashboard", summary="The live page", openapi_extra=describe(None, "text/html"))
async def dashboard(request: Request) -> Response:
    """The page that shows the engine at work; 404 if it is disabled."""
    page = _dashboard(request).page
    return Response(page.body, media_type="text/html", headers=page.headers)


@router.get(
    "/dashboard/state",
    summary="What the live page shows",
    openapi_extra=describe(None, DashboardState),
)
async def dashboard_state(request: Request, engine: _Engine = 0) -> Response:
    """An engine's last steps, requests and KV blocks.

    Times are relative to the response. The snapshot is missing while the engine loads, restarts, or
    is in a long step.
    """
    server = state_of(request)
    pollers = _dashboard(request).pollers
    if engine >= len(pollers):
        raise bad_field("engine", f"must be below {len(pollers)}, the number of engines")
    poller = pollers[engine]
    state = DashboardState(status=_status(server, poller.engine), version=quire_version())
    if len(pollers) > 1:
        state.engines = len(pollers)
    snapshot = None
    if state.status in ("serving", "draining"):
        state.model = describe_model(server.settings.model_names[0], poller.engine.info)
        try:
            snapshot = await poller.poll()
        except EngineDead:
            state.status = "gone" if poller.engine.dead else "restarting"
        else:
            if snapshot is None:
                state.status = "busy"
    if snapshot is not None:
        add_snapshot(
            state,
            snapshot,
            poller.unread_s,
            max_running=server.settings.max_num_seqs,
            restarts=poller.num_restarts,
        )
    return json_response(state, {"cache-control": "no-store"})


def _dashboard(request: Request) -> Dashboard:
    """The dashboard. Raises ApiError (404) if it is disabled."""
    if not state_of(request).settings.is_dashboard_enabled:
        message = (
            "The live page is off. Without keys it is shown only where no other machine can "
            "connect; --dashboard shows it all the same."
        )
        raise ApiError(404, message)
    return request.app.state.dashboard


def _status(server: ServerState, engine: EngineClient) -> Status:
    if server.failure is not None or engine.dead:
        return "gone"
    if not server.is_loaded:
        return "loading"
    if not engine.alive:
        return "restarting"
    if not engine.responsive:
        return "busy"
    activity = engine.activity
    if activity != "serving":
        return "reloading" if activity in ("reloading", "waking") else "asleep"
    return "draining" if server.draining else "serving"
