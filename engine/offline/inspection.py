"""Inspection of the offline ``LLM``: its model, statistics and profiles."""

from __future__ import annotations

from engine.driver import Driver
from engine.memory import device_memory
from engine.profiler import DEFAULT_PROFILE_STEPS
from engine.results import LLMStats
from engine.types import EngineInfo, Trace


class OfflineInspection:
    """Methods of ``LLM`` that report what it has loaded and done."""

    _driver: Driver

    def model_info(self) -> EngineInfo:
        """A description of the loaded model."""
        return self._driver.core.info

    def stats(self) -> LLMStats:
        """Work done, KV blocks in use, and the memory of weights, KV cache and device."""
        core = self._driver.core
        return LLMStats(
            engine=core.stats,
            memory=core.info.memory,
            device=device_memory(core.info.device),
        )

    def start_profile(self, num_steps: int = DEFAULT_PROFILE_STEPS) -> None:
        """Record the next ``num_steps`` steps as a trace in the directory ``profile``.

        Raises:
            ProfileRefused: the LLM was made without ``profile``, or a trace is already being
                recorded.
            InvalidParameter: the number of steps is out of range.
        """
        self._driver.core.profiler.start(num_steps)

    def stop_profile(self) -> Trace:
        """End the recording, if it has not ended by itself; returns the trace's path and length.

        Raises:
            ProfileRefused: nothing was recorded.
            OSError: the trace could not be written.
        """
        return self._driver.core.profiler.stop()
