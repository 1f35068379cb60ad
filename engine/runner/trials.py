"""Rows with drafts as recurrent layers see them: run on trial, then settled.

    batch      rows (t) (x) (y) (z) (u)     single tokens (``engine/runner/drafts.py``), and another
    on trial   rows (t x y z) (u)           a state takes its tokens in order
    settled    rows () (t x) (y z u)        x was accepted, y was not: only the second row is fed

See ``engine.models.trial``. Rows are contiguous, so the settling rows cover all tokens that are
held: the rows between two sequences' accepted tokens are padding and change no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.models.trial import Trial
from engine.runner.drafts import StepDrafts
from engine.runner.inputs import HostBatch
from engine.runner.transfer import Uploads
from kernels.inputs import StepRows

_NONE = np.empty(0, np.int32)
_PADS = np.int32(-1)  # the start of a row that changes no state


class _HostRows:
    """A batch's rows with drafts merged into one per sequence: R rows, T of them on trial."""

    def __init__(self, batch: HostBatch) -> None:
        # A sequence has one row, unless its tokens are rows of their own.
        firsts = np.flatnonzero(np.diff(batch.slots, prepend=np.int32(-1)))
        sizes = np.diff(firsts, append=batch.slots.size)
        self.draft_rows = np.flatnonzero(sizes > 1)  # [T]
        self.sizes = sizes[self.draft_rows]  # [T], tokens of each
        self.slots = batch.slots[firsts]  # [R]
        self.query_start = batch.query_start[np.append(firsts, batch.slots.size)]  # [R + 1]
        self.starts = batch.starts[firsts]  # [R]

    def on_trial(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return slots, query starts and starts of the rows."""
        starts = self.starts.copy()
        starts[self.draft_rows] = ~starts[self.draft_rows]
        return self.slots, self.query_start, starts

    def tokens(self) -> np.ndarray:
        """[n] int32, the tokens on trial."""
        places = np.arange(self.sizes.sum()) - np.repeat(self.begins, self.sizes)
        return (np.repeat(self.query_start[self.draft_rows], self.sizes) + places).astype(np.int32)

    @property
    def begins(self) -> np.ndarray:
        """[T], where each sequence begins among the tokens on trial."""
        return np.cumsum(self.sizes) - self.sizes

    def settled(
        self, begins: np.ndarray, num_held: int, num_rows: int | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return slots, query starts and starts of the settling rows, with one token kept per
        sequence.

        ``begins`` [T] is where the sequences begin among the ``num_held`` tokens that are held.
        ``num_rows`` is at least 2 T + 1, and not ``num_held``; None: as many as are needed.
        """
        if num_rows is None:
            num_rows = 2 * self.draft_rows.size + 1
            num_rows += num_rows == num_held  # see ``StepRows``
        slots = np.zeros(num_rows, np.int32)
        bounds = np.full(num_rows + 1, num_held, np.int32)
        starts = np.full(num_rows, _PADS)
        of_tried, ends = (
            slice(1, 2 * self.draft_rows.size, 2),
            slice(2, 2 * self.draft_rows.size + 1, 2),
        )
        bounds[0], bounds[of_tried], bounds[ends] = 0, begins, begins + 1
        slots[of_tried], starts[of_tried] = (
            self.slots[self.draft_rows],
            self.starts[self.draft_rows],
        )
        return slots, bounds, starts


@dataclass(frozen=True, slots=True)
class StepTrial:
    """How a step's tokens on trial are settled."""

    query_start: torch.Tensor  # of the settling rows, with one token kept per sequence
    groups: torch.Tensor  # [T] int32, the sequences' groups among the verified tokens
    commit: Callable[[], object]  # feeds what these rows keep to the states

    def settle(self, num_accepted: torch.Tensor) -> None:
        """Feed the accepted tokens to the states, without waiting for the device. Called once.

        Args:
            num_accepted: [G] int64, accepted drafts of each group.
        """
        kept = num_accepted.index_select(0, self.groups)
        self.query_start[2 : 2 * self.groups.numel() + 1 : 2].add_(kept)
        self.commit()


def begin_trial(
    batch: HostBatch, drafts: StepDrafts, uploads: Uploads
) -> tuple[StepRows, Trial, StepTrial]:
    """Return a step's rows as recurrent layers read them, its trial, and how that is settled.

    Args:
        batch: with a row per token for sequences that verify drafts.
        drafts: of the step.
        uploads: for what such a step needs beyond others.
    """
    rows = _HostRows(batch)
    if batch.is_decode:
        tokens = _NONE
        settled = rows.settled(rows.query_start[rows.draft_rows], batch.token_ids.size)
    else:  # prompts' tokens are many, and not on trial
        tokens = rows.tokens()
        settled = rows.settled(rows.begins, tokens.size)
    sent = uploads.send((*rows.on_trial(), *settled, _groups(drafts), tokens))
    trial = Trial(sent[7] if tokens.size else None)
    settling = _rows(sent[3:6], int(rows.sizes.max()))
    commit = partial(trial.commit, settling)
    tried = _rows(sent[:3], int(np.diff(rows.query_start).max()))
    return tried, trial, StepTrial(settling.query_start, sent[6], commit)


class RecordedTrial:
    """The trial of a recorded or captured step of single tokens, whatever drafts it verifies.

    The step has two pieces: one computes the layers with ``rows`` and ``begin_layers``, and the
    other one, ``commit``, feeds the states once the drafts have been judged.

    Args:
        size: number of tokens.
        device: of the kernels.
        num_drafts: the most drafts of a sequence.
    """

    def __init__(self, size: int, device: torch.device, num_drafts: int) -> None:
        self._size = size
        # One row more than tokens, because as many rows as tokens would mean one token each
        # (``StepRows``). It suffices for rows of one token that are padding, and to settle half as
        # many sequences, of two tokens at least.
        self._num_rows = num_rows = size + 1
        sizes = 2 * [num_rows, num_rows + 1, num_rows] + [size // 2]
        self._packed = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        *parts, self._groups = self._packed.split(sizes)
        self.rows, self._settling = (_rows(own, num_drafts + 1) for own in (parts[:3], parts[3:]))
        for rows in (self.rows, self._settling):
            rows.query_start[1:] = size
            rows.starts.fill_(int(_PADS))
        self._trial = Trial()
        self._commit: Callable[[], object] = self.commit

    def begin_layers(self) -> Trial:
        """Return what the layers of a step record what they feed to states in."""
        self._trial = Trial()
        return self._trial

    def commit(self) -> None:
        """Feed the accepted tokens to the states."""
        self._trial.commit(self._settling)

    def replay_commit(self, replay: Callable[[], object]) -> None:
        """Let ``replay`` do what ``commit`` does from now on.

        The inputs that the layers have recorded are let go: their memory is also that of other
        captured steps, and holds them from a replay of the layers until the next replay.
        """
        self._commit, self._trial = replay, Trial()

    def begin(self, batch: HostBatch, drafts: StepDrafts, uploads: Uploads) -> StepTrial:
        """Copy a batch to where the step reads its rows; see ``begin_trial``."""
        rows = _HostRows(batch)
        slots, query_start, starts = rows.on_trial()
        spare = self._num_rows - slots.size
        # Each token that the step lacks has a row: nothing is computed from one to the next.
        ends = batch.token_ids.size + 1 + np.arange(spare, dtype=np.int32)
        groups = _groups(drafts)
        columns = (
            np.pad(slots, (0, spare)),
            np.concatenate((query_start, np.minimum(ends, np.int32(self._size)))),
            np.pad(starts, (0, spare), constant_values=_PADS),
            *rows.settled(rows.query_start[rows.draft_rows], self._size, self._num_rows),
            np.pad(groups, (0, self._groups.numel() - groups.size)),
        )
        uploads.fill(self._packed, columns)
        return StepTrial(self._settling.query_start, self._groups[: groups.size], self._commit)


def _rows(parts: Sequence[torch.Tensor], longest: int) -> StepRows:
    """Make rows whose token ids are never read; see ``StepRows.longest``."""
    slots, query_start, starts = parts
    return StepRows(slots, query_start, starts, slots[:0], longest)


def _groups(drafts: StepDrafts) -> np.ndarray:
    """[T] int32, the groups with drafts."""
    return np.flatnonzero(drafts.sizes > 1).astype(np.int32)
