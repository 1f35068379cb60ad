"""POST /start_profile and /stop_profile: a trace of the engine's steps, under ``--profile``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Request
from msgspec import UNSET, Struct, UnsetType
from pydantic import Field
from starlette.responses import Response

from engine.profiler import MAX_PROFILE_STEPS
from server.errors import ApiError
from server.openai.api_model import ApiModel
from server.openai.endpoint import json_response, read_request, state_of
from server.openai.openapi_schema import describe
from server.settings import Settings

router = APIRouter()


class ProfileRequest(ApiModel):
    """POST /start_profile; the body may be left out."""

    num_steps: Annotated[int, Field(ge=1, le=MAX_PROFILE_STEPS)] | None = None


class ProfileStarted(Struct):
    """The response of /start_profile."""

    num_steps: int


class ProfileWritten(Struct, omit_defaults=True):
    """The response of /stop_profile."""

    file: str  # its name in the directory given by --profile
    num_steps: int
    other_files: list[str] | UnsetType = UNSET  # of the other engines, if there are several


@router.post(
    "/start_profile",
    summary="Record the next steps of the engine",
    openapi_extra=describe(ProfileRequest, ProfileStarted, body_required=False, errors=(409,)),
)
async def start_profile(request: Request) -> Response:
    """Record the next ``num_steps`` steps into one trace, whatever requests they serve."""
    settings = _require_profiling(request)
    body, headers = await read_request(request, ProfileRequest, optional=True)
    num_steps = settings.profile_steps if body.num_steps is None else body.num_steps
    await state_of(request).engine.start_profile(num_steps)
    return json_response(ProfileStarted(num_steps), headers)


@router.post(
    "/stop_profile",
    summary="End the recording and name its file",
    openapi_extra=describe(None, ProfileWritten, errors=(409,)),
)
async def stop_profile(request: Request) -> Response:
    """Stop recording, unless all steps are already recorded, and return the trace file's name."""
    _require_profiling(request)
    trace = await state_of(request).engine.stop_profile()
    others = [Path(path).name for path in trace.others] or UNSET
    return json_response(ProfileWritten(Path(trace.path).name, trace.num_steps, others))


def _require_profiling(request: Request) -> Settings:
    """The settings. Raises ApiError (404) if profiling is disabled."""
    settings = state_of(request).settings
    if settings.profile is None:
        raise ApiError(404, "Profiling is off; the server would have to be started with --profile.")
    return settings
