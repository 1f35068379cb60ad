"""Errors in Anthropic's shape, and which requests they are for."""

from __future__ import annotations

import msgspec
from starlette.types import Scope

from server.anthropic.outputs import MessagesError, MessagesErrorDetail
from server.errors import ApiError

PREFIX = "/v1/messages"
FILES = "/v1/files"  # a path of OpenAI's API as well
_VERSION = b"anthropic-version"  # a header of every request in this API, and of none in OpenAI's

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def is_anthropic(scope: Scope) -> bool:
    """Whether a request is one of Anthropic's API, and its errors have that shape."""
    if _is_under(PREFIX, scope["path"]):
        return True
    return _is_under(FILES, scope["path"]) and any(name == _VERSION for name, _ in scope["headers"])


def error_type(status: int) -> str:
    """This API's name for the errors of a status."""
    return _TYPES.get(status, "invalid_request_error")


def error_detail(error: ApiError) -> MessagesErrorDetail:
    """The ``error`` object of an error's body."""
    message = error.message
    if error.code == "context_length_exceeded":
        message = f"prompt is too long: {message}"  # on these words, clients shorten the prompt
    return MessagesErrorDetail(error_type(error.status), message)


def error_body(error: ApiError, request_id: str) -> bytes:
    """The error as JSON, in Anthropic's shape."""
    body = MessagesError(error=error_detail(error), request_id=request_id)
    return msgspec.json.encode(body)


def _is_under(prefix: str, path: str) -> bool:
    return path == prefix or path.startswith(prefix + "/")
