"""The grammar of answers that call tools, which makes their calls well-formed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from server.text.argument_rules import constrained_arguments, unconstrained_arguments
from server.text.dialects import Dialect
from server.text.lark import ANY_TEXT, LarkBuilder


class CallableTool(NamedTuple):
    """A callable tool."""

    name: str
    parameters: Mapping[str, Any]  # a JSON schema of an object
    is_strict: bool  # the arguments satisfy the schema; otherwise any object


def calls_only(
    lark: LarkBuilder, dialect: Dialect, tools: Sequence[CallableTool], *, is_parallel: bool
) -> str:
    """An answer that consists of one call of ``tools``, or several.

    Raises:
        UnenforceableSchema: a tool's schema cannot be enforced on its arguments.
    """
    return lark.rule(
        f"{lark.literal(_opening(dialect))} {_rest(lark, dialect, tools, is_parallel)}"
    )


def text_or_calls(
    lark: LarkBuilder, dialect: Dialect, tools: Sequence[CallableTool], *, is_parallel: bool
) -> str:
    """An answer of text, followed by calls once the model writes the start of one.

    Raises as ``calls_only`` does.
    """
    rest = _rest(lark, dialect, tools, is_parallel)
    opening = _opening(dialect)
    if not opening.startswith(dialect.opener) or not dialect.opener:  # only "{" announces them
        text = lark.rule(rf"/(\s*[^\s{re.escape(dialect.bare_start)}](.|\n)*)?/", terminal=True)
        return f"({text} | {lark.literal(opening)} {rest})"
    text = lark.rule(ANY_TEXT, terminal=True)
    begun = lark.until(dialect.opener)
    left = lark.literal(opening.removeprefix(dialect.opener))
    return f"({text} | {begun} {left} {rest})"


def _opening(dialect: Dialect) -> str:
    """The common start of all calls, before the first call's name."""
    return dialect.prefix + dialect.call_prefix.partition("{}")[0]


def _rest(
    lark: LarkBuilder, dialect: Dialect, tools: Sequence[CallableTool], is_parallel: bool
) -> str:
    """What follows the opening: from the first call's name on."""
    before_name, _, after_name = dialect.call_prefix.partition("{}")
    # Numbers continue from the calls of earlier turns, which only the model has counted.
    number = ""
    if dialect.is_numbered:
        after_name = after_name.removeprefix(":0")
        number = lark.rule("/:[0-9]{1,4}/", terminal=True)
    calls = []
    for tool in tools:
        if tool.is_strict:
            arguments = constrained_arguments(lark, tool.parameters, dialect)
        else:
            arguments = unconstrained_arguments(lark, dialect)
        if number:
            head = f"{lark.literal(tool.name)} {number} {lark.literal(after_name)}"
        else:
            head = lark.literal(tool.name + after_name)
        calls.append(f"{head} {arguments} {lark.literal(dialect.call_suffix)}")
    call = lark.rule(" | ".join(calls))
    several = ""
    if is_parallel and not dialect.is_single:
        several = f"({lark.literal(dialect.separator + before_name)} {call})*"
    return lark.rule(f"{call} {several} {lark.literal(dialect.suffix)}")
