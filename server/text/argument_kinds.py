"""How an argument is written, by its schema, in formats that do not quote strings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from server.text.enforceable import are_schemas

# A string or null; JSON of another type; either, distinguished by whether it is JSON.
ArgumentKind = Literal["text", "json", "mixed"]

_NAMES = {str: "string", bool: "boolean", type(None): "null", int: "integer", float: "number"}
_ALL = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})


def argument_kind(schema: Mapping[str, Any], root: Mapping[str, Any]) -> ArgumentKind:
    """The kind of an argument with this schema, whose references are resolved in ``root``."""
    types = argument_types(schema, root)
    if "string" not in types:
        return "json"
    return "text" if types <= {"string", "null"} else "mixed"


def argument_types(schema: Mapping[str, Any], root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that ``schema`` allows; all of them if it does not state them plainly.

    Each reference is followed once, as a second time adds no type: references of all to all would
    take forever otherwise.
    """
    found: set[str] = set()
    followed: set[Any] = set()
    left = [schema]
    while left:
        one = left.pop()
        if isinstance(kinds := one.get("type"), str | list):
            kinds = [kinds] if isinstance(kinds, str) else kinds
            if not all(isinstance(kind, str) for kind in kinds):
                return _ALL
            found.update(kinds)
            continue
        values = one.get("enum", [one["const"]] if "const" in one else None)
        if isinstance(values, list):
            found.update(map(_type_of, values))
            continue
        several = [each for each in (one.get("anyOf"), one.get("oneOf")) if are_schemas(each)]
        if several:
            left += several[0]
            continue
        reference = one.get("$ref")
        target = resolve(reference, root)
        if target is None:
            return _ALL
        if reference not in followed:
            followed.add(reference)
            left.append(target)
    return frozenset(found) or _ALL


def _type_of(value: Any) -> str:
    return _NAMES.get(type(value), "array" if isinstance(value, list) else "object")


def resolve(reference: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The target of ``#/$defs/name``; None if the reference has another form."""
    steps = reference.split("/") if isinstance(reference, str) else []
    if len(steps) != 3 or steps[0] != "#" or steps[1] not in ("$defs", "definitions"):
        return None
    found = root.get(steps[1], {})
    target = found.get(steps[2]) if isinstance(found, Mapping) else None
    return target if isinstance(target, Mapping) else None
