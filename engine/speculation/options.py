"""Makes a ``SpeculationConfig`` from user settings."""

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
    """The configuration of speculation, or None if it is not requested.

    Args:
        method: default: "draft" if a draft model is named.
        draft_model: its directory; default: the embedded model's own, if that is served.
        is_embedded: whether the embedded model is served.
        rest: further fields of the configuration.
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
