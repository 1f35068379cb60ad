"""Matches patterns in a confined process (``engine/confined``): standard library only.

A frame ``{"patterns": [...], "names": [...]}`` is answered by ``{"matched": [...]}``, the names
whose beginning one of the patterns matches, or by ``{"invalid": pattern}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers a frame."""

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        compiled: list[re.Pattern[str]] = []
        for pattern in request["patterns"]:
            try:
                compiled.append(re.compile(pattern))
            except (re.error, RecursionError, OverflowError):
                return {"invalid": pattern}
        return {"matched": [n for n in request["names"] if any(p.match(n) for p in compiled)]}

    return answer


def exhausted() -> dict[str, Any]:
    """What is answered when matching has used too much memory."""
    return {}
