"""The OpenAPI document, with our own shapes, which FastAPI does not parse.

``endpoint.read_request`` parses bodies, to name the invalid field as the API does; responses are
msgspec structs. Each route declares both with :func:`describe`, and the document is collected from
the routes, so there is no list to maintain.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from types import UnionType
from typing import Any, get_args

import msgspec
from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from server.access.scopes import OPEN_PATHS
from server.errors import ERROR_SCHEMA, status_message
from server.openai.deadline import HEADER as DEADLINE_HEADER
from server.openai.deadline import MAX_DEADLINE_MS

_REF = "#/components/schemas/"
# Any route may answer these: they come from the connection, the guards and the shutdown.
_COMMON_STATUSES = (400, 408, 413, 415, 431, 500, 503)
_AUTH_STATUSES = (401, 403, 429)
_ERROR = {"$ref": _REF + "Error"}
_REQUEST_ID = {"x-request-id": {"schema": {"type": "string"}, "description": "Quote it to ask."}}
_RETRY_AFTER = {"retry-after": {"schema": {"type": "string"}, "description": "Seconds to wait."}}
_IGNORED = {
    "x-quire-ignored-params": {
        "schema": {"type": "string"},
        "description": "Fields of the request that had no effect, separated by commas.",
    }
}
_DEADLINE = {
    "name": DEADLINE_HEADER,
    "in": "header",
    "required": False,
    "schema": {"type": "integer", "minimum": 1, "maximum": MAX_DEADLINE_MS},
    "description": "Milliseconds until the answer is no longer wanted: it then ends with a 504.",
}


class Description(dict[str, Any]):
    """A route's ``openapi_extra``, with the shapes that it references."""

    def __init__(self, operation: dict[str, Any], shapes: Iterable[type]) -> None:
        super().__init__(operation)
        self.shapes = tuple(shapes)


def describe(
    body: type[BaseModel] | None,
    answer: type[msgspec.Struct] | UnionType | str,
    *,
    chunk: type | UnionType | None = None,
    typed: bool = False,
    body_required: bool = True,
    errors: Collection[int] = (),
    error: type[msgspec.Struct] | None = None,
) -> Description:
    """The part of an operation's description that FastAPI cannot infer (``openapi_extra``).

    Args:
        body: the shape of the JSON body; None if there is none, or FastAPI reads it.
        answer: the shape of the JSON response, or several, or the media type of one that is not
            JSON.
        chunk: the shape of the data in a stream's events, or several, if the route can stream.
        typed: whether events are named, including errors. Otherwise an error is an event that holds
            its body, and ``[DONE]`` comes last.
        body_required: whether the body may not be omitted.
        errors: statuses besides those of every route, such as 404 and 409. A route that names a
            model, or has a parameter in its path, gets 404 automatically.
        error: the shape of an error's body; OpenAI's by default.
    """
    shown = [*_union_members(answer), *_union_members(chunk)]
    shapes = [shape for shape in (body, error, *shown) if isinstance(shape, type)]
    content: dict[str, Any] = {}
    if isinstance(answer, str):
        content[answer] = {"schema": {"type": "string"}}
    else:
        content["application/json"] = {"schema": _any_ref(answer)}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _event(_union_members(chunk), typed=typed)}
    headers = _REQUEST_ID | _IGNORED if body is not None else _REQUEST_ID
    answers: dict[str, Any] = {
        "200": {"description": "The answer", "content": content, "headers": headers}
    }
    statuses: set[int] = {*_COMMON_STATUSES, *errors}
    fields = () if body is None else body.model_fields
    if "model" in fields:
        statuses.add(404)
    if "deadline_ms" in fields:
        statuses.add(504)
    for status in sorted(statuses):
        answers[str(status)] = _error(status, _ERROR if error is None else _ref(error))
    operation: dict[str, Any] = {"responses": answers}
    if "deadline_ms" in fields:
        operation["parameters"] = [_DEADLINE]
    if body is not None:
        operation["requestBody"] = {
            "required": body_required,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return Description(operation, shapes)


def install_openapi(app: FastAPI, routers: Iterable[APIRouter], *, with_keys: bool) -> None:
    """Make ``app.openapi()`` describe the routes of ``routers`` with their shapes.

    Args:
        app: the application that has the routers.
        routers: their routes are described by :func:`describe`.
        with_keys: whether the server requires keys.
    """
    shapes = [
        shape
        for router in routers
        for route in router.routes
        if isinstance(route, APIRoute) and isinstance(route.openapi_extra, Description)
        for shape in route.openapi_extra.shapes
    ]

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(_schemas(shapes))
            for name in ("HTTPValidationError", "ValidationError"):  # FastAPI's own; see below
                schemas.pop(name, None)
            for path, item in document["paths"].items():
                for operation in item.values():
                    _add_common_responses(path, operation, with_keys=with_keys)
            if with_keys:
                schemes = document["components"].setdefault("securitySchemes", {})
                schemes["key"] = {"type": "http", "scheme": "bearer"}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _schemas(shapes: Iterable[type]) -> dict[str, Any]:
    """JSON schemas by name, of the shapes and everything they refer to."""
    unique = dict.fromkeys(shapes)
    models = [shape for shape in unique if issubclass(shape, BaseModel)]
    structs = [shape for shape in unique if not issubclass(shape, BaseModel)]
    _, ours = models_json_schema(
        [(model, "validation") for model in models], ref_template=_REF + "{model}"
    )
    _, schemas = msgspec.json.schema_components(structs, ref_template=_REF + "{name}")
    return {**schemas, **ours.get("$defs", {}), "Error": ERROR_SCHEMA}


def _add_common_responses(path: str, operation: dict[str, Any], *, with_keys: bool) -> None:
    """Fill in what follows from a route's path and from the server's settings."""
    answers = operation.setdefault("responses", {})
    answers.pop("422", None)  # FastAPI's error for an invalid parameter is a 400 here
    statuses: set[int] = set(_COMMON_STATUSES)
    if "{" in path:
        statuses.add(404)
    if path in OPEN_PATHS:
        operation["security"] = []
    elif with_keys:
        statuses |= set(_AUTH_STATUSES)
    error = answers["400"]["content"]["application/json"]["schema"] if "400" in answers else _ERROR
    for status in statuses:
        answers.setdefault(str(status), _error(status, error))
    operation["responses"] = dict(sorted(answers.items()))


def _error(status: int, schema: dict[str, str]) -> dict[str, Any]:
    headers = _REQUEST_ID | _RETRY_AFTER if status in (429, 503) else _REQUEST_ID
    content = {"application/json": {"schema": schema}}
    return {"description": status_message(status), "content": content, "headers": headers}


def _event(shapes: Iterable[type], *, typed: bool) -> dict[str, Any]:
    """One event of a stream by its fields; ``data`` is a string of JSON."""
    held = [_ref(shape) for shape in shapes]
    if not typed:
        held.append(_ERROR)
    schema = held[0] if len(held) == 1 else {"anyOf": held}
    data = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    if typed:
        properties = {"event": {"type": "string"}, "data": data}
    else:
        properties = {"data": {"anyOf": [data, {"const": "[DONE]"}]}}
    return {"type": "object", "properties": properties, "required": list(properties)}


def _union_members(shapes: Any) -> tuple[Any, ...]:
    """The members of a union; any other type is its only member."""
    return get_args(shapes) or (shapes,)


def _any_ref(shapes: Any) -> dict[str, Any]:
    refs = [_ref(shape) for shape in _union_members(shapes)]
    return refs[0] if len(refs) == 1 else {"anyOf": refs}


def _ref(shape: type) -> dict[str, str]:
    return {"$ref": _REF + shape.__name__}
