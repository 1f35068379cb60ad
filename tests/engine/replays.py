"""Tells which steps were replayed."""

from __future__ import annotations

from typing import Any

from engine.core import EngineCore
from engine.runner.graphs import DecodeGraphs
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


def count_draft_replays(graphs: DecodeGraphs) -> list[bool]:
    """Record whether each decode step with drafts from now on was captured."""
    find, found = graphs.find, []

    def counting(batch: Any, *, has_drafts: bool = False, adapted: bool = False) -> Any:
        graph = find(batch, has_drafts=has_drafts, adapted=adapted)
        if has_drafts:
            found.append(graph is not None)
        return graph

    graphs.find = counting
    return found
