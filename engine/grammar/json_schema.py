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
from engine.grammar.number_ranges import missing_bound

# Whitespace between the parts of a JSON text: at most one blank, or a line break and an
# indentation. The library's default is unbounded, and at a high temperature a model can go on
# writing blanks.
_BLANKS = r"[ \t]|\r?\n[ \t]{0,24}"
_OPTIONS = {"whitespace_pattern": _BLANKS, "lenient": False, "coerce_one_of": False}

# Formats that describe a string's use but not its syntax, from OpenAPI, Google and pydantic. The
# library either enforces other formats or refuses the schema.
IGNORED_FORMATS = frozenset({"binary", "directory-path", "enum", "file-path", "password", "path"})

# Patterns for formats that the library does not know: pydantic's, of types such as UUID4 and
# Base64Bytes, and OpenAPI's byte.
_BASE64 = r"^(?:[{0}]{{4}})*(?:[{0}]{{2}}==|[{0}]{{3}}=)?$"
FORMAT_PATTERNS = {
    "base64": _BASE64.format("A-Za-z0-9+/"),
    "base64url": _BASE64.format("A-Za-z0-9_-"),
    "byte": _BASE64.format("A-Za-z0-9+/"),
    **{
        f"uuid{version}": (
            rf"^[0-9a-fA-F]{{8}}-[0-9a-fA-F]{{4}}-{version}[0-9a-fA-F]{{3}}"
            r"-[89abAB][0-9a-fA-F]{3}-[0-9a-fA-F]{12}$"
        )
        for version in range(1, 9)
    },
}

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
    kept: dict[str, Any] = {}
    form: list[dict[str, Any]] = []  # a pattern in place of the format
    for keyword, value in schema.items():
        if keyword == "x-guidance" or (keyword == "uniqueItems" and value is False):
            continue
        if keyword == "format" and isinstance(value, str) and value in IGNORED_FORMATS:
            continue
        _check(keyword, value)
        if keyword == "format" and isinstance(value, str) and value in FORMAT_PATTERNS:
            form = [{"pattern": FORMAT_PATTERNS[value]}]
            continue
        if keyword in _SCHEMA_LIST_KEYWORDS and isinstance(value, list):
            value = [_cleaned(each, root, depth + 1) for each in value]
        elif keyword in _SCHEMA_MAP_KEYWORDS and isinstance(value, Mapping):
            value = {name: _cleaned(each, root, depth + 1) for name, each in value.items()}
        elif keyword in _SCHEMA_KEYWORDS:
            value = _cleaned(value, root, depth + 1)
        kept[keyword] = value
    if form and isinstance(several := kept.get("allOf", []), list):
        kept["allOf"] = several + form
    return {**kept, **missing_bound(schema, root)}


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
