"""Tool calls in the syntax of each model family."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from server.text import dialects


def written(
    dialect: dialects.Dialect,
    calls: Sequence[tuple[str, dict[str, Any]]],
    schemas: Mapping[str, dict[str, Any]],
) -> str:
    """The calls in the syntax of this family; ``schemas`` determine what is a string."""
    if dialect.arguments == "python":
        each = [
            dialect.call_prefix.replace("{}", name)
            + ", ".join(f"{key}={value!r}" for key, value in arguments.items())
            + dialect.call_suffix
            for name, arguments in calls
        ]
    elif dialect.arguments == "invoke":
        each = [
            dialect.call_prefix.replace("{}", name)
            + "".join(
                f'<parameter name="{key}">{_raw(schemas[name], key, value)}</parameter>\n'
                for key, value in arguments.items()
            )
            + dialect.call_suffix
            for name, arguments in calls
        ]
    elif dialect.arguments == "dsml":
        each = [
            dialect.call_prefix.replace("{}", name)
            + "".join(
                f'<｜DSML｜parameter name="{key}" string="{str(isinstance(value, str)).lower()}">'
                f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}"
                "</｜DSML｜parameter>\n"
                for key, value in arguments.items()
            )
            + dialect.call_suffix
            for name, arguments in calls
        ]
    elif dialect.arguments == "xml":
        each = [
            dialect.call_prefix.replace("{}", name)
            + "".join(
                f"<parameter={key}>\n{_raw(schemas[name], key, value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            + dialect.call_suffix
            for name, arguments in calls
        ]
    elif dialect.arguments == "braces":
        each = [
            dialect.call_prefix.replace("{}", name, 1)
            + _members(dialect, arguments)
            + dialect.call_suffix
            for name, arguments in calls
        ]
    elif dialect.arguments in ("pairs", "longcat_pairs"):
        tag = dialect.arguments.removesuffix("pairs") + "arg_"
        each = [
            dialect.call_prefix.replace("{}", name)
            + "".join(
                f"<{tag}key>{key}</{tag}key>\n"
                f"<{tag}value>{_raw(schemas[name], key, value)}</{tag}value>\n"
                for key, value in arguments.items()
            )
            + dialect.call_suffix
            for name, arguments in calls
        ]
    else:
        each = [
            dialect.call_prefix.replace("{}", name, 1).replace(":0", f":{number}")
            + json.dumps(arguments, ensure_ascii=False)
            + dialect.call_suffix
            for number, (name, arguments) in enumerate(calls)
        ]
    return dialect.prefix + dialect.separator.join(each) + dialect.suffix


def _members(dialect: dialects.Dialect, value: Mapping[str, Any]) -> str:
    """Keys are marked like strings if they could not be parsed otherwise."""
    keys = [
        key if re.fullmatch(r"[\w.-]+", key) else dialect.quote + key + dialect.quote
        for key in value
    ]
    return ",".join(
        f"{key}:{_braced(dialect, one)}" for key, one in zip(keys, value.values(), strict=True)
    )


def _braced(dialect: dialects.Dialect, value: Any) -> str:
    if isinstance(value, str):
        return dialect.quote + value + dialect.quote
    if isinstance(value, list):
        return "[" + ",".join(_braced(dialect, one) for one in value) + "]"
    if isinstance(value, dict):
        return "{" + _members(dialect, value) + "}"
    return json.dumps(value)


def _raw(schema: Mapping[str, Any], key: str, value: Any) -> str:
    is_text = key in schema.get("properties", {}) and isinstance(value, str)
    return value if is_text else json.dumps(value)
