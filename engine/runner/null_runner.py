"""Stands in for the runner while the engine sleeps."""

from __future__ import annotations

from engine.errors import EngineAsleep
from engine.profiler import Spans
from engine.runner.protocol import LaunchedStep, SleepingRunner
from engine.types import Adapter, EngineInfo, StepPlan


class NullRunner:
    """Reports what was loaded, and computes nothing.

    Args:
        info: of the runner that was ended.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Raise EngineAsleep."""
        raise EngineAsleep("the engine is asleep")

    def set_spans(self, spans: Spans) -> None:
        """Do nothing: there are no steps to mark."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Raise EngineAsleep."""
        raise EngineAsleep("the engine is asleep")

    def prepare(self) -> bool:
        """Return False: there is nothing to prepare."""
        return False

    def sleep(self, level: int) -> SleepingRunner:
        """Raise EngineAsleep."""
        raise EngineAsleep("the engine is asleep")
