"""Copies of rows' states, which others begin with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine.kv_cache.states import copy_states
from engine.models.recurrent import LayerState
from engine.runner.rows import RowTable
from engine.types import StateCopy

if TYPE_CHECKING:
    from engine.parallel.leader import Team


class Snapshots:
    """Copies states between the lines of rows and those of snapshots, which lie behind them.
    Nothing waits for the device.

    Args:
        states: of all layers that keep one and are here.
        rows: whose slots are the lines of rows.
        team: the ranks that have the rest of the model, in the same lines; None: it is all here.
    """

    def __init__(
        self, states: Sequence[LayerState], rows: RowTable, team: Team | None = None
    ) -> None:
        self._states = states
        self._rows = rows
        self._team = team
        self._first = rows.spare_slot + 1

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """Rows begin with what snapshots hold."""
        self._copy([(self._first + line, self._slot(row_id)) for row_id, line in copies])

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Snapshots hold what rows have come to."""
        self._copy([(self._slot(row_id), self._first + line) for row_id, line in copies])

    def _slot(self, row_id: str) -> int:
        (slot,) = self._rows.slots((row_id,))
        return slot

    def _copy(self, pairs: list[tuple[int, int]]) -> None:
        if not pairs:
            return
        if self._team is not None:
            self._team.copy_states(pairs)
        copy_states(self._states, pairs)
