"""POST /sleep, /wake_up and /reload_weights, GET /is_sleeping, under ``--enable-sleep-mode``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from msgspec import Struct
from pydantic import Field
from starlette.responses import Response

from engine.errors import EngineAsleep, InvalidParameter
from server.errors import ApiError, asleep, bad_field
from server.named_paths import find_within
from server.openai.api_model import ApiModel
from server.openai.endpoint import json_response, read_request, state_of
from server.openai.openapi_schema import describe
from server.openai.unsupported import report_ignored
from server.state import ServerState

router = APIRouter()

_MAX_WAIT_S = 3600.0
_WAIT_S = 60.0

Mode = Literal["wait", "abort"]
_Level = Annotated[
    int, Query(ge=1, le=2, description="1: give the KV cache back; 2: the weights too.")
]
_Mode = Annotated[
    Mode, Query(description="Let requests that are being served end, or end them at once.")
]
_Wait = Annotated[
    float, Query(ge=0, le=_MAX_WAIT_S, description="Seconds that they are given; then they end.")
]
_Tags = Annotated[
    list[Literal["weights", "kv_cache"]] | None,
    Query(description="What to take the memory of; all of it, so both or none are named."),
]


class SleepState(Struct):
    """The response of /sleep, /wake_up and /is_sleeping."""

    is_sleeping: bool
    activity: str  # serving, falling_asleep, asleep, waking, reloading


class _NoFields(ApiModel):
    """A body without fields: any that are sent are reported as ignored."""


class ReloadRequest(ApiModel):
    """POST /reload_weights; the body may be left out."""

    # Within --weights-dir; by default the directory that was read last.
    model_path: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    mode: Mode = "wait"
    timeout_s: Annotated[float, Field(ge=0, le=_MAX_WAIT_S)] = _WAIT_S


class WeightsReloaded(Struct):
    """The response of /reload_weights."""

    success: bool
    message: str
    generation: int  # how many times the weights have been replaced
    load_s: float  # seconds spent reading them
    weights_bytes: int  # in memory; the old and the new weights were both resident meanwhile
    system_fingerprint: str


@router.post(
    "/sleep",
    summary="Give the engine's memory back until it is woken",
    openapi_extra=describe(None, SleepState, errors=(409,)),
)
async def sleep(
    request: Request, level: _Level = 1, mode: _Mode = "wait", timeout_s: _Wait = _WAIT_S
) -> Response:
    """Respond once the memory is released; no effect if the server is already asleep."""
    state = await _require_sleep_mode(request)
    headers = await _ignored_params_headers(state, request, "level", "mode", "timeout_s")
    await state.engine.sleep(level, 0.0 if mode == "abort" else timeout_s)
    return _sleep_response(state, headers)


@router.post(
    "/wake_up",
    summary="Have a sleeping engine serve again",
    openapi_extra=describe(None, SleepState, errors=(409,)),
)
async def wake_up(request: Request, tags: _Tags = None) -> Response:
    """Respond once requests are served; no effect if the server is not asleep."""
    state = await _require_sleep_mode(request)
    if tags and len(set(tags)) == 1:
        raise bad_field("tags", "must name both or be left out: all of the memory is taken at once")
    headers = await _ignored_params_headers(state, request, "tags")
    model = state.engine.info.model
    try:
        await state.engine.wake()
    except EngineAsleep as error:  # as for replaced weights, the path is not revealed
        raise asleep(str(error).replace(model, state.settings.model_names[0])) from None
    return _sleep_response(state, headers)


@router.get(
    "/is_sleeping",
    summary="Whether the engine sleeps",
    openapi_extra=describe(None, SleepState),
)
async def is_sleeping(request: Request) -> Response:
    """The engine's most recently reported state."""
    return _sleep_response(await _require_sleep_mode(request))


_RELOAD = describe(ReloadRequest, WeightsReloaded, body_required=False, errors=(409,))


@router.post("/reload_weights", summary="Go on with other weights", openapi_extra=_RELOAD)
@router.post(
    "/update_weights_from_disk", summary="The same, by SGLang's name", openapi_extra=_RELOAD
)
async def reload_weights(request: Request) -> Response:
    """Load weights of the same architecture and serve them from then on.

    Requests that arrive meanwhile wait. If the weights cannot be used, nothing changes.
    """
    state = await _require_sleep_mode(request)
    body, headers = await read_request(request, ReloadRequest, optional=True)
    path = None if body.model_path is None else str(_resolve_weights(state, body.model_path))
    last = state.engine.info.model
    timeout_s = 0.0 if body.mode == "abort" else body.timeout_s
    try:
        info = await state.engine.reload(path, timeout_s)
    except InvalidParameter as error:  # the surroundings of the directory are not revealed
        shown = body.model_path or state.settings.model_names[0]
        message = error.message.replace(path or last, shown)
        raise ApiError(400, message, param="model_path", code="weights_not_usable") from None
    answer = WeightsReloaded(
        success=True,
        message="The weights have been exchanged.",
        generation=info.generation,
        load_s=round(info.load_s, 3),
        weights_bytes=info.memory.weights_bytes,
        system_fingerprint=info.fingerprint,
    )
    return json_response(answer, headers)


async def _require_sleep_mode(request: Request) -> ServerState:
    """The state, once a model is loaded. Raises ApiError (404) if sleep mode is disabled."""
    state = state_of(request)
    if not state.settings.enable_sleep_mode:
        message = "Sleep mode is off; the server would have to be started with --enable-sleep-mode."
        raise ApiError(404, message)
    await state.model()
    return state


async def _ignored_params_headers(
    state: ServerState, request: Request, *known: str
) -> dict[str, str]:
    """The header that names unknown query parameters and all fields of a body.

    Raises:
        ApiError: there are any and --strict is set, or the body cannot be read.
    """
    names = sorted(set(request.query_params) - set(known))
    of_query = report_ignored(names, strict=state.settings.strict)
    _, of_body = await read_request(request, _NoFields, optional=True)
    ignored = [*of_query.values(), *of_body.values()]
    return {"x-quire-ignored-params": ",".join(ignored)} if ignored else {}


def _sleep_response(state: ServerState, headers: dict[str, str] | None = None) -> Response:
    activity = state.engine.activity
    return json_response(SleepState(activity in ("asleep", "waking"), activity), headers)


def _resolve_weights(state: ServerState, path: str) -> Path:
    """Resolve a directory or GGUF file within --weights-dir. Raises ApiError (400)."""
    if state.settings.weights_dir is None:
        raise bad_field("model_path", "is taken only by a server with --weights-dir")
    found = find_within(state.settings.weights_dir, path)
    if found is None:
        raise bad_field("model_path", "is not in the directory of --weights-dir")
    return found
