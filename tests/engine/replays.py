"""Tells which steps were replayed."""

from __future__ import annotations

from typing import Any

from engine.core import EngineCore
from engine.runner.model_runner import ModelRunner


def count_prompt_replays(core: EngineCore) -> list[bool]:
    """Record whether each step with prompts from now on was captured; empty if none can be."""
    runner = core._runner
    assert isinstance(runner, ModelRunner)
    graphs = runner._prompt_graphs
    found: list[bool] = []
    if graphs is not None:
        load = graphs.load

        def counting(*args: Any) -> Any:
            loaded = load(*args)
            found.append(loaded is not None)
            return loaded

        graphs.load = counting
    return found
