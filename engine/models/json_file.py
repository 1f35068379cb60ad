"""Read a model directory's JSON files with limits and one-line errors."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import msgspec

from engine.errors import ModelLoadError

_MAX_BYTES = 64 * 2**20
_INFINITE = re.compile(rb"[,\[:]\s*Infinity\s*[,\]}]")


def read_bytes(path: Path) -> bytes:
    """Return a file's contents. Raises ModelLoadError."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ModelLoadError(f"{path}: too large to be what it is named")
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from None


def parse_json(path: Path, raw: bytes) -> Any:
    """Parse ``raw``, the contents of ``path``. Raises ModelLoadError."""
    try:
        # Python writes Infinity, which JSON does not have, as in Nemotron-H's limits of time steps.
        if _INFINITE.search(raw):
            return json.loads(raw, parse_constant=_infinite)
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: not valid JSON: {error}") from None


def parse_object(path: Path, raw: bytes) -> dict[str, Any]:
    """Parse ``raw`` as an object. Raises ModelLoadError."""
    value = parse_json(path, raw)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path}: not a JSON object")
    return value


def _infinite(name: str) -> float:
    if name != "Infinity":
        raise ValueError(f"{name} is no number")
    return math.inf
