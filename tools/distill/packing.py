"""Packs documents of any length into rows of a fixed length, several to a row.

Positions restart with each document, and transformers' masks detect this and confine attention to a
document (`find_packed_sequence_indices`); :func:`tools.distill.models.isolates_documents` verifies
it on the model at hand. A document longer than a row is split, and its rest starts a later row
without the preceding context.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tools.distill.documents import Documents
from tools.distill.errors import DistillError

# The number of documents searched for one that fits the rest of a row.
_WINDOW = 64


@dataclass(frozen=True)
class Batch:
    """Packed rows.

    inputs, positions: [rows, row_tokens] int64. loss_mask: [rows, row_tokens] bool, True where the
    next token is to be predicted. targets: [num_learned] int64, those next tokens in row order.
    num_tokens: excluding padding.
    """

    inputs: torch.Tensor
    positions: torch.Tensor
    loss_mask: torch.Tensor
    targets: torch.Tensor
    num_tokens: int

    def to(self, device: torch.device) -> Batch:
        """A copy on another device."""
        return Batch(
            inputs=self.inputs.to(device),
            positions=self.positions.to(device),
            loss_mask=self.loss_mask.to(device),
            targets=self.targets.to(device),
            num_tokens=self.num_tokens,
        )


class Packer:
    """An endless stream of rows over documents, in an order determined by (seed, epoch).

    `state` and `restore` save and restore the position in the stream, as JSON.
    """

    def __init__(self, documents: Documents, seed: int) -> None:
        self._documents = documents
        self._seed = seed
        self.epoch = 0
        self._cursor = 0  # documents of this epoch already used
        self._waiting: list[tuple[int, int, int]] = []  # (document, first token, end)
        self._order = self._permutation()

    def state(self) -> dict[str, Any]:
        """The position in the stream."""
        return {"epoch": self.epoch, "cursor": self._cursor, "waiting": list(self._waiting)}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a position in the stream."""
        self.epoch, self._cursor = state["epoch"], state["cursor"]
        self._waiting = [tuple(piece) for piece in state["waiting"]]
        self._order = self._permutation()

    def batch(self, rows: int, row_tokens: int) -> Batch:
        """The next `rows` rows."""
        return collate(self._documents, [self._row(row_tokens) for _ in range(rows)], row_tokens)

    def _row(self, row_tokens: int) -> list[tuple[int, int, int]]:
        """The pieces of one row: the one waiting longest, then the longest that still fits, ..."""
        document, first, end = self._oldest(row_tokens)
        row, room = [(document, first, end)], row_tokens - (end - first)
        while True:
            self._refill()
            fits = [(e - f, -i) for i, (_, f, e) in enumerate(self._waiting) if e - f <= room]
            if not fits:
                return row
            length, place = max(fits)
            row.append(self._waiting.pop(-place))
            room -= length

    def _oldest(self, row_tokens: int) -> tuple[int, int, int]:
        """The piece waiting longest, cut to a row; pieces without tokens to learn are skipped."""
        while True:
            self._refill()
            document, first, end = self._waiting.pop(0)
            if end - first > row_tokens:
                # Nothing in the row follows its last token, so the rest starts with that token
                # again.
                self._waiting.insert(0, (document, first + row_tokens - 1, end))
                end = first + row_tokens
            if self._documents[document][1][first + 1 : end].any():
                return document, first, end

    def _refill(self) -> None:
        while len(self._waiting) < _WINDOW:
            if self._cursor == len(self._order):
                self.epoch, self._cursor = self.epoch + 1, 0
                self._order = self._permutation()
            document = int(self._order[self._cursor])
            self._cursor += 1
            starts = self._documents.starts
            self._waiting.append((document, 0, int(starts[document + 1] - starts[document])))

    def _permutation(self) -> np.ndarray:
        return np.random.default_rng((self._seed, 2, self.epoch)).permutation(len(self._documents))


def validation_batches(documents: Documents, rows: int, row_tokens: int) -> list[Batch]:
    """Batches with each document once, in order, truncated to row_tokens.

    Raises DistillError if they contain nothing to learn.
    """
    packed: list[list[tuple[int, int, int]]] = []
    room = 0
    for i in range(len(documents)):
        length = min(row_tokens, int(documents.starts[i + 1] - documents.starts[i]))
        if not documents[i][1][1:length].any():
            continue
        if length > room:
            packed.append([])
            room = row_tokens
        packed[-1].append((i, 0, length))
        room -= length
    if not packed:
        raise DistillError(f"no validation document teaches anything within {row_tokens} tokens")
    groups = [packed[i : i + rows] for i in range(0, len(packed), rows)]
    return [collate(documents, group, row_tokens) for group in groups]


def collate(documents: Documents, rows: list[list[tuple[int, int, int]]], row_tokens: int) -> Batch:
    """Build tensors from rows of (document, first token, end); the rest of a row is padding."""
    shape = (len(rows), row_tokens)
    inputs, targets = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    positions, learned = np.zeros(shape, np.int64), np.zeros(shape, bool)
    num_tokens = 0
    for r, pieces in enumerate(rows):
        at = 0
        for document, first, end in pieces:
            tokens, learn = documents[document]
            length = end - first
            inputs[r, at : at + length] = tokens[first:end]
            positions[r, at : at + length] = np.arange(length)
            targets[r, at : at + length - 1] = tokens[first + 1 : end]
            learned[r, at : at + length - 1] = learn[first + 1 : end]
            at += length
        # Padding is a document of its own: no token attends to it.
        positions[r, at:] = np.arange(row_tokens - at)
        num_tokens += at
    return Batch(
        inputs=torch.from_numpy(inputs),
        positions=torch.from_numpy(positions),
        loss_mask=torch.from_numpy(learned),
        targets=torch.from_numpy(targets[learned]),
        num_tokens=num_tokens,
    )
