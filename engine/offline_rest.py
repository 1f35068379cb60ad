"""The offline ``LLM`` between two batches: asleep, and with other weights."""

from __future__ import annotations

from pathlib import Path

from engine.driver import Driver
from engine.errors import InvalidParameter


class OfflineRest:
    """For a process that needs the memory for something else meanwhile, such as training."""

    _driver: Driver

    def sleep(self, level: int = 1) -> None:
        """Give the memory of the KV cache back, and forget all prefixes.

        At level 1 weights move from a GPU to the host's memory, and stay on a CPU; at level 2 they
        are given back too. Until ``wake_up`` what is asked of the model raises EngineAsleep.

        Raises:
            InvalidParameter: there is no such level.
            RestRefused: a stream is open, or it sleeps.
        """
        if level not in (1, 2):
            raise InvalidParameter("'level' must be 1 or 2", param="level")
        self._driver.core.sleep(level)

    def wake_up(self) -> None:
        """Take the memory again, and read the weights where they were given back.

        Raises:
            RestRefused: it is awake.
            ModelLoadError: that is not possible; it sleeps on.
        """
        self._driver.core.wake()

    def reload_weights(self, model: str | Path | None = None) -> None:
        """Go on with the weights in the directory ``model``, of the same model; those that were
        read last are read again when it is left out. Old and new ones are in memory side by side.

        Raises:
            RestRefused: a stream is open, or it sleeps.
            ModelLoadError: they cannot be used; the old ones are kept.
        """
        core = self._driver.core
        core.reload(core.info.model if model is None else str(model))
