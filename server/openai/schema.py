"""The OpenAPI document: our shapes are described as such, though FastAPI does not parse them.

Bodies are parsed by ``endpoint.read_request``, which names the field at fault the way the API
does; answers are msgspec structs. Both are told to FastAPI as references into ``components``.
"""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

_REF = "#/components/schemas/"
_ERROR = {
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


def describe(
    body: type[BaseModel] | None,
    answer: type[msgspec.Struct],
    *,
    chunk: type | None = None,
    body_required: bool = True,
) -> dict[str, Any]:
    """The part of an operation's description that FastAPI cannot see (``openapi_extra``)."""
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if chunk is not None:
        content["text/event-stream"] = {"schema": _ref(chunk)}
    error = {"application/json": {"schema": {"$ref": _REF + "Error"}}}
    operation: dict[str, Any] = {
        "responses": {
            "200": {"description": "The answer", "content": content},
            "4XX": {"description": "The request is at fault", "content": error},
            "5XX": {"description": "The server is at fault, or overloaded", "content": error},
        }
    }
    if body is not None:
        operation["requestBody"] = {
            "required": body_required,
            "content": {"application/json": {"schema": _ref(body)}},
        }
    return operation


def install(app: FastAPI, bodies: list[type[BaseModel]], answers: list[type]) -> None:
    """Make ``app.openapi()`` hold the schemas of ``bodies`` and ``answers``."""

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            _, shapes = models_json_schema(
                [(body, "validation") for body in bodies], ref_template=_REF + "{model}"
            )
            _, structs = msgspec.json.schema_components(answers, ref_template=_REF + "{name}")
            schemas = document.setdefault("components", {}).setdefault("schemas", {})
            schemas.update(structs)
            schemas.update(shapes["$defs"])
            schemas["Error"] = _ERROR
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi


def _ref(shape: type) -> dict[str, str]:
    return {"$ref": _REF + shape.__name__}
