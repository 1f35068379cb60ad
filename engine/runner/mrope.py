"""Rotary positions that differ from the tokens' places in the sequence."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from engine.images.positions import prompt_positions
from engine.types import Request

if TYPE_CHECKING:
    from engine.runner.inputs import HostBatch


class MRopePositions:
    """The rotary positions of rows with images, for models with three-dimensional positions.

    KV slots and sampling still use the tokens' places in the sequence.

    Args:
        num_lines: number of slots.
        cell: pixels, the side of an image's part that becomes one token.
    """

    def __init__(self, num_lines: int, cell: int) -> None:
        # Offset of positions after the prompt from the tokens' places, by slot.
        self.deltas = np.zeros(num_lines, np.int32)
        self._cell = cell
        self._of_prompts: dict[int, np.ndarray] = {}  # [3, num_tokens], by slot

    def add(self, slot: int, request: Request) -> None:
        """Add a row with images."""
        found = prompt_positions(len(request.prompt_token_ids), request.images, self._cell)
        self._of_prompts[slot], self.deltas[slot] = found

    def clear(self, slot: int) -> None:
        """Delete a row, if it is known."""
        if self._of_prompts.pop(slot, None) is not None:
            self.deltas[slot] = 0

    def of_text(self, batch: HostBatch) -> np.ndarray:
        """[N] int32, of a step without images: text has one position on all three axes."""
        moved = self.of(batch)
        return batch.positions if moved is None else moved[0]

    def of(self, batch: HostBatch) -> np.ndarray | None:
        """[3, N] int32, of a step's tokens; None if all rotary positions are the tokens' places."""
        slots = batch.slots.tolist()
        if self._of_prompts.keys().isdisjoint(slots):
            return None
        bounds, starts = batch.query_start.tolist(), batch.starts.tolist()
        found = np.empty((3, batch.token_ids.size), np.int32)
        for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
            here = found[:, bounds[row] : bounds[row + 1]]
            here[:] = np.arange(start, start + here.shape[1]) + self.deltas[slot]
            prompt = self._of_prompts.get(slot)
            if prompt is not None and start < prompt.shape[1]:
                known = prompt[:, start : start + here.shape[1]]
                here[:, : known.shape[1]] = known
        return found
