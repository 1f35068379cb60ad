"""Turn step plans into tensors, logits and tokens. Importing this package does not import torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.errors import ModelLoadError

if TYPE_CHECKING:
    from engine.client import LoadProgress
    from engine.config import EngineConfig
    from engine.runner.protocol import LoadRunner, Runner


def load_runner(config: EngineConfig, on_progress: LoadProgress | None = None) -> Runner:
    """Load the model that ``config`` names and its KV cache, ready to run plans.

    Raises:
        ModelLoadError: the model cannot be served as configured; a one-line reason.
    """
    return loader_of(config)(config, on_progress)


def loader_of(config: EngineConfig) -> LoadRunner:
    """Return the loader for the model that ``config`` names, with its dependencies imported.

    Raises:
        ModelLoadError: the model cannot be served as configured; a one-line reason.
    """
    if config.load_format == "stub":
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(config, name) > 1:
                raise ModelLoadError(f"{name}: the stub has no model to be shared out")
        from engine.runner.stub_runner import load_stub_runner

        return load_stub_runner
    from engine.runner.load import load_runner

    return load_runner
