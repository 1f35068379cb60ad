"""What is wrong with a Python argument's value, in a sentence for the person who passed it."""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from engine.errors import InvalidParameter

_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
}
_PLURALS: dict[Any, str] = {int: "integers", float: "numbers", str: "strings"}
_LIMITS = (("ge", "of at least"), ("gt", "above"), ("le", "at most"), ("lt", "below"))
_MAX_SHOWN = 80


def check_arguments(function: Any, given: Mapping[str, object]) -> None:
    """Check a call's arguments against the function's annotations, but for those that take paths.

    Raises:
        InvalidParameter: one has a value of another type, or not one of those to choose from.
    """
    for name, hint in get_type_hints(function, include_extras=True).items():
        if name in given and Path not in get_args(hint):
            check_type(name, given[name], hint)


def check_type(name: str, value: object, hint: Any) -> Any:
    """Return one argument as its type, NumPy's numbers and arrays as Python's.

    Raises:
        InvalidParameter: it is of another type; the message names it.
    """
    try:
        return msgspec.convert(_plain(value), hint)
    except msgspec.ValidationError:
        problem = f"'{name}' must be {_describe(hint)}, not {show(value)}"
        raise InvalidParameter(problem, param=name) from None


def settle_fields(struct: msgspec.Struct) -> None:
    """Give the fields of a new struct the types of their annotations: lists become tuples.

    Raises:
        InvalidParameter: a field has a value of another type; the message names it.
    """
    given = msgspec.structs.astuple(struct)
    try:
        settled = msgspec.structs.astuple(msgspec.convert(given, _row_type(type(struct))))
    except msgspec.ValidationError:  # field by field only then: this runs for each request
        fields = msgspec.structs.fields(struct)
        settled = [
            check_type(f.name, value, f.type) for f, value in zip(fields, given, strict=True)
        ]
    else:
        if settled == given:
            return
    for name, value in zip(struct.__struct_fields__, settled, strict=True):
        msgspec.structs.force_setattr(struct, name, value)


def show(value: object) -> str:
    """A value as a message repeats it."""
    shown = repr(value)
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[: _MAX_SHOWN - 3]}..."


@functools.cache
def _row_type(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """A struct's fields as a row, which can be checked without making the struct again."""
    fields = [(field.name, field.type) for field in msgspec.structs.fields(struct)]
    return msgspec.defstruct(f"{struct.__name__}Row", fields, array_like=True)


def _plain(value: Any) -> Any:
    """A value with the numbers of NumPy or torch in it replaced by Python's."""
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset | range):
        return [_plain(item) for item in value]
    return value.tolist() if hasattr(value, "tolist") else value


def _describe(hint: Any) -> str:
    arguments = get_args(hint)
    origin = get_origin(hint)
    if origin is Annotated:
        return f"{_describe(arguments[0])} {_describe_limits(arguments[1])}"
    if origin is Literal:
        return "one of " * (len(arguments) > 1) + ", ".join(map(repr, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(each) for each in arguments if each is not type(None))
    if origin is tuple:
        return f"a list of {_describe_several(arguments[0])}"
    if origin is dict:
        return f"a dict of {_describe_several(arguments[0])} to {_describe_several(arguments[1])}"
    return _NAMES.get(hint) or f"of the type {hint.__name__}"


def _describe_several(hint: Any) -> str:
    if get_origin(hint) is tuple:
        return f"lists of {_describe_several(get_args(hint)[0])}"
    return _PLURALS[hint]


def _describe_limits(limits: msgspec.Meta) -> str:
    given = [(words, getattr(limits, name)) for name, words in _LIMITS]
    return " and ".join(f"{words} {limit}" for words, limit in given if limit is not None)
