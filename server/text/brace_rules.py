"""Grammar rules for values in braces with strings between marks; see ``brace_calls``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from server.text.argument_kinds import argument_types, resolve
from server.text.enforceable import (
    ARGUMENT_NAME,
    UnenforceableSchema,
    VisitBudget,
    are_schemas,
    comma_separated,
    constraints_of,
    split_properties,
    unsupported_keyword,
)
from server.text.lark import LarkBuilder
from server.text.text_rules import TEXT_KEYWORDS, text_patterns

_SCALARS = ("null", "boolean", "number", "integer")


class BraceRules:
    """The rules for the values of one call.

    Args:
        lark: receives the rules.
        quote: the mark before and after a string.
        root: the schema in which references are resolved.
    """

    def __init__(self, lark: LarkBuilder, quote: str, root: Mapping[str, Any]) -> None:
        self._lark = lark
        self._quote = quote
        self._root = root
        self._budget = VisitBudget()

    def members(self, schema: Mapping[str, Any], depth: int = 0) -> str:
        """The contents of the braces of an object with this schema.

        Raises:
            UnenforceableSchema: the schema cannot be enforced.
        """
        lark = self._lark
        required, optional = split_properties(schema)
        rules = {
            name: lark.rule(f"{lark.literal(name + ':')} {self._value(inner, depth)}")
            for name, inner in (required | optional).items()
        }
        fixed, others = ([rules[name] for name in names] for names in (required, optional))
        return comma_separated(fixed, others, lark.literal(","))

    def any_members(self) -> str:
        """The contents of the braces of any object."""
        return self._any_value_rules[1]

    def _value(self, schema: Mapping[str, Any], depth: int) -> str:
        self._budget.visit(depth)
        target = resolve(schema.get("$ref"), self._root)
        if target is not None:
            return self._value(target, depth + 1)
        for several in (schema.get("anyOf"), schema.get("oneOf")):
            if are_schemas(several):
                return self._one_of([self._value(one, depth + 1) for one in several])
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            return self._one_of([self._constant(value) for value in values])
        if not constraints_of(schema) and "type" not in schema:
            return self._any_value_rules[0]
        return self._one_of([self._typed_rule(kind, schema, depth) for kind in self._kinds(schema)])

    def _kinds(self, schema: Mapping[str, Any]) -> list[str]:
        if "type" not in schema:
            type_by_keyword = {"properties": "object", "items": "array"}
            if kinds := [kind for key, kind in type_by_keyword.items() if key in schema]:
                return kinds
        return sorted(argument_types(schema, self._root))

    def _typed_rule(self, kind: str, schema: Mapping[str, Any], depth: int) -> str:
        lark = self._lark
        if kind in _SCALARS:
            about = {key: value for key, value in schema.items() if key != "type"}
            return lark.schema({**about, "type": kind})
        if kind == "string":
            if unknown := constraints_of(schema, *TEXT_KEYWORDS):
                raise unsupported_keyword(unknown)
            patterns, end = text_patterns(schema), self._quote
            text = lark.matching_until(patterns, end) if patterns else lark.until(end)
            return f"{lark.literal(self._quote)} {text}"
        if kind == "array":
            if unknown := constraints_of(schema, "items"):
                raise unsupported_keyword(unknown)
            items = schema.get("items")
            value = self._value(items if isinstance(items, Mapping) else {}, depth + 1)
            each = lark.rule(value)
            comma = lark.literal(",")
            return f"{lark.literal('[')} ({each} ({comma} {each})*)? {lark.literal(']')}"
        has_members = "properties" in schema
        inside = self.members(schema, depth + 1) if has_members else self.any_members()
        return f"{lark.literal('{')} {inside} {lark.literal('}')}"

    def _constant(self, value: Any) -> str:
        if isinstance(value, str):
            return self._lark.literal(f"{self._quote}{value}{self._quote}")
        if isinstance(value, list | dict):
            raise UnenforceableSchema("'enum' of lists and objects cannot be held by this model")
        return self._lark.literal(json.dumps(value))

    def _one_of(self, rules: list[str]) -> str:
        return rules[0] if len(rules) == 1 else f"({' | '.join(rules)})"

    @cached_property
    def _any_value_rules(self) -> tuple[str, str]:
        """Any value, and the contents of the braces of any object."""
        lark = self._lark
        name = lark.rule(f"/{ARGUMENT_NAME.pattern}/", terminal=True)
        scalar = lark.schema({"type": list(_SCALARS)})
        text = f"{lark.literal(self._quote)} {lark.until(self._quote)}"
        comma, colon = lark.literal(","), lark.literal(":")
        members = ""

        def value_of(value: str) -> str:
            nonlocal members
            member = lark.rule(f"{name} {colon} {value}")
            members = f"({member} ({comma} {member})*)?"
            listing = f"{lark.literal('[')} ({value} ({comma} {value})*)? {lark.literal(']')}"
            braced = f"{lark.literal('{')} {members} {lark.literal('}')}"
            return f"{scalar} | {text} | {listing} | {braced}"

        return lark.recursive(value_of), members
