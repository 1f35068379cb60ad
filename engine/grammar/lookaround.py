"""Patterns with look-around that schema generators write, without it.

The grammar library has no look-around. Where a pattern is one of a generator's own, another one is
known that matches the same strings, or fewer.
"""

from __future__ import annotations

import re

# zod 4, of z.email(): no dot at the beginning, no two in a row.
_ZOD_EMAIL = (
    r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@"
    r"([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$"
)
# zod 4, of z.iso.duration(): weeks alone, and something behind P and behind T.
_ZOD_DURATION = (
    r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?"
    r"(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$"
)
_SECONDS = r"\d+([.,]\d+)?S"
_CLOCK = rf"T(\d+H(\d+M)?({_SECONDS})?|\d+M({_SECONDS})?|{_SECONDS})"
_DAYS = r"(\d+Y(\d+M)?(\d+D)?|\d+M(\d+D)?|\d+D)"
_EQUAL = {
    _ZOD_EMAIL: (
        r"^([A-Za-z0-9_'+-]+\.)*[A-Za-z0-9_'+-]*[A-Za-z0-9_+-]@"
        r"([A-Za-z0-9][A-Za-z0-9-]*\.)+[A-Za-z]{2,}$"
    ),
    _ZOD_DURATION: rf"^P(\d+W|{_DAYS}({_CLOCK})?|{_CLOCK})$",
}

# pydantic 2.12 and 2.13, of Decimal: at least one digit, and at most so many. Of more than 999 the
# answer would be a pattern without end: it has an alternative for each.
_DECIMAL = re.compile(
    r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*"
    r"(?:"
    r"\(\?:\\d\{0,(?P<before>\d{1,3})\}\|\(\?=\[\\d\.\]\{1,\d+\}0\*\$\)"
    r"\\d(?:\*|\{0,\d+\})\\\.\\d(?:\*|\{0,(?P<behind>\d{1,3})\})0\*\$\)"
    r"|\\d\*\\\.\?\\d(?:\*|\{0,(?P<places>\d{1,3})\}0\*)\$"
    r")"
)


def without_lookaround(pattern: str) -> str:
    """A pattern without look-around that is as strict as ``pattern`` at least.

    A pattern that is no known generator's is returned as it is.
    """
    if pattern in _EQUAL:
        return _EQUAL[pattern]
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is None:
        return pattern
    before, behind, places = decimal.groups()
    if before is None:
        return _decimals(r"\d+", r"\d+" if places is None else _digits(int(places)))
    if behind is not None:
        return _decimals(_digits(int(before)) or "0", _digits(int(behind)))
    most = int(before)  # on both sides of the point together
    splits = [f"{_digits(left, left) or 0}\\.{_digits(most - left)}" for left in range(most)]
    return f"^[+-]?({'|'.join([_digits(most), *splits])})$"


def _decimals(before: str, behind: str) -> str:
    """Numbers with such digits before the point and, if there is one, behind it."""
    return f"^[+-]?{before}(\\.{behind})?$" if behind else f"^[+-]?{before}$"


def _digits(most: int, least: int = 1) -> str:
    return f"\\d{{{least},{most}}}" if most else ""
