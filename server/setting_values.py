"""Spellings of values that people may use in flags, environment and YAML alike."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import AfterValidator, BeforeValidator, Field

_SCALES = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate("kmgt", start=1)},
    **{unit: 1024**power for power, unit in enumerate("KMGT", start=1)},
    **{f"{unit}B": 1000**power for power, unit in enumerate("KMGT", start=1)},
    **{f"{unit}iB": 1024**power for power, unit in enumerate("KMGT", start=1)},
}


def _read_number(value: Any) -> Any:
    """``"2GiB"`` -> 2147483648, ``"8K"`` -> 8192, ``"8k"`` -> 8000; anything else unchanged."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgtKMGT]?|[KMGT]i?B)", value.strip())
    return round(Decimal(match[1]) * _SCALES[match[2]]) if match else value


def _read_list(value: Any) -> Any:
    """``"a,b"`` -> ``["a", "b"]``; anything else unchanged."""
    if isinstance(value, str):
        return [item for item in (part.strip() for part in value.split(",")) if item]
    return value


def _check_adapters(rows: list[str]) -> list[str]:
    """Rows of ``NAME=DIRECTORY``, each name once."""
    names = [row.partition("=")[0] for row in rows]
    for row, name in zip(rows, names, strict=True):
        if not name or row == name or row.endswith("="):
            raise ValueError(f"must be NAME=DIRECTORY, not {row[:80]!r}")
    if len(set(names)) < len(names):
        raise ValueError("names an adapter twice")
    return rows


def _check_endpoint(url: str) -> str:
    """A URL that can be connected to."""
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # of the port, or of brackets
        is_url = False
    if not is_url or re.search(r"[\s?#]", url):
        raise ValueError("must be a URL such as http://localhost:4318")
    return url


ScaledInt = Annotated[int, BeforeValidator(_read_number)]
Endpoint = Annotated[str, AfterValidator(_check_endpoint)]
StringList = Annotated[list[str], BeforeValidator(_read_list)]
AdapterList = Annotated[StringList, AfterValidator(_check_adapters)]
Origin = Annotated[str, Field(pattern=r"^(\*|[a-z][a-z0-9+.-]*://[^/?#\s]+)$")]
OriginList = Annotated[list[Origin], BeforeValidator(_read_list)]
