"""Schemas that require themselves without an end are found, and no others are taken for such."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from engine.errors import InvalidParameter
from engine.grammar.finiteness import has_finite_text
from engine.grammar.json_schema import prepare_schema

NODE = {"$ref": "#/$defs/node"}


def recursive(node: dict[str, Any], **schema: Any) -> dict[str, Any]:
    return {**(schema or NODE), "$defs": {"node": node}}


def required(*values: Any) -> dict[str, Any]:
    properties = {f"p{index}": value for index, value in enumerate(values)}
    return {"type": "object", "properties": properties, "required": list(properties)}


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        required({"$ref": "#"}),
        recursive(required({"type": "integer"}, NODE)),
        recursive({"type": "array", "items": NODE, "minItems": 1}),
        recursive({"type": "array", "prefixItems": [NODE], "minItems": 1}),
        recursive({"anyOf": [required(NODE), {"type": "array", "items": NODE, "minItems": 2}]}),
        recursive({"allOf": [{"type": "object"}, required(NODE)]}),
        recursive(required(NODE), **required({"type": "string"}, NODE)),
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": required({"$ref": "#/$defs/a~1b"})}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
    ],
)
def test_what_requires_itself_is_refused(schema: dict[str, Any]) -> None:
    assert not has_finite_text(schema)
    with pytest.raises(InvalidParameter, match="no finite text"):
        prepare_schema(schema)


class Tree(BaseModel):
    name: str
    children: list[Tree]
    parent: Tree | None


CHAIN = {f"d{index}": required({"$ref": f"#/$defs/d{index + 1}"}) for index in range(200)}


@pytest.mark.parametrize(
    "schema",
    [
        {},
        Tree.model_json_schema(),
        recursive({"anyOf": [required(NODE), {"type": "null"}]}),
        recursive(required(NODE) | {"type": ["object", "null"]}),
        recursive({"type": "array", "items": NODE}),
        recursive({"type": "array", "prefixItems": [{}], "items": NODE, "minItems": 1}),
        recursive({"type": "object", "properties": {"next": NODE}}),
        recursive(required(NODE) | {"const": 1}),
        recursive(required(NODE), type="string"),
        required({"$ref": "https://example.com/other#"}, {"$ref": "#/nowhere"}),
        {"type": "object", "required": "next", "properties": [NODE], "$ref": ["#"]},
        {"$ref": "#/allOf/" + "9" * 5000, "allOf": [{}]},
        {"$ref": "#/$defs/d0", "$defs": {**CHAIN, "d200": {"type": "integer"}}},
        {"$ref": "#/$defs/d0", "$defs": {**dict(reversed(CHAIN.items())), "d200": {}}},
    ],
)
def test_what_may_end_is_not(schema: dict[str, Any]) -> None:
    assert has_finite_text(schema)


def test_many_references_to_all_of_each_other_are_followed_once_each() -> None:
    """Followed again for each one that is settled, they would take minutes."""
    names = [f"d{index}" for index in range(400)]
    references = [{"$ref": f"#/$defs/{name}"} for name in names]
    schema = {"$ref": "#/$defs/d0", "$defs": {name: required(*references) for name in names}}
    assert not has_finite_text(schema)
    chain = {f"d{index}": required(*references[index + 1 :]) for index in range(400)}
    assert has_finite_text({**schema, "$defs": chain})
