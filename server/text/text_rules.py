"""Grammar rules for texts that stand between tags as they are, without quotes.

JSON's own rules cannot be used there: a text ends at its closing tag, which it cannot hold. So the
keywords of a string's schema become regular expressions, all of which the text matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine.grammar.formats import ALL_FORMATS, IGNORED_FORMATS
from engine.grammar.lookaround import without_lookaround
from server.text.argument_kinds import argument_types, resolve
from server.text.enforceable import (
    UnenforceableSchema,
    VisitBudget,
    are_schemas,
    constraints_of,
    unsupported_keyword,
)
from server.text.lark import LarkBuilder

TEXT_KEYWORDS = ("minLength", "maxLength", "pattern", "format")  # those that can be held
_ANY = r"(.|\n)"


def tagged_text(
    lark: LarkBuilder,
    schema: Mapping[str, Any],
    root: Mapping[str, Any],
    end: str,
    *,
    is_trimmed: bool,
) -> str:
    """A text, or null, that satisfies ``schema``, and ``end`` behind it.

    Args:
        lark: receives the rules.
        schema: of strings and null alone.
        root: the schema in which references are resolved.
        end: the closing tag.
        is_trimmed: a line break at an end of the text is not part of it, so it has none.

    Raises:
        UnenforceableSchema: the schema cannot be enforced.
    """
    options = [_option(lark, one, end, is_trimmed) for one in _Alternatives(root).of(schema)]
    if None in options:  # any text, whatever the others are
        return lark.until(end)
    return f"({' | '.join(filter(None, options))})"


class _Alternatives:
    """The schemas of which a value satisfies one, none of which has alternatives or references."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self._root = root
        self._budget = VisitBudget()

    def of(self, schema: Mapping[str, Any], depth: int = 0) -> list[Mapping[str, Any]]:
        """Those of ``schema``. Raises UnenforceableSchema."""
        self._budget.visit(depth)
        for keyword in ("$ref", "anyOf", "oneOf"):
            if keyword not in schema:
                continue
            if others := constraints_of(schema, keyword):
                raise unsupported_keyword(others)
            if keyword != "$ref":
                if not are_schemas(schema[keyword]):
                    raise UnenforceableSchema(f"{keyword!r} must be a list of schemas")
                each = [self.of(one, depth + 1) for one in schema[keyword]]
                found = [one for several in each for one in several]
                if keyword == "oneOf" and _may_overlap(found):
                    raise unsupported_keyword({"oneOf"})
                return found
            target = resolve(schema[keyword], self._root)
            return [schema] if target is None else self.of(target, depth + 1)
        return [schema]


def _option(lark: LarkBuilder, schema: Mapping[str, Any], end: str, is_trimmed: bool) -> str | None:
    """The texts that a schema allows, and the end; None for any text."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list):
        return _one_of([_text_of(value) for value in values], lark, end, is_trimmed)
    kinds = argument_types(schema, {})
    if kinds == {"null"}:
        return lark.literal("null" + end)
    if unknown := constraints_of(schema, *TEXT_KEYWORDS):
        raise unsupported_keyword(unknown)
    patterns = text_patterns(schema)
    if not patterns:
        return None
    if is_trimmed:
        patterns.append(rf"({_ANY}*[^\n])?")
        patterns.append(rf"([^\n]{_ANY}*)?")
    text = lark.matching_until(patterns, end)
    return f"{text} | {lark.literal('null' + end)}" if "null" in kinds else text


def _may_overlap(schemas: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a text may satisfy several of some schemas, judged by their keywords."""
    texts = [one for one in schemas if "string" in argument_types(one, {})]
    return len(texts) > 1 and not all("enum" in one or "const" in one for one in texts)


def _one_of(texts: list[str], lark: LarkBuilder, end: str, is_trimmed: bool) -> str:
    for text in texts:
        if end in text or (is_trimmed and text != text.strip("\n")):
            raise UnenforceableSchema(f"the value {text[:40]!r} cannot be written by this model")
    return " | ".join(lark.literal(text + end) for text in texts)


def _text_of(value: Any) -> str:
    return "null" if value is None else str(value)


def text_patterns(schema: Mapping[str, Any]) -> list[str]:
    """Regular expressions for the whole text, of the keywords of a string's schema.

    Raises:
        UnenforceableSchema: a format or a pattern has none.
    """
    patterns: list[str] = []
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    if least or most != "":
        patterns.append(f"{_ANY}{{{least},{most}}}")
    if "pattern" in schema:
        patterns.append(_whole(schema["pattern"]))
    form = schema.get("format")
    if isinstance(form, str) and form in ALL_FORMATS:
        patterns.append(ALL_FORMATS[form])
    elif form not in (None, *IGNORED_FORMATS) and "pattern" not in schema:
        raise UnenforceableSchema(f"the format {str(form)[:40]!r} cannot be held by this model")
    return patterns


def _whole(pattern: Any) -> str:
    """A regular expression for texts in which ``pattern`` is found, with its anchors resolved.

    Raises:
        UnenforceableSchema: there are anchors elsewhere than at the ends.
    """
    inner = without_lookaround(str(pattern))
    begins = inner.startswith("^")
    backslashes = len(inner[:-1]) - len(inner[:-1].rstrip("\\"))
    ends = inner.endswith("$") and not backslashes % 2
    inner = inner[begins : len(inner) - ends]
    if (begins or ends) and _has_alternatives(inner):
        raise unsupported_keyword({"pattern"})
    before, behind = "" if begins else f"{_ANY}*", "" if ends else f"{_ANY}*"
    return f"{before}({inner}){behind}"


def _has_alternatives(pattern: str) -> bool:
    """Whether there is a ``|`` outside of groups and classes, to which an anchor belongs alone."""
    depth, in_class, is_escaped = 0, False, False
    for char in pattern:
        if is_escaped or char == "\\":
            is_escaped = not is_escaped
        elif in_class:
            in_class = char != "]"
        elif char == "[":
            in_class = True
        elif char in "()":
            depth += 1 if char == "(" else -1
        elif char == "|" and not depth:
            return True
    return False
