"""What the runner knows of each sequence between steps: one slot a row, kept in arrays.

A row is written once when its sequence is added and extended by what is new; a step reads many
rows with one index.
"""

from __future__ import annotations

import numpy as np
import torch

from engine.sampling.columns import SamplingColumns
from engine.sampling.penalties import TokenCounts
from engine.types import AddedRow, Request, ScheduledRow


class RowTable:
    """Slots, block tables and sampling state of the sequences a runner has been told of.

    Args:
        max_num_rows: rows expected at once; more are made room for.
        max_num_blocks: of one sequence.
        vocab_size: of the model.
        eos_token_ids: what ends a text.
        device: of the token counts.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_num_blocks: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
    ) -> None:
        self.block_tables = np.zeros((max_num_rows, max_num_blocks), np.int32)
        self.requests: dict[int, Request] = {}  # by slot
        self.judged: set[int] = set()  # slots that ask for their prompt's log-probabilities
        self.columns = SamplingColumns(max_num_rows, eos_token_ids)
        self.counts = TokenCounts(vocab_size, device)
        self._num_blocks = [0] * max_num_rows
        self._slots: dict[str, int] = {}
        self._free = list(range(max_num_rows - 1, -1, -1))
        # Rows whose output is counted -> length up to which it has been.
        self._counted: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._slots)

    def slot(self, row_id: str) -> int:
        """Where a row lives. Raises KeyError for one that was never added."""
        return self._slots[row_id]

    def remove(self, row_id: str) -> None:
        """Forget a row; unknown ids are skipped."""
        slot = self._slots.pop(row_id, None)
        if slot is None:
            return
        self.columns.clear(slot)
        self.counts.clear(slot)
        self._counted.pop(slot, None)
        self.judged.discard(slot)
        del self.requests[slot]
        self._free.append(slot)

    def add(self, added: AddedRow) -> None:
        """Make a row with an empty block table."""
        request = added.request
        self.remove(request.id)
        if not self._free:
            self._grow()
        slot = self._free.pop()
        self._slots[request.id] = slot
        self.requests[slot] = request
        self._num_blocks[slot] = 0
        self.columns.set(slot, request)
        if request.sampling.prompt_logprobs is not None:
            self.judged.add(slot)
        if self.columns.is_penalised[slot]:
            self.counts.set(slot, request.prompt_token_ids, added.output_ids)
            self._counted[slot] = len(request.prompt_token_ids) + len(added.output_ids)

    def extend(self, rows: tuple[ScheduledRow, ...]) -> list[int]:
        """Append the rows' new blocks and count their new output; their slots, in order."""
        slots = []
        for row in rows:
            slot = self._slots[row.id]
            slots.append(slot)
            if row.new_block_ids:
                begin = self._num_blocks[slot]
                end = begin + len(row.new_block_ids)
                self.block_tables[slot, begin:end] = row.new_block_ids
                self._num_blocks[slot] = end
        if self._counted:
            self._count_output(rows, slots)
        return slots

    def _count_output(self, rows: tuple[ScheduledRow, ...], slots: list[int]) -> None:
        """Add the output tokens that penalised rows bring for the first time."""
        new_slots: list[int] = []
        new_ids: list[int] = []
        for row, slot in zip(rows, slots, strict=True):
            counted = self._counted.get(slot)
            if counted is None:
                continue
            fresh = row.token_ids[max(0, counted - row.start) :]
            new_ids.extend(fresh)
            new_slots.extend([slot] * len(fresh))
            self._counted[slot] = counted + len(fresh)
        if new_ids:
            self.counts.add(new_slots, new_ids)

    def _grow(self) -> None:
        """Twice as many slots."""
        old = len(self._num_blocks)
        capacity = 2 * old
        tables = np.zeros((capacity, self.block_tables.shape[1]), np.int32)
        tables[:old] = self.block_tables
        self.block_tables = tables
        self.columns.grow(capacity)
        self._num_blocks.extend([0] * old)
        self._free.extend(range(capacity - 1, old - 1, -1))
