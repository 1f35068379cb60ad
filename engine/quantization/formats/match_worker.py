"""Match patterns in a confined process (``engine/sandbox``): standard library only.

The answer to a frame ``{"patterns": [...], "names": [...]}`` is ``{"matched": [...]}``, the names
with a prefix that matches a pattern, or ``{"invalid": pattern}``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers frames."""

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
    """Return the answer for running out of memory."""
    return {}
