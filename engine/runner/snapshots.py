"""Copies of rows' states, which others begin with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.models.recurrent import LayerState
from engine.runner.rows import RowTable
from engine.types import StateCopy


class Snapshots:
    """Copies states between the lines of rows and those of snapshots, which lie behind them.
    Nothing waits for the device.

    Args:
        states: of all layers that keep one.
        rows: whose slots are the lines of rows.
    """

    def __init__(self, states: Sequence[LayerState], rows: RowTable) -> None:
        self._tensors = [tensor for layer in states for tensor in layer.tensors()]
        self._rows = rows
        self._first = rows.spare_slot + 1

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """Rows begin with what snapshots hold."""
        for row_id, line in copies:
            (slot,) = self._rows.slots((row_id,))
            self._copy(self._first + line, slot)

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Snapshots hold what rows have come to."""
        for row_id, line in copies:
            (slot,) = self._rows.slots((row_id,))
            self._copy(slot, self._first + line)

    def _copy(self, source: int, target: int) -> None:
        for tensor in self._tensors:
            tensor[target].copy_(tensor[source])
