"""The outermost middleware: request ids, standard headers, counting, and the last ``except``."""

from __future__ import annotations

import asyncio
import logging
import re
import time

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.access.caller import caller_of_scope
from server.anthropic.errors import error_body, is_anthropic
from server.errors import ApiError, to_api_error, unavailable
from server.http.disconnect import ClientDisconnected
from server.http.query import without_empty_values
from server.http.standard_headers import new_request_id, standard_headers
from server.state import ServerState
from server.tracing import trace_headers

# Answered while draining and beyond the last connection, and not logged.
PROBES = frozenset({"/health", "/ready", "/metrics", "/dashboard/state"})
_VALID_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_log = logging.getLogger("server.requests")


class RequestContext:
    """The outermost ASGI middleware; no exception passes it."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app = app
        self._state = state
        self._log_requests = not state.settings.disable_log_requests
        self._live_ids: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request, whatever fails inside."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started_s = time.perf_counter()
        request_id = self._claim_id(scope)
        scope.setdefault("state", {})["request_id"] = request_id
        scope["query_string"] = without_empty_values(scope["query_string"])
        if (task := asyncio.current_task()) is not None:
            task.set_name(f"request {request_id}")  # for ``server/http/stacks.py``
        if self._state.tracing is not None:
            scope["state"]["trace"] = trace_headers(scope["headers"])
        waited_for = scope["path"] not in PROBES
        status = 0

        async def send_with_headers(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers.update(standard_headers(request_id, started_s))
                if is_anthropic(scope):
                    headers["request-id"] = request_id  # the name that Anthropic's clients read
                headers.update(caller_of_scope(scope).account.headers())
            await send(message)

        self._state.requests_in_flight += waited_for
        try:
            if waited_for and self._state.draining:
                raise unavailable("The server is shutting down.")
            await self._app(scope, receive, send_with_headers)
        except ClientDisconnected:
            status = 499  # the client is gone
        except asyncio.CancelledError:  # the server has stopped waiting for requests
            if not status:
                ending = unavailable("The server is shutting down.")
                await send_error(ending, scope, send_with_headers)
        except Exception as error:
            if status:  # too late for a status; the connection is cut so that the client notices
                _log.exception("request %s failed after its answer began", request_id)
                raise
            await send_error(self._to_api_error(error, request_id), scope, send_with_headers)
        finally:
            self._state.requests_in_flight -= waited_for
            self._live_ids.discard(request_id)
            self._count(scope, status, request_id, time.perf_counter() - started_s)

    def _to_api_error(self, error: Exception, request_id: str) -> ApiError:
        answer = to_api_error(error, request_id)
        if answer.status == 500:
            _log.error("request %s failed", request_id, exc_info=error)
        return answer

    def _claim_id(self, scope: Scope) -> str:
        """The client's own id if it is valid and not in use, otherwise a new one."""
        for name, value in scope["headers"]:
            if name == b"x-request-id":
                given = value.decode("latin-1")
                if _VALID_ID.fullmatch(given) and given not in self._live_ids:
                    self._live_ids.add(given)
                    return given
        request_id = new_request_id()
        self._live_ids.add(request_id)
        return request_id

    def _count(self, scope: Scope, status: int, request_id: str, elapsed_s: float) -> None:
        route = _route_of(scope)
        self._state.metrics.record_http_request(scope["method"], route, status)
        if self._log_requests and route not in PROBES:
            fields = {
                "request_id": request_id,
                "method": scope["method"],
                "route": route,
                "status": status,
                "duration_ms": round(elapsed_s * 1000, 1),
            }
            _log.info(
                "%(method)s %(route)s %(status)d %(duration_ms).1f ms %(request_id)s",
                fields,
                extra={"fields": fields},
            )


def _route_of(scope: Scope) -> str:
    """The path of the route that served the request, without its parameters' values."""
    route = scope.get("route")
    if route is not None:
        return route.path
    # The framework does not name its own routes, such as /docs, which have no parameters.
    is_served = scope.get("endpoint") is not None and not scope.get("path_params")
    return scope["path"] if is_served else "unmatched"


async def send_error(error: ApiError, scope: Scope, send: Send) -> None:
    """Send ``error`` as a whole response, in the shape that its clients expect."""
    if is_anthropic(scope):
        body = error_body(error, scope["state"]["request_id"])
    else:
        body = error.body()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode("latin-1")) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
