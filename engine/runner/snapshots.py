"""Snapshots of recurrent states, from which other rows can start."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from engine.kv_cache.states import copy_states
from engine.models.layer_state import LayerState
from engine.runner.rows import RowTable
from engine.types import StateCopy

if TYPE_CHECKING:
    from engine.parallel.leader import Team


class Snapshots:
    """Copies states between the lines of rows and those of snapshots, which follow them.

    Nothing waits for the device.

    Args:
        states: of all recurrent layers of this process.
        rows: whose slots are the lines of rows.
        team: the ranks with the other shards, in the same lines; None: the whole model is here.
    """

    def __init__(
        self, states: Sequence[LayerState], rows: RowTable, team: Team | None = None
    ) -> None:
        self._states = states
        self._rows = rows
        self._team = team
        self._first = rows.padding_slot + 1

    def restore(self, copies: Iterable[StateCopy]) -> None:
        """Copy snapshots to the rows that start from them."""
        self._copy([(self._first + line, self._slot(row_id)) for row_id, line in copies])

    def save(self, copies: Iterable[StateCopy]) -> None:
        """Copy the rows' states to snapshots."""
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
