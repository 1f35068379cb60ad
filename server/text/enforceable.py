"""The subset of tool schemas that can be enforced where arguments are written one by one."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeGuard

# Keywords that constrain a value, besides its type. All others only describe it, or are unknown.
_CONSTRAINTS = frozenset(
    {
        *("$dynamicRef", "$recursiveRef", "$ref"),
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "const", "enum"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
        *("minLength", "maxLength", "pattern", "format"),
        *("items", "prefixItems", "additionalItems", "unevaluatedItems", "contains"),
        *("minItems", "maxItems", "minContains", "maxContains", "uniqueItems"),
        *("properties", "patternProperties", "additionalProperties", "unevaluatedProperties"),
        *("propertyNames", "required", "minProperties", "maxProperties"),
        *("dependencies", "dependentRequired", "dependentSchemas"),
    }
)
_MAX_DEPTH = 16
_MAX_PROPERTIES = 1024  # of one object; rules for optional ones grow with their square
_MAX_VISITS = 4096  # the longest published schemas of tools have some hundreds
# Everything but blanks and what may stand around a name. Not \w, by which Python and the library
# of grammars mean different characters: the marks of Hindi and Thai are not among Python's.
ARGUMENT_NAME = re.compile(r"""[^\s\x00-\x1f"'`<>()\[\]{}=:,;|\\\/]+""")


class UnenforceableSchema(ValueError):
    """A tool's schema cannot be enforced in this dialect; the message says why."""


class VisitBudget:
    """How much of a schema may be written out as rules, in which each use of a reference is one
    more copy of what it refers to."""

    def __init__(self) -> None:
        self._visits_left = _MAX_VISITS

    def visit(self, depth: int) -> None:
        """Count one schema at this depth.

        Raises:
            UnenforceableSchema: it refers to itself, or there are too many by now.
        """
        self._visits_left -= 1
        if depth > _MAX_DEPTH:
            raise UnenforceableSchema("a schema that refers to itself cannot be held by this model")
        if self._visits_left < 0:
            raise UnenforceableSchema("its references make it too long to be held by this model")


def unsupported_keyword(keywords: Collection[str]) -> UnenforceableSchema:
    """The error about unsupported schema keywords, of which it names one."""
    keyword = min(keywords)
    return UnenforceableSchema(f"{keyword!r} cannot be held in the way this model writes calls")


def constraints_of(schema: Mapping[str, Any], *handled: str) -> set[str]:
    """The keywords of ``schema`` that constrain a value, without those that are ``handled``."""
    return {keyword for keyword in schema if keyword in _CONSTRAINTS}.difference(handled)


def are_schemas(value: Any) -> TypeGuard[list[Mapping[str, Any]]]:
    """Whether ``value`` is a list of schemas, as of ``anyOf``."""
    return isinstance(value, list) and all(isinstance(one, Mapping) for one in value)


def split_properties(schema: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The required and the optional properties of an object's schema, each with its own schema.

    Raises:
        UnenforceableSchema: there are other constraints, or a property's name cannot be written.
    """
    properties, needed = schema.get("properties", {}), schema.get("required", [])
    if not isinstance(properties, Mapping):
        raise UnenforceableSchema("'properties' must be an object")
    if not isinstance(needed, list):
        raise UnenforceableSchema("'required' must be a list")
    if len(properties) > _MAX_PROPERTIES:
        raise UnenforceableSchema(f"'properties' holds more than {_MAX_PROPERTIES}")
    names = {name for name in needed if isinstance(name, str)}
    if unknown := constraints_of(schema, "properties", "required", "additionalProperties"):
        raise unsupported_keyword(unknown)
    required: dict[str, Any] = {}
    optional: dict[str, Any] = {}
    for name, inner in properties.items():
        if not ARGUMENT_NAME.fullmatch(name):
            raise UnenforceableSchema(f"the argument {name[:40]!r} cannot be written by this model")
        place = required if name in names else optional
        place[name] = inner if isinstance(inner, dict) else {}
    return required, optional


def comma_separated(fixed: Sequence[str], optional: Sequence[str], comma: str) -> str:
    """All of ``fixed``, then any of ``optional``, separated by ``comma``."""
    following = [f"({comma} {rule})?" for rule in optional]
    if fixed or not comma:
        return " ".join([f" {comma} ".join(fixed), *following])
    # The first one has no comma before it, whichever it is.
    starts = [" ".join([rule, *following[at + 1 :]]) for at, rule in enumerate(optional)]
    return "(" + " | ".join(starts) + ")?" if starts else ""
