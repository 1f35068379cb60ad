"""Translates grammars to llguidance's notation."""

from __future__ import annotations

import json
import re
from typing import Any

from engine.errors import InvalidParameter
from engine.grammar.json_schema import prepare_schema, read_schema
from engine.types import Grammar

_ANY_OBJECT = {"type": "object"}
_TOO_LARGE = re.compile(
    r"too (?:big|large|many|complex)|recursion limit|limit (?:reached|exceeded)|fuel", re.IGNORECASE
)


def to_llguidance(grammar: Grammar) -> str:
    """The grammar in the library's notation.

    Raises:
        InvalidParameter: the text does not match its kind.
    """
    from llguidance import LLMatcher

    match grammar.kind:
        case "json_object":
            return _of_schema(prepare_schema(_ANY_OBJECT))
        case "json_schema":
            return _of_schema(read_schema(grammar.text))
        case "regex":
            return LLMatcher.grammar_from_regex(grammar.text)
        case "choice":
            return LLMatcher.grammar_from_regex(_one_of(grammar.text))
        case "lark":
            return LLMatcher.grammar_from_lark(grammar.text)


def compile_error(reason: str) -> InvalidParameter:
    """Convert the library's error message to an exception for the client.

    The first line of the message is the problem; the others repeat the grammar.
    """
    reason = reason.replace("<non-verbose/>", "")
    lines = [line.strip() for line in reason.strip().splitlines() if line.strip()]
    problem = lines[0] if lines else "it cannot be compiled"
    if "NoExtension" in problem:  # there is no token to begin with
        problem = "no text satisfies it, as where it does nothing but refer to itself"
        lines = [problem]
    elif "coerce_one_of" in problem:
        problem = (
            "'oneOf' can be held only where it is clear that no value satisfies two of its schemas"
        )
        lines = [problem]
    elif "JSON schema" in problem:
        lines = [problem]  # the problem lies within one line of the grammar
    code = "grammar_timeout" if _TOO_LARGE.search(problem) else None
    return InvalidParameter(" ".join(lines)[:300] or problem, param="grammar", code=code)


def _of_schema(schema: dict[str, Any]) -> str:
    from llguidance import LLMatcher

    try:
        return LLMatcher.grammar_from_json_schema(json.dumps(schema, allow_nan=False))
    except (ValueError, RecursionError) as error:
        raise compile_error(str(error)) from None


def _one_of(text: str) -> str:
    """A regular expression for one of the strings in a JSON list."""
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError):
        choices = None
    if not isinstance(choices, list) or not choices:
        raise InvalidParameter("the choices must be a list of strings", param="grammar")
    if not all(isinstance(choice, str) and choice for choice in choices):
        raise InvalidParameter("each choice must be a string that is not empty", param="grammar")
    return "|".join(f"(?:{_escaped(choice)})" for choice in choices)


def _escaped(text: str) -> str:
    """A regular expression in Rust's syntax that matches only ``text``."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)
