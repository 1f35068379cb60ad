"""A runner that ends its process when it computes certain requests."""

from __future__ import annotations

import json
import os
import time

from engine.client import LoadProgress
from engine.config import EngineConfig
from engine.types import StepPlan
from tests.engine.fakes import FakeRunner, FaultyRunner, make_info


def load(config: EngineConfig, on_progress: LoadProgress | None) -> FakeRunner:
    """The factory of engine processes; ``config.model`` is JSON.

    ``poison`` begins the ids of requests that kill, ``at`` is the position at which they do so, and
    ``step_s`` how long a step takes.
    """
    options = json.loads(config.model)
    poison, at = options["poison"], options.get("at", 0)

    def fault(plan: StepPlan) -> None:
        time.sleep(options.get("step_s", 0.0))
        if any(row.id.startswith(poison) and row.start >= at for row in plan.rows):
            os._exit(9)

    return FaultyRunner(make_info(64, config.cache.block_size, 200), fault)
