"""Refuse what models with several residual streams do not support, before any weight is read."""

from __future__ import annotations

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.spec import DecoderSpec


def check_stream_support(config: EngineConfig, spec: DecoderSpec) -> None:
    """Check that a model with several residual streams can be served as ``config`` asks.

    Raises:
        ModelLoadError: it cannot; one line that names the setting.
    """
    if spec.altup is None:
        return
    if config.batch_invariant:
        raise ModelLoadError(
            f"batch_invariant: what {spec.architecture} models do between layers is not "
            "batch-invariant here"
        )
    speculation = config.speculation
    if speculation is not None and speculation.uses_draft_head:
        raise ModelLoadError(
            f"speculation {speculation.method!r} reads hidden states, of which "
            f"{spec.architecture} models have several; draft, ngram and suffix work"
        )
