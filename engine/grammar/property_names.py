"""``propertyNames``, which the grammar library lacks, in keywords that it has.

zod writes it for records, pydantic for dictionaries. Names that are listed become properties, and
names of a form ``patternProperties``; other forms are left for the library to refuse.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.grammar.finiteness import resolve
from engine.grammar.formats import ALL_FORMATS

_ABOUT = frozenset({"type", "title", "description", "$comment"})  # keywords that constrain no name
_MAX_DEPTH = 8


def spelled_out(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema`` without ``propertyNames`` where other keywords can say the same."""
    if "propertyNames" not in schema:
        return schema
    names = _resolved(schema["propertyNames"], root)
    others = {key: value for key, value in schema.items() if key != "propertyNames"}
    if names is True or (isinstance(names, Mapping) and _is_trivial(names)):
        return others
    if not isinstance(names, Mapping) or "patternProperties" in schema:
        return schema
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed, list) and isinstance(known, Mapping):
        allowed = dict.fromkeys(name for name in listed if isinstance(name, str))
        given = {name: known[name] for name in known if name in allowed}
        return {
            **others,
            "properties": {**{name: rest for name in allowed if rest is not False}, **given},
            "additionalProperties": False,
        }
    pattern = _pattern_of(names)
    if pattern is None or known:
        return schema
    return {**others, "patternProperties": {pattern: rest}, "additionalProperties": False}


def _resolved(names: Any, root: Mapping[str, Any]) -> Any:
    for _ in range(_MAX_DEPTH):
        if not isinstance(names, Mapping) or not isinstance(names.get("$ref"), str):
            break
        names = resolve(names["$ref"], root)
    return names


def _is_trivial(names: Mapping[str, Any]) -> bool:
    """Whether all names are allowed: all are strings."""
    return not set(names) - _ABOUT and names.get("type", "string") == "string"


def _pattern_of(names: Mapping[str, Any]) -> str | None:
    """The pattern of the names, if that is all that is said of them."""
    said = set(names) - _ABOUT
    if said == {"pattern"} and isinstance(names["pattern"], str):
        return names["pattern"]
    form = names.get("format")
    if said == {"format"} and isinstance(form, str) and form in ALL_FORMATS:
        return f"^(?:{ALL_FORMATS[form]})$"
    return None
