"""What an answer that calls tools is held to, so that its calls are always well-formed."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple

from server.text.argument_kinds import argument_kind
from server.text.dialects import Dialect
from server.text.lark import ANY_TEXT, Lark

_ANY_OBJECT: dict[str, Any] = {"type": "object"}
# What a schema may say beside its properties where each argument is written by itself.
_ABOUT = {"type", "title", "description", "$schema", "default", "examples", "x-guidance"}
_ARGUMENT_NAME = re.compile(r"[\w.-]+")
_NEWLINE = "\n"
_Kind = Literal["python", "xml", "invoke", "pairs"]
_TAGS = {  # what stands before and behind an argument, by how arguments are written
    "xml": ("<parameter={}>\n", "\n</parameter>"),
    "invoke": ('<parameter name="{}">', "</parameter>"),
    "pairs": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
}
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
    # The number goes on from the calls of earlier turns, which only the model has counted.
    number = ""
    if dialect.is_numbered:
        after_name = after_name.removeprefix(":0")
        number = lark.rule("/:[0-9]{1,4}/", terminal=True)
    calls = []
    for tool in tools:
        schema = tool.parameters if tool.is_held else _ANY_OBJECT
        if dialect.arguments == "json":
            arguments = lark.schema({**schema, "type": "object"})
        else:
            arguments = _each(lark, schema, dialect.arguments)
        if number:
            head = f"{lark.literal(tool.name)} {number} {lark.literal(after_name)}"
        else:
            head = lark.literal(tool.name + after_name)
        calls.append(f"{head} {arguments} {lark.literal(dialect.tail)}")
    call = lark.rule(" | ".join(calls))
    several = ""
    if is_parallel and not dialect.is_single:
        several = f"({lark.literal(dialect.between + before_name)} {call})*"
    return lark.rule(f"{call} {several} {lark.literal(dialect.ends)}")


def _each(lark: Lark, schema: Mapping[str, Any], kind: _Kind) -> str:
    """Arguments one by one, those that are required first."""
    if unknown := set(schema) - _PLAIN:
        raise UnholdableSchema(
            f"{min(unknown)!r} cannot be held in the way this model writes calls"
        )
    written: dict[str, str] = {}
    for name, inner in schema.get("properties", {}).items():
        if not _ARGUMENT_NAME.fullmatch(name):
            raise UnholdableSchema(f"the argument {name[:40]!r} cannot be written by this model")
        write = _keyword if kind == "python" else partial(_tag, *_TAGS[kind])
        written[name] = lark.rule(
            write(lark, name, inner if isinstance(inner, dict) else {}, schema)
        )
    required = [name for name in written if name in schema.get("required", [])]
    fixed = [written[name] for name in required]
    optional = [rule for name, rule in written.items() if name not in required]
    return _listed(fixed, optional, lark.literal(", ") if kind == "python" else "")


def _listed(fixed: Sequence[str], optional: Sequence[str], comma: str) -> str:
    """All of ``fixed``, then any of ``optional``, with ``comma`` between."""
    following = [f"({comma} {rule})?" for rule in optional]
    if fixed or not comma:
        return " ".join([f" {comma} ".join(fixed), *following])
    # Whichever of them comes first has no comma before it.
    starts = [" ".join([rule, *following[at + 1 :]]) for at, rule in enumerate(optional)]
    return "(" + " | ".join(starts) + ")?" if starts else ""


def _keyword(lark: Lark, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    return f"{lark.literal(name + '=')} {lark.schema({**_definitions(root), **schema})}"


def _tag(
    before: str,
    end: str,
    lark: Lark,
    name: str,
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
) -> str:
    """An argument between ``before``, with the name in the place of ``{}``, and ``end``."""
    begin = lark.literal(before.replace("{}", name))
    if argument_kind(schema, root) != "text":
        value = lark.schema({**_definitions(root), **schema})
        return f"{begin} {value} {lark.literal(end + _NEWLINE)}"
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        texts = ["null" if value is None else str(value) for value in values]
        value = " | ".join(lark.literal(text + end) for text in texts)
        return f"{begin} ({value}) {lark.literal(_NEWLINE)}"
    if unknown := _said_of_text(schema) - _ABOUT:
        raise UnholdableSchema(
            f"{min(unknown)!r} cannot be held in the way this model writes calls"
        )
    return f"{begin} {lark.until(end)} {lark.literal(_NEWLINE)}"


def _said_of_text(schema: Mapping[str, Any]) -> set[str]:
    """The keywords of a schema of strings, and of the alternatives it consists of."""
    alternatives = schema.get("anyOf", schema.get("oneOf", []))
    inner = [_said_of_text(one) for one in alternatives if isinstance(one, dict)]
    return (set(schema) - {"anyOf", "oneOf"}).union(*inner)


def _unholdable(keywords: Collection[str]) -> UnholdableSchema:
    keyword = min(keywords)
    return UnholdableSchema(f"{keyword!r} cannot be held in the way this model writes calls")


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
