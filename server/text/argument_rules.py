"""Grammar rules for a call's arguments, in each of the formats that models use."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.text import dsml_calls
from server.text.argument_kinds import argument_kind, argument_types
from server.text.brace_rules import BraceRules
from server.text.dialects import Dialect
from server.text.enforceable import ARGUMENT_NAME, comma_separated, split_properties
from server.text.lark import LarkBuilder
from server.text.text_rules import tagged_text

_NEWLINE = "\n"
# Literals that Python writes differently from JSON.
_PYTHON_VALUE = r"""/'([^'\\\n]|\\.)*'|True|False|None/"""
_TAGS = {  # the delimiters of an argument, by format
    "xml": ("<parameter={}>\n", "\n</parameter>"),
    "invoke": ('<parameter name="{}">', "</parameter>"),
    "pairs": ("<arg_key>{}</arg_key>\n<arg_value>", "</arg_value>"),
    "longcat_pairs": (
        "<longcat_arg_key>{}</longcat_arg_key>\n<longcat_arg_value>",
        "</longcat_arg_value>",
    ),
}


def constrained_arguments(lark: LarkBuilder, schema: Mapping[str, Any], dialect: Dialect) -> str:
    """Arguments that satisfy an object's ``schema``; required ones come first.

    Raises:
        UnenforceableSchema: the schema cannot be enforced.
    """
    kind = dialect.arguments
    if kind == "json":
        return lark.schema({**schema, "type": "object"})
    if kind == "braces":
        return BraceRules(lark, dialect.quote, schema).members(schema)
    required, optional = split_properties(schema)

    def argument(name: str, inner: Mapping[str, Any]) -> str:
        if kind == "python":
            return _keyword_argument(lark, name, inner, schema)
        if kind == "dsml":
            return _dsml_argument(lark, name, inner, schema)
        return _tagged_argument(lark, *_TAGS[kind], name, inner, schema)

    rules = {
        name: lark.rule(argument(name, inner)) for name, inner in (required | optional).items()
    }
    comma = lark.literal(", ") if kind == "python" else ""
    return comma_separated(
        [rules[name] for name in required], [rules[name] for name in optional], comma
    )


def unconstrained_arguments(lark: LarkBuilder, dialect: Dialect) -> str:
    """Any well-formed arguments."""
    kind = dialect.arguments
    if kind == "json":
        return lark.schema({"type": "object"})
    if kind == "braces":
        return BraceRules(lark, dialect.quote, {}).any_members()
    name = lark.rule(f"/{ARGUMENT_NAME.pattern}/", terminal=True)
    if kind == "python":
        value = f"({lark.schema({})} | {lark.rule(_PYTHON_VALUE, terminal=True)})"
        each = lark.rule(f"{name} {lark.literal('=')} {value}")
        return f"({each} ({lark.literal(', ')} {each})*)?"
    if kind == "dsml":
        end = dsml_calls.ARGUMENT_END
        text = f"{lark.literal(dsml_calls.TEXT_BEGIN)} {lark.until(end)}"
        value = f"{lark.literal(dsml_calls.JSON_BEGIN)} {lark.schema({})} {lark.literal(end)}"
        whole = f"{lark.literal(dsml_calls.ARGUMENT_BEGIN)} {name} ({text} | {value})"
        return f"({lark.rule(f'{whole} {lark.literal(_NEWLINE)}')})*"
    begin, end = _TAGS[kind]
    before, _, named = begin.partition("{}")
    whole = f"{lark.literal(before)} {name} {lark.literal(named)} {lark.until(end)}"
    return f"({lark.rule(f'{whole} {lark.literal(_NEWLINE)}')})*"


def _keyword_argument(
    lark: LarkBuilder, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> str:
    return f"{lark.literal(name + '=')} {lark.schema({**_definitions(root), **schema})}"


def _dsml_argument(
    lark: LarkBuilder, name: str, schema: Mapping[str, Any], root: Mapping[str, Any]
) -> str:
    """A string as it is; anything that might be something else as JSON."""
    begin, end = dsml_calls.ARGUMENT_BEGIN + "{}", dsml_calls.ARGUMENT_END
    if argument_types(schema, root) == {"string"}:
        begin += dsml_calls.TEXT_BEGIN
        return _tagged_argument(lark, begin, end, name, schema, root)
    value = lark.schema({**_definitions(root), **schema})
    literal = lark.literal((begin + dsml_calls.JSON_BEGIN).replace("{}", name))
    return f"{literal} {value} {lark.literal(end + _NEWLINE)}"


def _tagged_argument(
    lark: LarkBuilder,
    before: str,
    end: str,
    name: str,
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
) -> str:
    """An argument between ``before``, in which its name replaces ``{}``, and ``end``."""
    begin = lark.literal(before.replace("{}", name))
    if argument_kind(schema, root) != "text":
        value = lark.schema({**_definitions(root), **schema})
        return f"{begin} {value} {lark.literal(end + _NEWLINE)}"
    value = tagged_text(lark, schema, root, end, is_trimmed=end == _TAGS["invoke"][1])
    return f"{begin} {value} {lark.literal(_NEWLINE)}"


def _definitions(root: Mapping[str, Any]) -> dict[str, Any]:
    return {key: root[key] for key in ("$defs", "definitions") if key in root}
