"""The inference engine: scheduler, paged KV cache, models and sampling, without HTTP.

    from engine import LLM, SamplingParams

Importing this package does not import torch; accessing ``LLM`` does.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.beam_search import BeamParams
    from engine.llm import LLM
    from engine.types import SamplingParams

__all__ = ["LLM", "BeamParams", "SamplingParams"]

# Imported on first access, since the modules of this package do not need them.
_HOMES = {
    "LLM": "engine.llm",
    "BeamParams": "engine.beam_search",
    "SamplingParams": "engine.types",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
