"""In the place of a runner while the engine is asleep."""

from __future__ import annotations

from engine.errors import EngineAsleep
from engine.profiler import Spans
from engine.runner.protocol import Launched, Resting
from engine.types import Adapter, EngineInfo, StepPlan


class NoRunner:
    """Knows what was loaded, and computes nothing.

    Args:
        info: of the runner that has ended.
    """

    def __init__(self, info: EngineInfo) -> None:
        self.info = info

    def launch(self, plan: StepPlan) -> Launched:
        """Raises EngineAsleep."""
        raise EngineAsleep("the engine is asleep")

    def mark(self, spans: Spans) -> None:
        """There are no parts to be marked."""

    def load_adapter(self, adapter: Adapter) -> None:
        """Raises EngineAsleep."""
        raise EngineAsleep("the engine is asleep")

    def prepare(self) -> bool:
        """There is nothing to prepare."""
        return False

    def rest(self, level: int) -> Resting:
        """Raises EngineAsleep."""
        raise EngineAsleep("the engine is asleep")
