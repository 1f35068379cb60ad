"""Builds what the layers of a step share: on its device, from rows there and bounds on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import numpy as np
import torch

from engine.models.step_state import Rotation, StepState
from engine.runner.images import NO_IMAGES, StepImages
from engine.runner.inputs import HostBatch
from kernels.attention import AttentionSpec, BatchGeometry, DeviceGeometry
from kernels.inputs import StepInputs, StepRows
from kernels.operations import Kernels


class RowLines(Protocol):
    """What is kept of rows between steps, in the lines that ``StepRows.slots`` selects."""

    @property
    def host_tables(self) -> np.ndarray:
        """[lines, blocks] int32, the block tables on the host."""
        ...

    @property
    def tables(self) -> torch.Tensor:
        """The same on the device."""
        ...

    @property
    def newest(self) -> torch.Tensor:
        """[lines] int64, the last sampled tokens."""
        ...


class BuiltStep(NamedTuple):
    """A step, ready for the layers."""

    inputs: StepInputs
    geometry: BatchGeometry
    state: StepState


class StepBuilder:
    """Builds steps, without waiting for the device.

    Args:
        rotations: of the model, see ``Decoder.rotations``.
        kernels: those of the model.
        spec: what the kernels were chosen for.
    """

    def __init__(
        self,
        rotations: Callable[[torch.Tensor], tuple[Rotation, ...]],
        kernels: Kernels,
        spec: AttentionSpec,
    ) -> None:
        self._rotations = rotations
        self._kernels = kernels
        self._spec = spec

    def build(
        self,
        batch: HostBatch,
        rows: StepRows,
        lines: RowLines,
        images: StepImages = NO_IMAGES,
        *,
        rotary_positions: torch.Tensor | None = None,
    ) -> BuiltStep:
        """Build a step, or one that is captured with the bounds of ``batch``.

        Args:
            batch: the step on the host.
            rows: the same on the device.
            lines: the rows' block tables and newest tokens.
            images: of the step.
            rotary_positions: [N] or [3, N]; None: those of the images, or the tokens' positions.
        """
        attention, operations = self._kernels.attention, self._kernels.operations
        longest = int(np.diff(batch.query_start).max())
        inputs = operations.build_inputs(
            rows, lines.newest, lines.tables, self._spec.block_size, longest
        )
        ends = images.attention_ends
        where = rows.query_start, inputs.seq_lens, rows.slots, lines.tables
        on_device = DeviceGeometry(*where, None if ends is None else ends.device)
        known = batch.query_start, batch.seq_lens, batch.slots, lines.host_tables
        geometry = BatchGeometry(*known, on_device, None if ends is None else ends.host)
        turning = inputs.positions
        if rotary_positions is not None:
            turning = rotary_positions.long()  # captured steps are sent int32
        elif images.rotary_positions is not None:
            turning = images.rotary_positions.device
        state = StepState(
            attention=attention.plan(geometry, self._spec),
            slot_mapping=inputs.slot_mapping,
            positions=inputs.positions,
            rotations=self._rotations(turning),
            images=images.tokens,
            rows=rows,
        )
        return BuiltStep(inputs, geometry, state)
