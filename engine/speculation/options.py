"""From what people ask for to a ``SpeculationConfig``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engine.config import Speculation, SpeculationConfig
from engine.paths import embedded_draft_dir


def speculation_config(
    method: Speculation | None,
    draft_model: str | Path | None,
    *,
    is_embedded: bool,
    **rest: Any,
) -> SpeculationConfig | None:
    """How to speculate; None where nobody asks for it.

    Args:
        method: when left out, by a draft model where one is named.
        draft_model: its directory; when left out, the embedded model's own where that is served.
        is_embedded: whether the embedded model is served.
        rest: of the config, as it is.
    """
    if method is None and draft_model is None:
        return None
    if draft_model is None and method == "draft" and is_embedded:
        draft_model = embedded_draft_dir()
    return SpeculationConfig(
        method=method or "draft",
        draft_model=None if draft_model is None else str(draft_model),
        **rest,
    )
