"""What is wrong with a Python argument's type, in a sentence for the person who passed it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import InvalidParameter

_NAMES = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}
_MAX_SHOWN = 80


def check_arguments(function: Any, given: Mapping[str, object]) -> None:
    """Check a call's arguments against the function's annotations, but for those that take paths.

    Raises:
        InvalidParameter: one has a value of another type, or not one of those to choose from.
    """
    for name, hint in get_type_hints(function).items():
        if name in given and Path not in get_args(hint):
            check_type(name, given[name], hint)


def check_type(name: str, value: object, hint: Any) -> None:
    """Check one argument. Raises InvalidParameter that names it."""
    try:
        msgspec.convert(value, hint)
    except msgspec.ValidationError:
        problem = f"'{name}' must be {_describe(hint)}, not {show(value)}"
        raise InvalidParameter(problem, param=name) from None


def show(value: object) -> str:
    """A value as a message repeats it."""
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 3]}..."


def _describe(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return "one of " + ", ".join(map(repr, get_args(hint)))
    if hint in _NAMES:
        return _NAMES[hint]
    members = [each for each in get_args(hint) if each is not type(None)]
    return _describe(members[0]) if len(members) == 1 else f"of the type {hint}"
