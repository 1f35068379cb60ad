"""The inference engine: scheduler, paged KV cache, models and sampling, without HTTP.

    from engine import LLM, SamplingParams

Importing this package does not import torch; taking ``LLM`` from it does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.beam_search import BeamParams
from engine.types import SamplingParams

if TYPE_CHECKING:
    from engine.llm import LLM

__all__ = ["LLM", "BeamParams", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from engine.llm import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
