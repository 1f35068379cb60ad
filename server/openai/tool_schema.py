"""A superficial check that a value is a JSON schema; the grammar compiler interprets it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

_TYPES = frozenset({"null", "boolean", "object", "array", "number", "string", "integer"})
_SCHEMA_KEYWORDS = (
    "items",
    "additionalProperties",
    "not",
    "if",
    "then",
    "else",
    "contains",
    "propertyNames",
)
_LIST_KEYWORDS = ("anyOf", "oneOf", "allOf", "prefixItems")
_MAP_KEYWORDS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_MAX_SCHEMAS = 20_000


def schema_problem(schema: dict[str, Any]) -> str | None:
    """The problem with ``schema`` or one within it, as the end of a sentence; None if none."""
    left = [schema]
    for _ in range(_MAX_SCHEMAS):
        if not left:
            return None
        one = left.pop()
        kinds = one.get("type", [])
        for kind in kinds if isinstance(kinds, list) else [kinds]:
            if not isinstance(kind, str) or kind not in _TYPES:
                return f"there is no type {str(kind)[:40]!r}"
        if not _is_list_of_strings(one.get("required", [])):
            return "'required' must be a list of strings"
        if not isinstance(one.get("enum", []), list):
            return "'enum' must be a list"
        for keyword, inner in _subschemas(one):
            if isinstance(inner, dict):
                left.append(inner)
            elif not isinstance(inner, bool):
                return f"{keyword!r} must hold schemas"
    return "it holds too many schemas"


def _subschemas(schema: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The direct subschemas, or the values in their place, by keyword."""
    for keyword in _SCHEMA_KEYWORDS:
        if keyword in schema:
            inner = schema[keyword]
            # Before draft 2020-12, the items of a tuple were a list.
            several = inner if keyword == "items" and isinstance(inner, list) else [inner]
            yield from ((keyword, one) for one in several)
    for keyword in _LIST_KEYWORDS:
        inner = schema.get(keyword, [])
        yield from ((keyword, one) for one in (inner if isinstance(inner, list) else [None]))
    for keyword in _MAP_KEYWORDS:
        inner = schema.get(keyword, {})
        each = inner.values() if isinstance(inner, dict) else [None]
        yield from ((keyword, one) for one in each)


def _is_list_of_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)
