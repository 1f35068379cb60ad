"""How an argument is written, by its schema, in formats that do not quote strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

# A string or null; JSON of another type; either, distinguished by whether it is JSON.
ArgumentKind = Literal["text", "json", "mixed"]

_NAMES = {str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number"}
_ALL = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_MAX_DEPTH = 16


def argument_kind(schema: Mapping[str, Any], root: Mapping[str, Any]) -> ArgumentKind:
    """The kind of an argument with this schema, whose references are resolved in ``root``."""
    types = argument_types(schema, root)
    if "string" not in types:
        return "json"
    return "text" if types <= {"string", "null"} else "mixed"


def argument_types(
    schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0
) -> frozenset[str]:
    """The JSON types that ``schema`` allows; all of them if it does not state them plainly."""
    if depth > _MAX_DEPTH:
        return _ALL
    if isinstance(kinds := schema.get("type"), str | list):
        return frozenset([kinds] if isinstance(kinds, str) else kinds)
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return frozenset(
            _NAMES.get(type(value), "array" if isinstance(value, list) else "object")
            for value in values
        )
    for several in (schema.get("anyOf"), schema.get("oneOf")):
        if isinstance(several, list) and all(isinstance(one, Mapping) for one in several):
            return frozenset().union(*(argument_types(one, root, depth + 1) for one in several))
    target = resolve(schema.get("$ref"), root)
    return _ALL if target is None else argument_types(target, root, depth + 1)


def resolve(reference: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The target of ``#/$defs/name``; None if the reference has another form."""
    steps = reference.split("/") if isinstance(reference, str) else []
    if len(steps) != 3 or steps[0] != "#" or steps[1] not in ("$defs", "definitions"):
        return None
    found = root.get(steps[1], {})
    target = found.get(steps[2]) if isinstance(found, Mapping) else None
    return target if isinstance(target, Mapping) else None
