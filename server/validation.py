"""Conversion of pydantic's validation errors into this server's wording."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_NEEDS = re.compile(r"^(?:Input|List|String|Tuple|Dictionary|Set|URL) should ")

# How pydantic names the members of a union, which clients know nothing of.
_UNION_MEMBER = re.compile(r"(?:bool|dict|float|int|list|none|str|function-\w+)(?:\[.*\])?$")


def field_path(location: Iterable[int | str]) -> str:
    """The path of a ``ValidationError``'s ``loc``, such as ``messages.0.content``."""
    parts = [str(part) for part in location]
    while len(parts) > 1 and _UNION_MEMBER.match(parts[-1]):
        parts.pop()
    return ".".join(parts)


def reason(problem: Mapping[str, Any]) -> str:
    """The message of one of a ``ValidationError``'s ``errors()``, to follow its field's name."""
    message = str(problem["msg"]).removeprefix("Value error, ")
    match problem["type"]:
        case "missing":
            return "is required"
        case "too_short" | "too_long" | "string_too_short" | "string_too_long":
            message = message.partition(" after validation")[0]
            return _NEEDS.sub("must ", message)
        case "string_pattern_mismatch":
            return message.replace("String should match pattern", "must match the pattern")
        case "model_type" | "dict_type" | "model_attributes_type":
            return "must be an object"
        case "int_parsing_size":
            return "is a number out of range"
        case _:
            message = _NEEDS.sub("must ", message).partition(", unable to ")[0]
            return message[:1].lower() + message[1:]
