"""A function that the model may call, as chat requests define it."""

from __future__ import annotations

import re
from typing import Annotated, Any

import msgspec
from pydantic import PlainValidator, WithJsonSchema

from server.openai.tool_schema import schema_problem

FUNCTION_NAME = r"^[A-Za-z0-9_.-]{1,128}$"
_NAME = re.compile(FUNCTION_NAME)
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}  # as models know it
_NO_ARGUMENTS: dict[str, Any] = {**_NO_PARAMETERS, "additionalProperties": False}


class Function(msgspec.Struct, frozen=True):
    """A function that the model may call, or one that stands for a custom tool."""

    name: str
    parameters: dict[str, Any]  # a JSON schema of an object
    strict: bool
    definition: dict[str, Any]  # without what is not for the model, in the client's order
    ignored_fields: dict[str, Any]  # fields without effect
    custom: dict[str, Any] | None = None  # the custom tool's own definition
    pattern: str | None = None  # a regular expression for its inputs; None: any text

    def for_template(self) -> dict[str, Any]:
        """The function as chat templates expect it."""
        return {"type": "function", "function": self.definition}

    def as_sent(self) -> dict[str, Any]:
        """The tool as a client sends it, with defaults filled in."""
        if self.custom is not None:
            return {"type": "custom", "custom": self.custom}
        return {"type": "function", "function": {**self.definition, "strict": self.strict}}


def _read_function(value: Any) -> Function:
    if not isinstance(value, dict):
        raise ValueError("must be an object")
    name, parameters = value.get("name"), value.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError("must have a name of 1 to 128 letters, digits, '_', '-' and '.'")
    if not isinstance(value.get("description", ""), str | None):
        raise ValueError("must have a description that is a string")
    if not isinstance(value.get("strict", False), bool | None):
        raise ValueError("must have a 'strict' that is true or false")
    if parameters is None:
        parameters = _NO_ARGUMENTS
    if not isinstance(parameters, dict) or parameters.get("type", "object") != "object":
        raise ValueError("must have parameters that are the JSON schema of an object")
    if problem := schema_problem(parameters):
        raise ValueError(f"must have parameters that are a JSON schema; {problem}")
    about = ("name", "description", "parameters")
    shown = {key: value[key] for key in value if key in about and value[key] is not None}
    shown["parameters"] = _NO_PARAMETERS if parameters is _NO_ARGUMENTS else parameters
    unused = {key: value[key] for key in value if key not in (*about, "strict")}
    return Function(name, parameters, bool(value.get("strict")), shown, unused)


_FUNCTION = {
    "type": "object",
    "required": ["name"],
    "properties": {
        "name": {"type": "string", "pattern": FUNCTION_NAME},
        "description": {"type": ["string", "null"]},
        "parameters": {"type": ["object", "null"]},
        "strict": {"type": ["boolean", "null"]},
    },
}
AnyFunction = Annotated[Function, PlainValidator(_read_function), WithJsonSchema(_FUNCTION)]
