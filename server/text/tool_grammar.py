"""What an answer that calls tools is held to, so that its calls are always well-formed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from server.text.dialects import Dialect
from server.text.lark import ANY_TEXT, Lark

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# What a schema may say beside its properties where each argument is written by itself.
_ABOUT = {"type", "title", "description", "$schema", "default", "examples", "x-guidance"}
_PLAIN = _ABOUT | {"properties", "required", "additionalProperties", "$defs", "definitions"}


class CallableTool(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    is_held: bool  # the arguments satisfy the schema; otherwise they are any object


class UnholdableSchema(ValueError):
    """A tool's schema says what calls in this dialect cannot be held to; the text says what."""


def calls_only(
    lark: Lark, dialect: Dialect, tools: Sequence[CallableTool], *, is_parallel: bool
) -> str:
    """An answer that is a call of one of ``tools``, or several of them.

    Raises:
        UnholdableSchema: the arguments of a tool cannot be held to its schema.
    """
    return lark.rule(
        f"{lark.literal(_opening(dialect))} {_rest(lark, dialect, tools, is_parallel)}"
    )


def text_or_calls(
    lark: Lark, dialect: Dialect, tools: Sequence[CallableTool], *, is_parallel: bool
) -> str:
    """An answer that is text, and then, wherever it writes their beginning, calls.

    Raises as ``calls_only`` does.
    """
    rest = _rest(lark, dialect, tools, is_parallel)
    opening = _opening(dialect)
    if not opening.startswith(dialect.opener) or not dialect.opener:  # nothing tells them but "{"
        text = lark.rule(rf"/(\s*[^\s{re.escape(dialect.bare)}](.|\n)*)?/", terminal=True)
        return f"({text} | {lark.literal(opening)} {rest})"
    text = lark.rule(ANY_TEXT, terminal=True)
    begun = lark.until(dialect.opener)
    left = lark.literal(opening.removeprefix(dialect.opener))
    return f"({text} | {begun} {left} {rest})"


def _opening(dialect: Dialect) -> str:
    """What all calls begin with, in front of the name of the first."""
    return dialect.begins + dialect.head.partition("{}")[0]


def _rest(lark: Lark, dialect: Dialect, tools: Sequence[CallableTool], is_parallel: bool) -> str:
    """What comes after the opening: from the first call's name on."""
    before_name, _, after_name = dialect.head.partition("{}")
    calls = []
    for tool in tools:
        schema = tool.parameters if tool.is_held else _ANY_OBJECT
        if dialect.is_pythonic:
            arguments = _keywords(lark, schema)
        else:
            arguments = lark.schema({**schema, "type": "object"})
        head, tail = lark.literal(tool.name + after_name), lark.literal(dialect.tail)
        calls.append(f"{head} {arguments} {tail}")
    call = lark.rule(" | ".join(calls))
    several = f"({lark.literal(dialect.between + before_name)} {call})*" if is_parallel else ""
    return lark.rule(f"{call} {several} {lark.literal(dialect.ends)}")


def _keywords(lark: Lark, schema: Mapping[str, Any]) -> str:
    """Keyword arguments in the order of the schema's properties, those that are required first."""
    properties: Mapping[str, Any] = schema.get("properties", {})
    if unknown := set(schema) - _PLAIN:
        raise UnholdableSchema(
            f"{min(unknown)!r} cannot be held in the way this model writes calls"
        )
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    required = [name for name in schema.get("required", []) if name in properties]
    written: dict[str, str] = {}
    for name, inner in properties.items():
        if not re.fullmatch(r"[\w.-]+", name):
            raise UnholdableSchema(f"the argument {name[:40]!r} cannot be written by this model")
        value = lark.schema({**definitions, **(inner if isinstance(inner, dict) else {})})
        written[name] = lark.rule(f"{lark.literal(name + '=')} {value}")
    comma = lark.literal(", ")
    fixed = f" {comma} ".join(written[name] for name in required)
    optional = [rule for name, rule in written.items() if name not in required]
    if fixed:
        return " ".join([fixed, *(f"({comma} {rule})?" for rule in optional)])
    # Whichever of them comes first has no comma before it.
    following = [f"({comma} {rule})?" for rule in optional]
    starts = [" ".join([rule, *following[at + 1 :]]) for at, rule in enumerate(optional)]
    return "(" + " | ".join(starts) + ")?" if starts else ""
