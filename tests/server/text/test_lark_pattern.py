"""Grammars in Lark's notation as regular expressions: what they match, and which have none."""

from __future__ import annotations

from itertools import pairwise

import llguidance
import pytest

from server.text.lark_pattern import NoPattern, lark_pattern

# As in the agent Codex, whose edits have this form.
PATCH = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | delete_hunk
add_hunk: "*** Add File: " filename LF add_line+
delete_hunk: "*** Delete File: " filename LF
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line

%import common.LF
"""
SUM = """
?start: term (SIGN term)*   // a comment
term: INT | "(" INT ")"  # another
SIGN.2: "+" | "-"
%import common (INT, WS_INLINE)
%ignore WS_INLINE
"""
LETTERS = "abcdefghijklmnop"
DOUBLED = 'start: a\nq: "0123456789"\n' + "".join(
    f"{name}: {following} {following}\n" for name, following in pairwise(LETTERS + "q")
)
TOKENIZER = llguidance.LLTokenizer("byte")


def matches(pattern: str, text: str) -> bool:
    """Whether a whole text matches, by the library that holds texts to the pattern."""
    grammar = llguidance.LLMatcher.grammar_from_regex(pattern)
    matcher = llguidance.LLMatcher(TOKENIZER, grammar, log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.consume_tokens(list(text.encode())) and matcher.is_accepting()


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (
            PATCH,
            [
                "*** Begin Patch\n*** Delete File: a b\n*** End Patch",
                '*** Begin Patch\n*** Add File: é\n+"x"\n+\n*** End Patch\n',
            ],
            ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: a\n*** End Patch"],
        ),
        (SUM, ["1", " 1 +(2) -\t33 "], ["", "1+", "1 2", "(1+2)"]),
        ('start: A B?\nA: "a".."c"\nB: "x"i ~ 2..3', ["b", "axX", "cxxx"], ["d", "ax", "bxxxx"]),
        ('start: ["a" | "b"] _C\n_C: ("c" "d")+', ["cd", "acdcd"], ["a", "abcd", "c"]),
        ('start: x\n  | y\n\n  | "z" -> last\nx: "x"\n!y: "y"', ["x", "y", "z"], ["", "xy"]),
        (r'start: "a\n\"\x41" | ""', ['a\n"A', ""], ["a"]),
        (r"start: /[^\[\]&&]+\/\d{,2}/i /\p{Lu}/ /{x}/", ["q~/12É{x}"], ["[/1A{x}", "a/123A{x}"]),
        (r"start: /(?P<a>x|y)/ b b" + "\n" + r"b: /(?P<b>z)/", ["xzz", "yzz"], ["xz"]),
        ("start: CNAME ESCAPED_STRING\n%import common (CNAME, ESCAPED_STRING)",
         [r'a_1"\""'], ['1""', '"a"']),
        ("start: F\n%import common.FLOAT -> F", ["1.5", ".5e-3", "1e9"], ["1", "."]),
    ],
)  # fmt: skip
def test_texts_of_a_grammar(grammar: str, right: list[str], wrong: list[str]) -> None:
    pattern = lark_pattern(grammar)
    for text in right:
        assert matches(pattern, text), (pattern, text)
    for text in wrong:
        assert not matches(pattern, text), (pattern, text)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: "(" start ")" | "x"', "refers to itself"),
        ('start: a\na: b "x"\nb: [a]', "refers to itself"),
        ('begin: "x"', "'start' is not defined"),
        ("start: a", "'a' is not defined"),
        ('start: "x"\nstart: "y"', "start"),
        ('start: "x', "not understood"),
        ('start: ("x"', "not closed"),
        ('start: "x")', "not understood"),
        ('start: "x" ~ many', "repetitions"),
        ('start: "zz".."a"', "range"),
        (r'start: "\q"', "not understood"),
        ('start: %json {"type": "string"}', "not understood"),
        ("start: pair{A}\npair{x}: x", "not understood"),
        ("start: A\n%import python.A", "common"),
        ("start: A\n%import common.PASSWORD -> A", "PASSWORD"),
        ("start: A\n%declare A", "declare"),
        ("start: /a(?=b)/", "look-around"),
        (r"start: /(a)\1/", "not translated"),
        ("start: /a*?/", "lazy"),
        ("start: /" + "[" * 60_000 + "/", "not closed"),  # each in turn would take minutes
        ("start: /^a/", "anchors"),
        ("start: /a # b/x", "comments"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested"),
        (DOUBLED, "repeated"),
        ("start: " + '"a" ' * 20_000, "long"),
    ],
)  # fmt: skip
def test_grammars_without_an_expression(grammar: str, problem: str) -> None:
    with pytest.raises(NoPattern, match=problem):
        lark_pattern(grammar)
