"""Construction of grammars in llguidance's Lark dialect.

A fragment is an expression that can be the right side of a rule; larger ones get rules of their
own. See https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine.grammar.json_schema import prepare_schema

ANY_TEXT = r"/(.|\n)*/"


class LarkBuilder:
    """The rules of one grammar, and the encoding of their literals."""

    def __init__(self, special_ids: Mapping[str, int]) -> None:
        """Begin; ``special_ids`` are the special tokens that literals may contain, by spelling."""
        self._special_ids = dict(special_ids)
        spellings = sorted(self._special_ids, key=len, reverse=True)
        self._special = re.compile("(" + "|".join(map(re.escape, spellings)) + ")")
        self._rules: list[str] = []

    def rule(self, expression: str, *, options: str = "", terminal: bool = False) -> str:
        """Add a rule for ``expression`` and return its name."""
        name = f"r{len(self._rules)}"
        name = name.upper() if terminal else name
        self._rules.append(f"{name}{options}: {expression}")
        return name

    def recursive(self, expression_of: Callable[[str], str]) -> str:
        """Add a rule whose expression refers to the rule's own name, and return that name."""
        name = self.rule("")
        place = len(self._rules) - 1
        self._rules[place] = f"{name}: {expression_of(name)}"
        return name

    def literal(self, text: str) -> str:
        """Exactly ``text``; a special token in it has no text and is matched by its id."""
        pieces = self._special.split(text) if self._special_ids else [text]
        return " ".join(
            f"<[{self._special_ids[piece]}]>" if piece in self._special_ids else _quoted(piece)
            for piece in pieces
            if piece
        )

    def schema(self, schema: Mapping[str, Any]) -> str:
        """JSON text that satisfies ``schema``. Raises InvalidParameter if it is not a schema."""
        return self.rule("%json " + json.dumps(prepare_schema(schema)))

    def until(self, text: str) -> str:
        """Any text up to and including the first ``text``."""
        found = self._special.search(text) if self._special_ids else None
        if found is None:
            any_text = self.rule(ANY_TEXT, terminal=True)
            return self.rule(f"{any_text} {self.literal(text)}", options="[lazy]")
        # Text ends at a special token, which it cannot hold: with what ``text`` has before that.
        before = json.dumps(text[: found.start()])
        ends = self.rule(f"{ANY_TEXT} {before}" if found.start() else ANY_TEXT, terminal=True)
        return f"{ends} {self.literal(text[found.start() :])}"

    def matching_until(self, patterns: Sequence[str], text: str) -> str:
        """Text that matches all of ``patterns``, up to and including the first ``text``."""
        matching = " & ".join(map(regex, patterns))
        found = self._special.search(text) if self._special_ids else None
        if found is None:
            without = regex(rf"(.|\n)*{escaped(text)}(.|\n)*")
            return self.rule(f"({matching} & ~{without}) {_quoted(text)}", terminal=True)
        before = _quoted(text[: found.start()])
        whole = self.rule(f"({matching}) {before}" if found.start() else matching, terminal=True)
        return f"{whole} {self.literal(text[found.start() :])}"

    def build(self, start: str) -> str:
        """The grammar with the start expression ``start``, as text."""
        return "\n".join([f"start: {start}", *self._rules]) + "\n"


def regex(pattern: str) -> str:
    """A regular expression between slashes: its own are escaped, and it is put on one line."""
    escaped, out = False, []
    for char in pattern:
        if char == "/" and not escaped:
            char = r"\/"
        elif char == "\n":
            char = "n" if escaped else r"\n"
        out.append(char)
        escaped = char == "\\" and not escaped
    return f"/{''.join(out)}/"


def escaped(text: str) -> str:
    """A regular expression in Rust's syntax that matches only ``text``."""
    return "".join(char if char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
