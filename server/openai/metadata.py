"""The labels that clients attach to stored objects, within OpenAI's limits."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, WithJsonSchema

_MAX_PAIRS, _MAX_KEY, _MAX_VALUE = 16, 64, 512


def _check(pairs: dict[str, str]) -> dict[str, str]:
    if len(pairs) > _MAX_PAIRS:
        raise ValueError(f"must have at most {_MAX_PAIRS} pairs")
    if any(len(key) > _MAX_KEY or len(value) > _MAX_VALUE for key, value in pairs.items()):
        raise ValueError(f"must have keys of at most {_MAX_KEY} characters, values of {_MAX_VALUE}")
    return pairs


Metadata = Annotated[
    dict[str, str],
    AfterValidator(_check),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": _MAX_PAIRS,
            "propertyNames": {"maxLength": _MAX_KEY},
            "additionalProperties": {"type": "string", "maxLength": _MAX_VALUE},
        }
    ),
]
