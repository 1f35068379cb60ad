"""Refuse what recurrent models do not support, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator

from engine.config import EngineConfig
from engine.errors import ModelLoadError
from engine.models.spec import DecoderSpec


def check_recurrent_support(config: EngineConfig, spec: DecoderSpec) -> None:
    """Check that a recurrent model can be served as ``config`` asks.

    Raises:
        ModelLoadError: it cannot; one line that names the setting and the model.
    """
    if not spec.is_recurrent:
        return
    for setting, problem in _problems(config):
        raise ModelLoadError(
            f"{setting}: {spec.architecture} models keep a state of each sequence, {problem}"
        )
    if not spec.windows:  # no layer attends
        for setting in _cache_settings(config):
            raise ModelLoadError(f"{setting}: {spec.architecture} models have no KV cache")


def _problems(config: EngineConfig) -> Iterator[tuple[str, str]]:
    speculation = config.speculation
    if speculation is not None and config.num_ranks > 1:
        yield (
            f"speculation {speculation.method!r}",
            "which several ranks do not settle together once drafts are judged",
        )
    if config.cache.offload_bytes:
        yield "kv_offload_bytes", "without which blocks in the host's memory are of no use"


def _cache_settings(config: EngineConfig) -> Iterator[str]:
    if config.cache.dtype != "auto":
        yield f"kv_cache_dtype {config.cache.dtype!r}"
    if config.cache.memory_bytes is not None:
        yield "kv_cache_memory_bytes"
