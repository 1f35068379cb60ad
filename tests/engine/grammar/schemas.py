"""Schemas that cover JSON Schema's keywords one by one and combined, by name.

``SCHEMAS`` are supported: every finished text of a model must satisfy its schema. ``REFUSED`` are
not; the error names the word given with each.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

Schema = dict[str, Any] | bool

TYPES = ("null", "boolean", "integer", "number", "string", "array", "object")
# Short texts can satisfy these: unbounded strings and numbers run on at a high temperature.
WORD = {"type": "string", "maxLength": 8}
SMALL = {"type": "integer", "minimum": 0, "maximum": 99}
FLAG = {"type": "boolean"}
CHOICE = {"enum": ["red", "green", "blue"]}
LEAVES: dict[str, Schema] = {"word": WORD, "small": SMALL, "flag": FLAG, "choice": CHOICE}


def closed(properties: dict[str, Schema], required: list[str] | None = None) -> dict[str, Any]:
    """An object with only these properties, all required unless stated otherwise."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def of_types() -> Iterator[tuple[str, Schema]]:
    for kind in TYPES:
        yield f"type {kind}", {"type": kind}
        yield f"property of type {kind}", closed({"value": {"type": kind}})
        yield f"array of type {kind}", {"type": "array", "items": {"type": kind}, "maxItems": 2}
        yield (
            f"tuple of type {kind}",
            {
                "type": "array",
                "prefixItems": [{"type": kind}, FLAG],
                "items": False,
                "minItems": 2,
            },
        )
        yield f"null or type {kind}", {"anyOf": [{"type": "null"}, {"type": kind}]}
        yield (
            f"map of type {kind}",
            {
                "type": "object",
                "additionalProperties": {"type": kind},
                "maxProperties": 2,
            },
        )
    for one, other in pairwise(TYPES):
        yield f"type {one} or {other}", {"type": [one, other]}
    yield "true", True
    yield "empty", {}


def of_values() -> Iterator[tuple[str, Schema]]:
    values: list[Any] = [None, True, 0, -7, 2.5, 1e3, "", "text", 'quo"te', "grün\n", "\\u", "€😀"]
    values += [[], [1, "a"], {}, {"a": [None]}, {"b c": {"d": 1.5}}]
    for index, value in enumerate(values):
        yield f"const {index}", {"const": value}
    for index, value in enumerate(values[::2]):
        yield f"property of const {index}", closed({"value": {"const": value}, "flag": FLAG})
    yield "enum of all", {"enum": values}
    yield "enum of strings", {"enum": ["a", "ab", "abc", "b"]}
    yield "enum of numbers", {"enum": [1, 10, 100, -1, 0.5]}
    yield "enum within a type", {"type": "string", "enum": ["x", "y"]}
    yield "enum that a type narrows", {"type": "integer", "enum": [1, "two", 3, None]}
    yield "enum of 500", {"enum": [f"value {index}" for index in range(500)]}
    yield "enum in a property", closed({"colour": CHOICE, "size": {"enum": [1, 2, 3]}})


def of_numbers() -> Iterator[tuple[str, Schema]]:
    bounds: list[tuple[float, float]] = [(0, 9), (-5, 5), (10, 1000), (-1000, -10), (7, 7)]
    bounds += [(0, 255), (1, 10**6), (-128, 127), (95, 105), (2**31, 2**31 + 20)]
    for low, high in bounds:
        yield f"integer {low}..{high}", {"type": "integer", "minimum": low, "maximum": high}
    for low, high in [(0, 2), (-3, 12), (99, 101)]:
        exclusive = {"exclusiveMinimum": low, "exclusiveMaximum": high}
        yield f"integer ]{low}..{high}[", {"type": "integer", **exclusive}
        yield f"number ]{low}..{high}[", {"type": "number", **exclusive}
    for low, high in [(0, 1), (-1.5, 2.25), (0.1, 0.2), (-100, -99.5), (3.25, 1000)]:
        yield f"number {low}..{high}", {"type": "number", "minimum": low, "maximum": high}
    yield "integer from", {"type": "integer", "minimum": 100}
    yield "integer to", {"type": "integer", "maximum": -100}
    yield "number from", {"type": "number", "minimum": 0}
    yield "number above", {"type": "number", "exclusiveMinimum": 0}
    yield "number to", {"type": "number", "maximum": 1}
    yield "number below", {"type": "number", "exclusiveMaximum": 1}
    for divisor in (2, 3, 5, 10, 64):
        within = {"minimum": 0, "maximum": 1000}
        yield f"multiple of {divisor}", {"type": "integer", "multipleOf": divisor, **within}
    yield "multiple of 0.5", {"type": "number", "multipleOf": 0.5, "minimum": 0, "maximum": 50}
    yield (
        "both bounds of both kinds",
        {
            "type": "integer",
            "minimum": 3,
            "exclusiveMinimum": 3,
            "maximum": 8,
            "exclusiveMaximum": 8,
        },
    )


def of_strings() -> Iterator[tuple[str, Schema]]:
    for low, high in [(0, 0), (0, 1), (1, 1), (2, 5), (10, 12), (0, 40), (7, 7), (30, 33)]:
        yield f"string {low}..{high}", {"type": "string", "minLength": low, "maxLength": high}
    yield "string from", {"type": "string", "minLength": 3}
    patterns = [
        r"^[a-z]{3}$",
        r"^\d{3}-\d{4}$",
        r"^(yes|no|maybe)$",
        r"^[A-Z][a-z]*( [A-Z][a-z]*)?$",
        r"^.{4}$",
        r"^[^\"\\]{1,5}$",
        r"^a?b+c{2,3}$",
        r"^\w{2,4}@\w{2,4}\.(com|org)$",
        r"^#[0-9a-fA-F]{6}$",
        r"^(?:[0-9]{1,3}\.){3}[0-9]{1,3}$",
        r"^\s?x\s?$",
        r"^[äöü]{2}$",
    ]
    for pattern in patterns:
        yield f"pattern {pattern}", {"type": "string", "pattern": pattern}
    yield "pattern within", {"type": "string", "pattern": "ab", "maxLength": 6}
    yield "pattern from the start", {"type": "string", "pattern": "^ab", "maxLength": 6}
    yield "pattern to the end", {"type": "string", "pattern": "ab$", "maxLength": 6}
    yield "pattern and length", {"type": "string", "pattern": "^[ab]*$", "minLength": 2}
    for name in FORMATS:
        yield f"format {name}", {"type": "string", "format": name}
    yield "format in a property", closed({"day": {"type": "string", "format": "date"}})
    yield "format and pattern", {"type": "string", "format": "date", "pattern": "^20"}
    for name in ("base64", "base64url", "byte"):
        yield f"format {name}", {"type": "string", "format": name, "maxLength": 8}
    yield "format of ours and pattern", {"type": "string", "format": "uuid4", "pattern": "^beef"}
    yield "format of ours in allOf", {"allOf": [{"pattern": "^[a-f]"}], **UUID_7}
    yield "format of ours of a number", {"anyOf": [{"type": "integer", "maximum": 9}, UUID_7]}
    yield "format of no form", {"type": "string", "format": "password", "maxLength": 4}


FORMATS = ("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid")
FORMATS += ("uri", "uuid1", "uuid3", "uuid4", "uuid5", "uuid6", "uuid7", "uuid8")
UUID_7 = {"type": "string", "format": "uuid7"}


def of_arrays() -> Iterator[tuple[str, Schema]]:
    for name, leaf in LEAVES.items():
        yield f"array of {name}", {"type": "array", "items": leaf, "maxItems": 4}
        yield f"two of {name}", {"type": "array", "items": leaf, "minItems": 2, "maxItems": 2}
        yield f"some of {name}", {"type": "array", "items": leaf, "minItems": 1, "maxItems": 3}
    for low, high in [(0, 0), (0, 1), (3, 3), (2, 6)]:
        bounds = {"minItems": low, "maxItems": high}
        yield f"array {low}..{high}", {"type": "array", "items": SMALL, **bounds}
    yield "array from", {"type": "array", "items": FLAG, "minItems": 3}
    yield "array of nothing", {"type": "array", "items": False}
    yield "array of arrays", {"type": "array", "items": {"type": "array", "items": FLAG}}
    pair = [WORD, SMALL]
    yield "tuple", {"type": "array", "prefixItems": pair, "items": False, "minItems": 2}
    yield "tuple that may end early", {"type": "array", "prefixItems": pair, "items": False}
    yield "tuple and more", {"type": "array", "prefixItems": pair, "items": FLAG, "maxItems": 5}
    yield "tuple of bounded length", {"type": "array", "prefixItems": pair, "maxItems": 1}
    yield (
        "tuple and no less than three",
        {
            "type": "array",
            "prefixItems": pair,
            "items": FLAG,
            "minItems": 3,
            "maxItems": 4,
        },
    )
    yield "array of objects", {"type": "array", "items": closed({"a": SMALL}), "maxItems": 3}


def of_objects() -> Iterator[tuple[str, Schema]]:
    for name, leaf in LEAVES.items():
        yield f"object of a {name}", closed({name: leaf})
        yield f"object that may have a {name}", closed({name: leaf}, [])
        yield (
            f"map of {name}",
            {
                "type": "object",
                "additionalProperties": leaf,
                "maxProperties": 3,
            },
        )
    for count in (2, 3, 4, 6, 8, 12, 16):
        several: dict[str, Schema] = {f"p{index}": FLAG for index in range(count)}
        yield f"{count} required", closed(several)
        yield f"{count} optional", closed(several, [])
        yield f"{count}, every other required", closed(several, list(several)[::2])
        yield f"{count}, the last required", closed(several, [f"p{count - 1}"])
    yield "nothing", closed({})
    yield (
        "required beyond properties",
        {
            "type": "object",
            "required": ["x", "y"],
            "additionalProperties": SMALL,
            "maxProperties": 3,
        },
    )
    yield "properties without a type", {"properties": {"a": SMALL}, "required": ["a"]}
    yield "names that need escapes", closed({'a"b': FLAG, "c\\d": FLAG, "e\nf": FLAG, "ü€": FLAG})
    for low, high in [(1, 1), (2, 3), (0, 2)]:
        yield (
            f"{low} to {high} properties",
            {
                "type": "object",
                "additionalProperties": FLAG,
                "minProperties": low,
                "maxProperties": high,
            },
        )
    yield (
        "a pattern of names",
        {
            "type": "object",
            "patternProperties": {"^n_": SMALL},
            "additionalProperties": False,
            "maxProperties": 3,
        },
    )
    yield (
        "two patterns of names",
        {
            "type": "object",
            "patternProperties": {"^n_[a-z]$": SMALL, "^w_[a-z]$": WORD},
            "additionalProperties": False,
            "maxProperties": 3,
        },
    )
    yield (
        "names, patterns and others",
        {
            "type": "object",
            "properties": {"id": SMALL},
            "patternProperties": {"^x-[a-z]$": FLAG},
            "additionalProperties": WORD,
            "required": ["id"],
            "maxProperties": 3,
        },
    )
    yield "nested", closed({"a": closed({"b": closed({"c": closed({"d": FLAG})})})})
    yield "a property that cannot be", closed({"a": FLAG, "never": False}, ["a"])


def of_combinations() -> Iterator[tuple[str, Schema]]:
    names = list(LEAVES)
    for index, one in enumerate(names):
        for other in names[index + 1 :]:
            yield f"any of {one}, {other}", {"anyOf": [LEAVES[one], LEAVES[other]]}
            if (one, other) != ("word", "choice"):  # a choice is a word
                yield f"one of {one}, {other}", {"oneOf": [LEAVES[one], LEAVES[other]]}
            yield f"object of {one}, {other}", closed({"x": LEAVES[one], "y": LEAVES[other]})
            yield (
                f"tuple of {one}, {other}",
                {
                    "type": "array",
                    "prefixItems": [LEAVES[one], LEAVES[other]],
                    "items": False,
                    "minItems": 2,
                },
            )
    for name, leaf in LEAVES.items():
        yield f"{name} or null", {"anyOf": [leaf, {"type": "null"}]}
        yield (
            f"{name} or a list of it",
            {"anyOf": [leaf, {"type": "array", "items": leaf, "maxItems": 2}]},
        )
    yield "nullable", {"anyOf": [WORD, {"type": "null"}]}
    yield (
        "one of three kinds of objects",
        {
            "oneOf": [
                closed({"kind": {"const": kind}, kind: leaf})
                for kind, leaf in list(LEAVES.items())[:3]
            ]
        },
    )
    yield "any of closed objects", {"anyOf": [closed({"a": FLAG}), closed({"b": SMALL})]}
    yield (
        "all of two bounds",
        {"allOf": [{"type": "integer", "minimum": 5}, {"type": "integer", "maximum": 9}]},
    )
    yield (
        "all of two objects",
        {
            "allOf": [
                {"type": "object", "properties": {"a": FLAG}, "required": ["a"]},
                {"type": "object", "properties": {"b": SMALL}, "required": ["b"]},
            ],
            "maxProperties": 2,
        },
    )
    yield (
        "all of, with siblings",
        {
            "type": "object",
            "properties": {"a": FLAG},
            "required": ["a"],
            "allOf": [{"properties": {"b": CHOICE}, "required": ["b"]}],
            "maxProperties": 2,
        },
    )
    yield (
        "all of a pattern and a length",
        {"allOf": [{"type": "string", "pattern": "^[ab]+$"}, {"minLength": 2, "maxLength": 4}]},
    )
    yield (
        "any of within all of",
        {
            "allOf": [
                {"anyOf": [{"type": "integer"}, {"type": "string"}]},
                {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "boolean"}]},
            ]
        },
    )
    yield "any of with siblings", {"type": "string", "anyOf": [{"maxLength": 2}, CHOICE]}
    yield "any of, nested", {"anyOf": [{"anyOf": [FLAG, SMALL]}, {"anyOf": [CHOICE]}]}
    yield (
        "one of a flag and an empty object",
        {"oneOf": [{"type": "boolean"}, {"type": "object", "maxProperties": 0}]},
    )
    yield "one of only one", {"oneOf": [SMALL]}


def of_references() -> Iterator[tuple[str, Schema]]:
    yield "a reference", {"$defs": {"leaf": SMALL}, "$ref": "#/$defs/leaf"}
    yield (
        "a reference by its older place",
        {
            "definitions": {"leaf": FLAG},
            **closed({"a": {"$ref": "#/definitions/leaf"}}),
        },
    )
    yield (
        "two references",
        {
            "$defs": {"word": WORD, "pair": closed({"a": {"$ref": "#/$defs/word"}})},
            **closed({"x": {"$ref": "#/$defs/pair"}, "y": {"$ref": "#/$defs/word"}}),
        },
    )
    yield (
        "a reference with siblings",
        {
            "$defs": {"n": {"type": "integer", "minimum": 0}},
            "$ref": "#/$defs/n",
            "maximum": 5,
        },
    )
    yield (
        "a list that refers to itself",
        closed({"value": SMALL, "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}}),
    )
    yield (
        "a tree",
        {
            "$defs": {
                "node": closed(
                    {
                        "name": CHOICE,
                        "children": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/node"},
                            "maxItems": 2,
                        },
                    }
                )
            },
            "$ref": "#/$defs/node",
        },
    )
    yield (
        "two that refer to each other",
        {
            "$defs": {
                "even": closed({"odd": {"anyOf": [{"$ref": "#/$defs/odd"}, {"type": "null"}]}}),
                "odd": closed({"even": {"anyOf": [{"$ref": "#/$defs/even"}, {"type": "null"}]}}),
            },
            "$ref": "#/$defs/even",
        },
    )
    yield (
        "a name with a slash and a tilde",
        {
            "$defs": {"a/b~c": FLAG},
            "$ref": "#/$defs/a~1b~0c",
        },
    )
    yield (
        "a name of its own",
        {
            "$id": "https://quire.example/s",
            "$defs": {"x": SMALL},
            **closed({"a": {"$ref": "#/$defs/x"}}),
        },
    )


def of_annotations() -> Iterator[tuple[str, Schema]]:
    """Keywords that annotate and do not constrain values."""
    remarks = {
        "title": "A title",
        "description": "What it is",
        "default": 3,
        "examples": [1, 2],
        "deprecated": True,
        "readOnly": True,
        "writeOnly": False,
        "$comment": "for authors",
    }
    for keyword, value in remarks.items():
        yield f"annotation {keyword}", {**SMALL, keyword: value}
    for draft in ("draft-07/schema#", "draft/2019-09/schema", "draft/2020-12/schema"):
        scheme = "http" if "07" in draft else "https"
        yield f"dialect {draft}", {"$schema": f"{scheme}://json-schema.org/{draft}", **SMALL}
    yield "an unknown keyword", {**SMALL, "x-unit": "metres"}
    yield "strings of some content", {**WORD, "contentEncoding": "base64"}


def of_applications() -> Iterator[tuple[str, Schema]]:
    """Schemas as applications send them."""
    yield (
        "a person",
        closed(
            {"name": WORD, "age": SMALL, "email": {"type": "string", "format": "email"}},
            ["name", "age"],
        ),
    )
    yield (
        "an event",
        closed(
            {
                "name": WORD,
                "date": {"type": "string", "format": "date"},
                "participants": {"type": "array", "items": WORD, "maxItems": 3},
            }
        ),
    )
    yield (
        "steps of reasoning",
        closed(
            {
                "steps": {
                    "type": "array",
                    "items": closed({"explanation": WORD, "output": WORD}),
                    "minItems": 1,
                    "maxItems": 3,
                },
                "final_answer": WORD,
            }
        ),
    )
    yield (
        "a user interface",
        {
            "$defs": {
                "part": closed(
                    {
                        "type": {"enum": ["div", "button", "field"]},
                        "label": WORD,
                        "children": {
                            "type": "array",
                            "items": {"$ref": "#/$defs/part"},
                            "maxItems": 2,
                        },
                    }
                )
            },
            "$ref": "#/$defs/part",
        },
    )
    yield (
        "moderation",
        closed(
            {
                "is_violating": FLAG,
                "category": {"anyOf": [{"enum": ["violence", "fraud"]}, {"type": "null"}]},
                "explanation": {"type": ["string", "null"], "maxLength": 10},
            }
        ),
    )
    yield (
        "a call of a function",
        closed(
            {
                "name": {"const": "get_weather"},
                "arguments": closed({"city": WORD, "unit": {"enum": ["C", "F"]}}),
            }
        ),
    )
    yield (
        "a query",
        closed(
            {
                "table": {"enum": ["orders", "customers"]},
                "columns": {"type": "array", "items": {"enum": ["id", "date"]}, "maxItems": 2},
                "conditions": {
                    "type": "array",
                    "maxItems": 2,
                    "items": closed(
                        {
                            "column": WORD,
                            "operator": {"enum": ["=", ">", "<="]},
                            "value": {"anyOf": [WORD, SMALL]},
                        }
                    ),
                },
            }
        ),
    )
    yield (
        "a pydantic model",
        {
            "$defs": {
                "Colour": {"enum": ["red", "blue"], "title": "Colour", "type": "string"},
                "Part": {
                    "properties": {
                        "size": {"maximum": 9, "minimum": 0, "title": "Size", "type": "integer"},
                        "colour": {"$ref": "#/$defs/Colour"},
                    },
                    "required": ["size", "colour"],
                    "title": "Part",
                    "type": "object",
                    "additionalProperties": False,
                },
            },
            "properties": {
                "parts": {
                    "items": {"$ref": "#/$defs/Part"},
                    "maxItems": 2,
                    "title": "Parts",
                    "type": "array",
                },
                "note": {
                    "anyOf": [{"type": "string", "maxLength": 6}, {"type": "null"}],
                    "default": None,
                    "title": "Note",
                },
            },
            "required": ["parts"],
            "title": "Whole",
            "type": "object",
            "additionalProperties": False,
        },
    )


def of_generators() -> Iterator[tuple[str, Schema]]:
    """What zod 4 and pydantic write beside the above."""
    names = {"enum": ["a", "b"]}
    yield (
        "zod record",
        {"type": "object", "propertyNames": {"type": "string"}, "additionalProperties": SMALL},
    )
    yield (
        "zod record of names",
        {"type": "object", "propertyNames": names, "additionalProperties": SMALL},
    )
    told = {"type": "object", "propertyNames": names, "additionalProperties": FLAG}
    yield "zod record of all names", {**told, "required": ["a", "b"]}
    own = {"properties": {"a": SMALL, "c": SMALL}}
    yield "names beside properties", {**told, **own, "required": ["a"]}
    yield (
        "names that are referred to",
        {
            "type": "object",
            "propertyNames": {"$ref": "#/$defs/name"},
            "additionalProperties": SMALL,
            "required": ["x"],
            "$defs": {"name": {"type": "string", "enum": ["x", "y"], "title": "Name"}},
        },
    )
    by_pattern = {
        "type": "object",
        "propertyNames": {"pattern": "^[xy]{1,2}$"},
        "additionalProperties": SMALL,
    }
    yield "names of a pattern", by_pattern
    yield (
        "names of a format",
        {"type": "object", "propertyNames": {"format": "date"}, "additionalProperties": SMALL},
    )
    email = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    email += r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
    yield "zod email", closed({"to": {"type": "string", "format": "email", "pattern": email}})
    nano = {"type": "string", "format": "nanoid", "pattern": "^[a-zA-Z0-9_-]{21}$"}
    yield "zod nanoid", nano
    decimal = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"
    either = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": decimal}]}
    yield "pydantic decimal", closed({"price": either})
    yield "int64", {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
    yield "int64 without a maximum", {"type": "integer", "minimum": -(2**63)}


GROUPS = (
    of_types,
    of_values,
    of_numbers,
    of_strings,
    of_arrays,
    of_objects,
    of_combinations,
    of_references,
    of_annotations,
    of_applications,
    of_generators,
)
SCHEMAS: dict[str, Schema] = {name: schema for group in GROUPS for name, schema in group()}

REFUSED: dict[str, Schema] = {
    "not": {"not": {"type": "string"}},
    "if": {"if": {"type": "integer"}, "then": {"minimum": 3}},
    "contains": {"type": "array", "contains": SMALL},
    "minContains": {"type": "array", "contains": SMALL, "minContains": 2},
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "propertyNames": {"type": "object", "propertyNames": {"maxLength": 3}},
    "dependentRequired": {"type": "object", "dependentRequired": {"a": ["b"]}},
    "dependentSchemas": {"type": "object", "dependentSchemas": {"a": FLAG}},
    "dependencies": {"type": "object", "dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"type": "object", "unevaluatedProperties": False},
    "unevaluatedItems": {"type": "array", "unevaluatedItems": False},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "oneOf": {"oneOf": [WORD, CHOICE]},
    "exclusiveMinimum": {"type": "integer", "minimum": 1, "exclusiveMinimum": True},
    "stsring": {"type": "stsring"},
    "zork": {"type": "string", "format": "zork"},
    "nowhere": {"$ref": "#/$defs/nowhere"},
    "refer to itself": {"$ref": "#"},
    "nothing but refer": {
        "$defs": {"a": {"allOf": [{"$ref": "#/$defs/b"}]}, "b": {"$ref": "#/$defs/a"}},
        "$ref": "#/$defs/a",
    },
    "example.com": {"$ref": "https://example.com/schema"},
    "look-ahead": {"type": "string", "pattern": "(?=look)ahead"},
    "minLength": {"type": "string", "minLength": 3, "maxLength": 2},
    "required": {"type": "object", "required": "name"},
    "false": False,
    "minimum": {"type": "integer", "minimum": "3"},
}
