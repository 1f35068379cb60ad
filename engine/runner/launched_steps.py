"""Launched steps whose results have not been read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.runner.device_errors import translated_errors
from engine.runner.outcome import Outcome
from engine.runner.passes import MultiPassOutcome
from engine.types import StepResult


class PendingStep:
    """A step whose results are being copied to the host."""

    __slots__ = ("_outcome",)

    def __init__(self, outcome: Outcome | MultiPassOutcome) -> None:
        self._outcome = outcome

    def result(self) -> StepResult:
        """See ``LaunchedStep``."""
        with translated_errors():
            return self._outcome.result()


class PipelinedStep:
    """A step that later pipeline stages are computing."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Outcome]) -> None:
        self._finish = finish

    def result(self) -> StepResult:
        """See ``LaunchedStep``."""
        with translated_errors(), torch.inference_mode():
            return self._finish().result()
