"""Sleeping and replacing weights in the offline ``LLM``, between two batches."""

from __future__ import annotations

from pathlib import Path

from engine.driver import Driver
from engine.errors import InvalidParameter


class OfflineSleep:
    """Methods of ``LLM`` that free its memory for other uses meanwhile, such as training."""

    _driver: Driver

    def sleep(self, level: int = 1) -> None:
        """Free the memory of the KV cache and drop all cached prefixes.

        At level 1 weights move from a GPU to host memory, and on a CPU they stay where they are. At
        level 2 they are freed too. Until ``wake_up``, requests raise EngineAsleep.

        Raises:
            InvalidParameter: there is no such level.
            SleepRefused: a stream is open, or the engine is already asleep.
        """
        if level not in (1, 2):
            raise InvalidParameter("'level' must be 1 or 2", param="level")
        self._driver.core.sleep(level)

    def wake_up(self) -> None:
        """Allocate the memory again, and reload the weights if they were freed.

        Raises:
            SleepRefused: the engine is awake.
            ModelLoadError: waking failed; the engine stays asleep.
        """
        self._driver.core.wake()

    def reload_weights(self, model: str | Path | None = None) -> None:
        """Replace the weights by those of the same model in the directory ``model``.

        By default they are read again from the current directory. Old and new weights are in memory
        at the same time.

        Raises:
            SleepRefused: a stream is open, or the engine is asleep.
            ModelLoadError: the new weights cannot be used; the old ones are kept.
        """
        core = self._driver.core
        core.reload(core.info.model if model is None else str(model))
