"""Prepares JSON schemas for llguidance.

The library refuses keywords that it knows but cannot enforce, and ignores unknown ones, as JSON
Schema requires. The rest is done here: setting options, removing keywords and formats without
effect, and refusing forms of older drafts that would be ignored although they have meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from engine.errors import InvalidParameter
from engine.grammar.finiteness import has_finite_text
from engine.grammar.formats import IGNORED_FORMATS, KNOWN_FORMATS, OTHER_FORMATS
from engine.grammar.lookaround import without_lookaround
from engine.grammar.number_ranges import missing_bound, usable_minimum
from engine.grammar.property_names import spelled_out

# Whitespace between the parts of a JSON text: at most one blank, or a line break and an
# indentation. The library's default is unbounded, and at a high temperature a model can go on
# writing blanks.
_BLANKS = r"[ \t]|\r?\n[ \t]{0,24}"
_OPTIONS = {"whitespace_pattern": _BLANKS, "lenient": False, "coerce_one_of": False}

_MAX_DEPTH = 100  # the library refuses deeper schemas
_MAX_VALUES = 20_000  # in one enum
_SCHEMA_KEYWORDS = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
        "unevaluatedItems",
        "unevaluatedProperties",
    }
)
_SCHEMA_LIST_KEYWORDS = frozenset({"allOf", "anyOf", "items", "oneOf", "prefixItems"})
_SCHEMA_MAP_KEYWORDS = frozenset(
    {"$defs", "definitions", "dependentSchemas", "dependencies", "patternProperties", "properties"}
)


def read_schema(text: str) -> dict[str, Any]:
    """Parse a schema and prepare it for the library.

    Raises:
        InvalidParameter: the text is not JSON, or not a schema.
    """
    try:
        schema = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        raise InvalidParameter("the schema is not JSON", param="grammar") from None
    return prepare_schema(schema)


def prepare_schema(schema: Any) -> dict[str, Any]:
    """Prepare ``schema`` for the library, also within a grammar in Lark's notation.

    Raises:
        InvalidParameter: it is not a schema, no finite text satisfies it, or it has parts that
            would be ignored.
    """
    if schema is False:
        raise InvalidParameter("nothing satisfies the schema 'false'", param="grammar")
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise InvalidParameter("a schema must be an object or a boolean", param="grammar")
    if not has_finite_text(schema):
        raise InvalidParameter(
            "no finite text satisfies it: it requires itself, or does nothing but refer to itself",
            param="grammar",
        )
    return {**_cleaned(schema, schema, 0), "x-guidance": _OPTIONS}


def _cleaned(schema: Any, root: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return schema
    schema = spelled_out(schema, root)
    kept: dict[str, Any] = {}
    form: list[dict[str, Any]] = []  # a pattern in place of the format
    for keyword, value in schema.items():
        if keyword == "x-guidance" or (keyword == "uniqueItems" and value is False):
            continue
        if keyword == "format" and isinstance(value, str) and _is_idle(value, schema):
            continue
        _check(keyword, value)
        if keyword == "format" and isinstance(value, str) and value in OTHER_FORMATS:
            form = [{"pattern": f"^(?:{OTHER_FORMATS[value]})$"}]
            continue
        if keyword == "pattern" and isinstance(value, str):
            value = without_lookaround(value)
        if keyword in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            value = [_cleaned(each, root, depth + 1) for each in value]
        elif keyword in _SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            value = {name: _cleaned(each, root, depth + 1) for name, each in value.items()}
        elif keyword in _SCHEMA_KEYWORDS:
            value = _cleaned(value, root, depth + 1)
        kept[keyword] = value
    if form and isinstance(several := kept.get("allOf", []), list):
        kept["allOf"] = several + form
    return {**kept, **missing_bound(schema, root), **usable_minimum(schema)}


def _is_idle(form: str, schema: Mapping[str, Any]) -> bool:
    """Whether a format says nothing, or nothing besides the pattern that comes with it."""
    if form in KNOWN_FORMATS or form in OTHER_FORMATS:
        return False
    return form in IGNORED_FORMATS or isinstance(schema.get("pattern"), str)


def _check(keyword: str, value: Any) -> None:
    if keyword in ("exclusiveMinimum", "exclusiveMaximum") and isinstance(value, bool):
        raise InvalidParameter(
            f"'{keyword}' must be a number; as a boolean it is of draft 4, which is not supported",
            param="grammar",
        )
    if keyword == "enum" and isinstance(value, list) and len(value) > _MAX_VALUES:
        raise InvalidParameter(
            f"'enum' holds {len(value)} values; the limit is {_MAX_VALUES}", param="grammar"
        )


def _refuse_constant(name: str) -> Any:
    raise ValueError(name)
