"""Conversion of pydantic's validation errors into this server's wording."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

_NEEDS = re.compile(r"^(?:Input|List|String|Tuple|Dictionary|Set|URL) should ")


def reason(problem: Mapping[str, Any]) -> str:
    """The message of one of a ``ValidationError``'s ``errors()``, to follow its field's name."""
    told = str(problem["msg"]).removeprefix("Value error, ")
    match problem["type"]:
        case "missing":
            return "is required"
        case "too_short" | "too_long" | "string_too_short" | "string_too_long":
            told = told.partition(" after validation")[0]
            return _NEEDS.sub("must ", told)
        case "string_pattern_mismatch":
            return told.replace("String should match pattern", "must match the pattern")
        case "model_type" | "dict_type" | "model_attributes_type":
            return "must be an object"
        case _:
            told = _NEEDS.sub("must ", told).partition(", unable to parse")[0]
            return told[:1].lower() + told[1:]
