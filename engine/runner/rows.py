"""The runner's persistent rows: one slot for each sequence, on host and device.

A row is written once when its sequence is added, and extended by what is new; steps refer to slots.
On a CPU, host and device share the memory. On a GPU, new table entries travel with the step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch

from engine.runner.mrope import MRopePositions
from engine.sampling.state import SamplingState
from engine.types import AddedRow, Request

_NOTHING = np.empty(0, np.int32)


class Changes(NamedTuple):
    """Changes to send to the device before a step, all int32; empty on a CPU."""

    table_places: np.ndarray  # [m], entries of the flat block tables
    table_blocks: np.ndarray  # [m]
    sampling_slots: np.ndarray  # see SamplingState.flush
    sampling_columns: np.ndarray
    sampling_seeds: np.ndarray


class RowTable:
    """Slots, block tables, newest tokens and sampling state of the runner's sequences.

    Args:
        max_num_rows: the most rows at once, including rows that were removed but are still held.
        max_num_blocks: the most blocks of one sequence.
        vocab_size: of the model.
        eos_token_ids: the tokens that end a text.
        device: of the kernels.
        image_cell: pixels, the side of an image's part that becomes one token, if image tokens have
            three-dimensional positions; None: positions are places in the sequence.
    """

    def __init__(
        self,
        max_num_rows: int,
        max_num_blocks: int,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        image_cell: int | None = None,
    ) -> None:
        lines = max_num_rows + 1
        self.padding_slot = max_num_rows  # for the padding rows of captured batches
        self.host_tables = np.zeros((lines, max_num_blocks), np.int32)
        self.tables = torch.from_numpy(self.host_tables).to(device)
        self.newest = torch.zeros(lines, dtype=torch.int64, device=device)  # last sampled tokens
        self.sampling = SamplingState(lines, vocab_size, eos_token_ids, device)
        self.requests: dict[int, Request] = {}  # by slot
        self.prompt_logprob_slots: set[int] = set()  # slots that return prompt log-probabilities
        self.pooling_slots: set[int] = set()  # slots that return a vector
        self.media_slots: set[int] = set()  # slots whose prompts hold images or audio
        self.mrope = None if image_cell is None else MRopePositions(lines, image_cell)
        self._is_mirrored = device.type != "cpu"
        self._num_blocks = [0] * max_num_rows
        self._slots: dict[str, int] = {}
        self._held: Counter[int] = Counter()  # slots by number of steps holding them
        self._removed: set[int] = set()  # removed slots that are still held
        self._free = list(range(max_num_rows - 1, -1, -1))
        self._places: list[int] = []

    def __len__(self) -> int:
        return len(self._slots)

    def remove(self, row_id: str) -> None:
        """Delete a row; unknown ids are skipped."""
        slot = self._slots.pop(row_id, None)
        if slot is None:
            return
        if slot in self._held:
            self._removed.add(slot)
        else:
            self._clear(slot)

    def hold(self, slots: Iterable[int]) -> None:
        """Keep these slots for a step that has yet to sample, even if their rows are removed."""
        self._held.update(slots)

    def release(self, slots: Iterable[int]) -> None:
        """Release the slots that a finished step held."""
        for slot in slots:
            self._held[slot] -= 1
            if self._held[slot]:
                continue
            del self._held[slot]
            if slot in self._removed:
                self._removed.discard(slot)
                self._clear(slot)

    def _clear(self, slot: int) -> None:
        self.sampling.clear(slot)
        self.prompt_logprob_slots.discard(slot)
        self.pooling_slots.discard(slot)
        self.media_slots.discard(slot)
        if self.mrope is not None:
            self.mrope.clear(slot)
        del self.requests[slot]
        self._free.append(slot)

    def add(self, added: AddedRow) -> None:
        """Add a row with an empty block table. Raises ValueError when there are too many."""
        request = added.request
        self.remove(request.id)
        if not self._free:
            raise ValueError(f"more than {len(self._num_blocks)} rows")
        slot = self._free.pop()
        self._slots[request.id] = slot
        self.requests[slot] = request
        self._num_blocks[slot] = 0
        self.sampling.set(slot, added)
        if request.sampling.prompt_logprobs is not None:
            self.prompt_logprob_slots.add(slot)
        if request.pooling is not None:
            self.pooling_slots.add(slot)
        if request.media:
            self.media_slots.add(slot)
        if request.images and self.mrope is not None:
            self.mrope.add(slot, request)

    def slots(self, row_ids: Iterable[str]) -> list[int]:
        """Return the rows' slots. Raises KeyError for a row that was never added."""
        return list(map(self._slots.__getitem__, row_ids))

    def extend(self, slots: Iterable[int], block_ids: Iterable[tuple[int, ...]]) -> None:
        """Append blocks to the rows' block tables."""
        for slot, added in zip(slots, block_ids, strict=True):
            if added:
                self._append(slot, added)

    def changes(self) -> Changes:
        """Return the changes since the last call."""
        places, blocks = _NOTHING, _NOTHING
        if self._places:
            # A step that failed may leave places that belong to other rows by now.
            places = np.unique(np.array(self._places, np.int32))
            blocks = self.host_tables.reshape(-1)[places]
            self._places.clear()
        return Changes(places, blocks, *self.sampling.flush())

    def write(self, places: torch.Tensor, blocks: torch.Tensor, *sampling: torch.Tensor) -> None:
        """Apply changes, now on the device."""
        if places.numel():
            self.tables.view(-1).index_copy_(0, places.long(), blocks)
        self.sampling.write(*sampling)

    def _append(self, slot: int, block_ids: tuple[int, ...]) -> None:
        begin = self._num_blocks[slot]
        end = self._num_blocks[slot] = begin + len(block_ids)
        self.host_tables[slot, begin:end] = block_ids
        if self._is_mirrored:
            line = slot * self.host_tables.shape[1]
            self._places += range(line + begin, line + end)
