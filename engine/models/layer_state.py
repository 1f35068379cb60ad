"""What layers keep between steps, and how a step's tokens are fed to a recurrent state."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from engine.models.linear import Linear
from engine.models.step_state import StepState
from kernels.attention import LayerCache


class LayerState(NamedTuple):
    """The state of one layer, one line per slot."""

    conv_state: torch.Tensor  # [lines, width - 1, channels], of the convolution, oldest first
    ssm_state: torch.Tensor | None  # [lines, *RecurrenceSpec.ssm_state_shape] float32

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors that exist; their first dimension is the lines."""
        return (self.conv_state,) if self.ssm_state is None else (self.conv_state, self.ssm_state)


class HybridMemory(NamedTuple):
    """What a layer with both attention and a recurrence keeps."""

    blocks: LayerCache
    state: LayerState


LayerMemory = LayerCache | LayerState | HybridMemory  # what a layer keeps between steps


def run_recurrence(
    state: StepState, take: Callable[..., torch.Tensor], *fed: torch.Tensor
) -> torch.Tensor:
    """Feed a step's tokens with ``take``; record them for replay if some are on trial."""
    assert state.rows is not None
    if state.trial is not None:
        state.trial.record(take, *fed)
    return take(*fed, state.rows)


def weight_bytes(weights: Iterable[torch.Tensor | Linear | None]) -> int:
    """Return the size in memory of a layer's weights."""
    return sum(
        part.nbytes if isinstance(part, torch.Tensor) else part.num_bytes
        for part in weights
        if part is not None
    )
