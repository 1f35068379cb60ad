"""The one mapping from errors to the responses that clients get.

Every error on every route, including those below the application (a malformed request line), has
OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``. Messages of 4xx errors are
written for the client. A server fault gives an id to quote and reveals nothing of the exception.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from engine.errors import (
    DeadlineExceeded,
    EngineAsleep,
    EngineDead,
    EngineError,
    OutOfMemory,
    ProfileRefused,
    RequestError,
    SleepRefused,
)

MAX_ECHO = 200  # characters of a client's value that a message may repeat
_MAX_MESSAGE = 1000
_RETRY_AFTER_S = "1"
_ASLEEP_RETRY_S = "30"  # a guess: sleep ends when an operator ends it

# HTTP statuses that the framework or the connection raises itself: (type, code, message).
_BY_STATUS: dict[int, tuple[str, str | None, str]] = {
    400: ("invalid_request_error", None, "The request is malformed."),
    401: ("authentication_error", "invalid_api_key", "A valid API key is required."),
    403: (
        "permission_error",
        "insufficient_permissions",
        "The API key lacks permission for this.",
    ),
    404: ("invalid_request_error", "not_found", "There is no such route."),
    405: (
        "invalid_request_error",
        "method_not_allowed",
        "This route does not support this method.",
    ),
    408: ("invalid_request_error", "request_timeout", "The request took too long to arrive."),
    409: ("invalid_request_error", "conflict", "The request conflicts with the current state."),
    413: ("invalid_request_error", "body_too_large", "The request body is too large."),
    415: (
        "invalid_request_error",
        "unsupported_media_type",
        "Only JSON is read, sent with the header Content-Type: application/json.",
    ),
    429: ("rate_limit_error", "rate_limit_exceeded", "Too many requests or tokens."),
    431: ("invalid_request_error", "headers_too_large", "The request headers are too large."),
    500: ("server_error", None, "The server had an internal error."),
    503: ("service_unavailable_error", None, "The service is not available."),
    504: ("timeout_error", "deadline_exceeded", "The request's deadline passed before its end."),
}
ERROR_SCHEMA: dict[str, Any] = {  # every error's JSON schema
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


class ApiError(Exception):
    """An error response, which any code that handles a request may raise."""

    def __init__(
        self,
        status: int,
        message: str = "",
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        kind, default_code, default_message = _BY_STATUS.get(status, ("server_error", None, ""))
        super().__init__(message or default_message)
        self.status = status
        self.message = shorten(message or default_message, _MAX_MESSAGE)
        self.type = kind
        self.param = param
        self.code = code or default_code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", _RETRY_AFTER_S)

    def body(self) -> bytes:
        """The error as JSON, in OpenAI's shape."""
        return msgspec.json.encode(
            {
                "error": {
                    "message": self.message,
                    "type": self.type,
                    "param": self.param,
                    "code": self.code,
                }
            }
        )


def status_message(status: int) -> str:
    """The generic message of an error status."""
    return _BY_STATUS[status][2]


def bad_field(param: str, problem: str, *, code: str | None = None) -> ApiError:
    """A 400 that names the invalid field; ``problem`` continues the sentence after its name."""
    return ApiError(400, f"'{param}' {problem}", param=param, code=code)


def overloaded(limit: str) -> ApiError:
    """A 503 for a request that finds the queue full."""
    return ApiError(
        503,
        f"The server is at its limit of {limit}; try again shortly.",
        code="server_is_overloaded",
    )


def unavailable(message: str = "The engine is not available; try again shortly.") -> ApiError:
    """A 503 for every request: the engine is gone, or the server is shutting down."""
    return ApiError(503, message, code="engine_unavailable")


def asleep(message: str = "The server is asleep; it must be woken first.") -> ApiError:
    """A 503 for every request until an operator wakes the server."""
    headers = {"retry-after": _ASLEEP_RETRY_S}
    return ApiError(503, message, code="engine_asleep", headers=headers)


def to_api_error(error: BaseException, request_id: str) -> ApiError:
    """The response for ``error``; an unknown exception becomes a 500 that reveals nothing of it."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (ProfileRefused, SleepRefused)):
        return ApiError(409, error.message, code=error.code)
    if isinstance(error, RequestError):
        return ApiError(400, error.message, param=error.param, code=error.code)
    if isinstance(error, OutOfMemory):
        return ApiError(
            503,
            "The server ran out of memory while it served this request; try again shortly.",
            code="server_is_overloaded",
        )
    if isinstance(error, EngineAsleep):
        return asleep(str(error))
    if isinstance(error, DeadlineExceeded):
        return ApiError(504)
    if isinstance(error, EngineDead):
        return unavailable()
    detail = "The request failed" if isinstance(error, EngineError) else "The server failed"
    return ApiError(500, f"{detail} through a fault of its own. Quote request id {request_id}.")


def shorten(text: str, limit: int = MAX_ECHO) -> str:
    """Truncate ``text`` to ``limit`` characters, for messages that echo a client's value."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
