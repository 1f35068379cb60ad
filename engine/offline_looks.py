"""Looking inside the offline ``LLM``: what it has loaded and done, and where time goes."""

from __future__ import annotations

from engine.driver import Driver
from engine.memory import device_memory
from engine.profiler import DEFAULT_PROFILE_STEPS
from engine.results import LLMStats
from engine.types import EngineInfo, Trace


class OfflineLooks:
    """For people, and for programs that choose by what there is."""

    _driver: Driver

    def model_info(self) -> EngineInfo:
        """What was loaded, and how."""
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
        """Record the next ``num_steps`` steps, for ``profile`` to hold their trace.

        Raises:
            ProfileRefused: made without ``profile``, or a trace is being recorded.
            InvalidParameter: so many steps cannot be recorded.
        """
        self._driver.core.profiler.start(num_steps)

    def stop_profile(self) -> Trace:
        """End the recording, if it has not ended by itself; tells where its trace lies.

        Raises:
            ProfileRefused: nothing was recorded.
            OSError: the trace could not be written.
        """
        return self._driver.core.profiler.stop()
