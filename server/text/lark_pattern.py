"""Regular expressions for grammars in Lark's notation, as far as there is one.

Rules that do not refer to themselves describe a regular language, and one expression says the same
as all of them. It can be held wherever a text can have a pattern: in a JSON string, between tags,
between marks. See https://lark-parser.readthedocs.io/en/stable/grammar.html for the notation.

The rules are matched to characters, not to the tokens of a lexer: a text is allowed if there is any
way to divide it according to the grammar.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from typing import NamedTuple

from server.text.lark import escaped

_START = "start"
# Of a grammar, and of its expression, which repeats a rule wherever it is used.
_MAX_CHARS = 65_536
_TOKEN = re.compile(
    r"""
    (?P<blank>   [ \t\f]+ | (?://|\#)[^\n]* )
  | (?P<line>    \r?\n )
  | (?P<text>    "(?:\\.|[^"\\\n])*"i? )
  | (?P<regex>   /(?:\\.|[^/\\\n])+/[imslux]* )
  | (?P<command> %[a-z]+ )
  | (?P<name>    [!?]*_*[A-Za-z][A-Za-z0-9_]* )
  | (?P<number>  [0-9]+ )
  | (?P<mark>    -> | \.\. | [|()\[\]?*+~:,.] )
    """,
    re.VERBOSE,
)
_ODD_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*\\[^\\\"'abfnrtvxuU0-7]")
# The units of an expression in Python's notation, which Lark's terminals have.
_UNIT = re.compile(
    r"""
    (?P<escape> \\(?:[pP]\{\w+\}|.) )
  | (?P<set>    \[\^?\]?(?:\\.|[^\]\\])*\] )
  | (?P<named>  \(\?P?<[A-Za-z_]\w*> )
  | (?P<odd>    \(\?(?![is]*:) )
  | (?P<repeat> (?:[*+?]|\{(?:[0-9]+(?:,[0-9]*)?|,[0-9]+)\})[?+]? )
  | (?P<other>  . )
    """,
    re.VERBOSE | re.DOTALL,
)
_COMMON = {  # of Lark's library
    "DIGIT": r"[0-9]",
    "HEXDIGIT": r"[0-9A-Fa-f]",
    "INT": r"[0-9]+",
    "SIGNED_INT": r"[+-]?[0-9]+",
    "DECIMAL": r"([0-9]+\.[0-9]*|\.[0-9]+)",
    "FLOAT": r"([0-9]+[eE][+-]?[0-9]+|([0-9]+\.[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?)",
    "NUMBER": r"([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "SIGNED_NUMBER": r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?",
    "ESCAPED_STRING": r'"(\\.|[^"\\\n])*"',
    "LCASE_LETTER": r"[a-z]",
    "UCASE_LETTER": r"[A-Z]",
    "LETTER": r"[A-Za-z]",
    "WORD": r"[A-Za-z]+",
    "CNAME": r"[A-Za-z_][A-Za-z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(\r?\n)+",
    "SH_COMMENT": r"#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
}


class _Token(NamedTuple):
    kind: str
    text: str


_END = _Token("end", "end")


class NoPattern(ValueError):
    """No regular expression is known for a grammar; the message says why."""


def lark_pattern(grammar: str) -> str:
    """A regular expression, in the syntax of Rust's, for the texts of a grammar.

    Raises:
        NoPattern: the grammar refers to itself, is malformed or too large, or uses what is not
            translated: templates, look-around, lazy repetition, other grammars.
    """
    if len(grammar) > _MAX_CHARS:
        raise NoPattern("it is too long")
    try:
        return _Grammar(grammar).pattern()
    except RecursionError:
        raise NoPattern("it is nested too deeply") from None


class _Grammar:
    """The definitions of a grammar, and the expressions of those that were needed so far."""

    def __init__(self, text: str) -> None:
        self._bodies: dict[str, list[_Token]] = {}
        self._ignored: list[list[_Token]] = []
        self._patterns: dict[str, str] = {}
        self._open: list[str] = []  # rules whose expressions are being made
        self._between = ""  # what may stand behind each token
        for statement in _statements(_tokens(text)):
            self._read(statement)

    def pattern(self) -> str:
        """The expression of the whole grammar."""
        if self._ignored:
            each = "|".join(
                _Expression(self, body, in_rule=False).whole() for body in self._ignored
            )
            self._between = f"(?:{each})*"
        return self._between + self.expression(_START)

    def expression(self, name: str) -> str:
        """The expression of a rule or a terminal, as one unit."""
        if name in self._open:
            raise NoPattern(f"the rule {name!r} refers to itself")
        if name not in self._bodies:
            raise NoPattern(f"{name!r} is not defined")
        if name not in self._patterns:
            self._open.append(name)
            whole = _Expression(self, self._bodies[name], in_rule=not _is_terminal(name)).whole()
            self._open.pop()
            self._patterns[name] = f"(?:{whole})"
        return self._patterns[name]

    def token(self, pattern: str, *, in_rule: bool) -> str:
        """One token's expression, and behind it what is ignored there."""
        return f"(?:{pattern}){self._between}" if in_rule and self._between else pattern

    def _read(self, statement: list[_Token]) -> None:
        first, *rest = statement
        if first.text == "%import":
            self._import(rest)
        elif first.text == "%ignore":
            self._ignored.append(rest)
        elif first.kind == "name":
            name = first.text.lstrip("?!")
            if [token.kind for token in rest[:2]] == ["mark", "number"] and rest[0].text == ".":
                rest = rest[2:]  # a priority, for which texts are not to be divided in one way
            if not rest or rest[0].text != ":" or name in self._bodies:
                raise NoPattern(f"the definition of {name!r} is not understood")
            self._bodies[name] = rest[1:]
        else:
            raise NoPattern(f"{first.text!r} is not understood")

    def _import(self, tokens: list[_Token]) -> None:
        """``common.NAME``, ``common.NAME -> ALIAS`` or ``common (NAME, NAME)``."""
        match [token.text for token in tokens]:
            case ["common", ".", name]:
                names = {name: name}
            case ["common", ".", name, "->", alias]:
                names = {alias: name}
            case ["common", "(", *listed, ")"]:
                names = {name: name for name in listed if name != ","}
            case _:
                raise NoPattern("it imports from elsewhere than 'common'")
        for alias, name in names.items():
            if name not in _COMMON:
                raise NoPattern(f"'common.{name}' is not known here")
            self._bodies[alias] = [_Token("pattern", _COMMON[name])]


class _Expression:
    """The right side of a definition, read from left to right."""

    def __init__(self, grammar: _Grammar, tokens: Sequence[_Token], *, in_rule: bool) -> None:
        self._grammar = grammar
        self._tokens = [*tokens, _END]
        self._at = 0
        self._num_chars = 0
        self._in_rule = in_rule

    def whole(self) -> str:
        """The expression of all of it."""
        found = self._alternatives()
        if self._next() is not _END:
            raise NoPattern(f"{self._next().text!r} is not understood")
        return found

    def _next(self) -> _Token:
        return self._tokens[self._at]

    def _accept(self, *marks: str) -> str:
        """The next token's text if it is one of these marks, which is then read; or nothing."""
        token = self._next()
        if token.kind != "mark" or token.text not in marks:
            return ""
        self._at += 1
        return token.text

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while self._accept("|"):
            found.append(self._sequence())
        return "|".join(found)

    def _sequence(self) -> str:
        items: list[str] = []
        while (
            self._next().kind in ("name", "text", "regex", "pattern") or self._next().text in "(["
        ):
            items.append(self._item())
        if self._accept("->"):
            self._at += 1  # the name of the alternative
        return "".join(items)

    def _item(self) -> str:
        begin = self._accept("(", "[")
        if begin:
            inner = f"(?:{self._alternatives()})" + ("?" if begin == "[" else "")
            if not self._accept(")" if begin == "(" else "]"):
                raise NoPattern("a bracket is not closed")
        else:
            inner = self._atom()
        if repeat := self._accept("?", "*", "+"):
            return f"(?:{inner}){repeat}"
        if self._accept("~"):
            least = most = self._number()
            if self._accept(".."):
                most = self._number()
            return f"(?:{inner}){{{least},{most}}}"
        return inner

    def _atom(self) -> str:
        token = self._next()
        self._at += 1
        if token.kind == "name":
            found = self._grammar.expression(token.text)
            if not _is_terminal(token.text):
                return self._counted(found)
        elif token.kind == "regex":
            found = _of_regex(token.text)
        elif token.kind == "text":
            found = _of_text(token.text)
            if self._accept(".."):
                found = _of_range(token.text, self._next().text)
                self._at += 1
        else:
            found = token.text
        return self._counted(self._grammar.token(found, in_rule=self._in_rule))

    def _counted(self, pattern: str) -> str:
        self._num_chars += len(pattern)
        if self._num_chars > _MAX_CHARS:
            raise NoPattern("its rules are repeated too often")
        return pattern

    def _number(self) -> int:
        token = self._next()
        if token.kind != "number" or len(token.text) > 4:
            raise NoPattern("a number of repetitions is not understood")
        self._at += 1
        return int(token.text)


def _tokens(text: str) -> list[_Token]:
    found: list[_Token] = []
    at = 0
    while at < len(text):
        match = _TOKEN.match(text, at)
        if match is None or match.lastgroup is None:
            raise NoPattern(f"{text[at : at + 20]!r} is not understood")
        if match.lastgroup != "blank":
            found.append(_Token(match.lastgroup, match[0]))
        at = match.end()
    return found


def _statements(tokens: Sequence[_Token]) -> list[list[_Token]]:
    """The tokens of each definition: a line, or several if the later ones begin with ``|``."""
    found: list[list[_Token]] = [[]]
    depth = 0
    for token in tokens:
        if token.kind == "line":
            if not depth and found[-1]:
                found.append([])
            continue
        if token.kind == "mark" and token.text in "([)]":
            depth += 1 if token.text in "([" else -1
        if token.text == "|" and not found[-1] and len(found) > 1:
            found.pop()
        found[-1].append(token)
    return [statement for statement in found if statement]


def _is_terminal(name: str) -> bool:
    return name.lstrip("_").isupper()


def _of_text(literal: str) -> str:
    """A string in quotes, with an ``i`` behind it if either case will do."""
    pattern = "".join(map(escaped, _unquoted(literal.removesuffix("i"))))
    return f"(?i:{pattern})" if literal.endswith("i") else f"(?:{pattern})"


def _of_range(first: str, last: str) -> str:
    ends = [_unquoted(first), _unquoted(last)]
    if any(len(end) != 1 for end in ends) or ends[0] > ends[1]:
        raise NoPattern(f"the range {first}..{last} is not understood")
    return f"[{escaped(ends[0])}-{escaped(ends[1])}]"


def _unquoted(literal: str) -> str:
    if _ODD_ESCAPE.search(literal):
        raise NoPattern(f"{literal[:40]} is not understood")
    try:
        return str(ast.literal_eval(literal))
    except (ValueError, SyntaxError):
        raise NoPattern(f"{literal[:40]} is not understood") from None


def _of_regex(literal: str) -> str:
    """An expression between slashes, with flags behind them."""
    pattern, _, flags = literal[1:].rpartition("/")
    if "x" in flags:
        raise NoPattern("expressions with comments are not translated")
    kept = "".join(flag for flag in "is" if flag in flags)
    units: list[str] = []
    for match in _UNIT.finditer(pattern):
        unit = match[0]
        match match.lastgroup:
            case "escape":
                units.append(_of_escape(unit[1:]))
            case "set":
                units.append(_of_set(unit))
            case "named":  # a rule may occur twice, a name may not
                units.append("(?:")
            case "repeat":
                if unit[-1] in "?+" and len(unit) > 1:
                    raise NoPattern("lazy repetition is not translated")
                units.append(unit.replace("{,", "{0,"))
            case "odd":
                raise NoPattern("look-around and other special groups are not translated")
            case _ if unit in "^$":
                raise NoPattern("anchors are not translated")
            case _ if unit == "[":  # at the first one: each would be sought to the end
                raise NoPattern("a set of characters is not closed")
            case _:
                units.append("\\" + unit if unit in "{}" else unit)
    return f"(?{kept}:{''.join(units)})"


def _of_escape(escape: str) -> str:
    """What follows a backslash: a character, or a property of characters in braces."""
    char = escape[0]
    if char in "0123456789AbBZzG":
        raise NoPattern(f"'\\{char}' is not translated")
    return "\\" + escape if char.isalnum() else escaped(char)


def _of_set(unit: str) -> str:
    """A set of characters: in Rust's syntax brackets and doubled marks within it have a meaning."""
    begin = "[^" if unit.startswith("[^") else "["
    chars = re.finditer(r"\\([pP]\{\w+\}|.)|(.)", unit[len(begin) : -1], re.DOTALL)
    return begin + "".join(_of_member(*match.groups()) for match in chars) + "]"


def _of_member(behind_backslash: str | None, char: str) -> str:
    if behind_backslash is not None:
        return _of_escape(behind_backslash)
    return char if char.isalnum() or char == "-" else escaped(char)
