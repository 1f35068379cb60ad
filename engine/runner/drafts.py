"""Rows with drafts, as the tensors see them: single tokens that are verified as a group.

    plan       row  (t, x, y, z)            one sequence, three drafts
    batch      rows (t) (x) (y) (z)         the same slot, consecutive positions
    logits     after each of them           what follows t, x, y and z
    result     the accepted drafts, and one more token

A token thus goes through the same kernels whether it was drafted or not, and gets the same bits
where those do not depend on the batch. A decode step remains a decode step with drafts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from engine.plan_rows import PlanRows, ScheduledRow
from engine.runner.inputs import HostBatch
from kernels.reference.drafts import NO_DRAFT
from kernels.transfer import to_device


class DraftTokens(NamedTuple):
    """The drafts of a step, concatenated in row order."""

    # [drafts] int64, on the device, without synchronisation; None: the rows hold the drafts
    token_ids: torch.Tensor | None
    # [drafts, vocab] float32, the distributions they were sampled from; None: they were not sampled
    draft_probs: torch.Tensor | None


_IN_ROWS = DraftTokens(None, None)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step, on the host: S verified tokens of G sampling sequences."""

    sizes: np.ndarray  # [G] int32, verified tokens of each sampling sequence: drafts + 1
    # [S] int32, the draft that follows each verified token; NO_DRAFT: none follows; DRAFT_TOKEN:
    # one follows, and only ``draft_tokens`` holds it
    draft_ids: np.ndarray
    draft_tokens: DraftTokens = _IN_ROWS

    @property
    def drafted_indices(self) -> np.ndarray:
        """[drafts] int64, the verified tokens that a draft follows."""
        return np.flatnonzero(self.draft_ids != NO_DRAFT)

    def host_draft_ids(self) -> np.ndarray:
        """Return ``draft_ids`` with the drafts, which synchronises if these are on the device."""
        if self.draft_tokens.token_ids is None:
            return self.draft_ids
        draft_ids = self.draft_ids.copy()
        draft_ids[self.drafted_indices] = self.draft_tokens.token_ids.cpu().numpy()
        return draft_ids

    def fill(self, token_ids: torch.Tensor, places: np.ndarray) -> None:
        """Write the drafts to ``places`` [drafts] of ``token_ids`` [n] int32.

        Nothing is written if the rows hold the drafts: then they are in ``token_ids`` already.
        """
        drafted = self.draft_tokens.token_ids
        if drafted is not None:
            at = to_device(torch.from_numpy(places.astype(np.int64)), token_ids.device)
            token_ids.index_copy_(0, at, drafted.to(torch.int32))

    def fill_inputs(self, token_ids: torch.Tensor, batch: HostBatch) -> None:
        """Write the drafts to the batch's inputs, ``token_ids`` [N] int32.

        A draft's row is the one after the row of the verified token that it follows.
        """
        rows = batch.sampling_rows[self.drafted_indices + 1]
        self.fill(token_ids, batch.query_start[rows])

    @property
    def group_starts(self) -> np.ndarray:
        """[G] int32, where each group begins among the verified tokens."""
        return (np.cumsum(self.sizes) - self.sizes).astype(np.int32)

    @property
    def groups(self) -> np.ndarray:
        """[S] int32, the group of each verified token."""
        return np.repeat(np.arange(self.sizes.size, dtype=np.int32), self.sizes)

    @property
    def group_positions(self) -> np.ndarray:
        """[S] int32, each verified token's place in its group."""
        return np.arange(self.draft_ids.size, dtype=np.int32) - self.group_starts[self.groups]


def expand_drafts(rows: PlanRows) -> PlanRows:
    """Split each row with drafts into one row per token. Their blocks are already allocated."""
    spread_rows = PlanRows()
    for row in rows:
        if not row.num_drafts:
            spread_rows.append(row)
            continue
        for position, token in enumerate(row.token_ids, row.start):
            spread_rows.append(ScheduledRow(row.id, position, (token,), (), is_sampled=True))
    return spread_rows


def step_drafts(rows: PlanRows, draft_tokens: DraftTokens | None = None) -> StepDrafts | None:
    """Return the drafts of these rows, held by them or by ``draft_tokens``; None if there are
    none."""
    if not rows.num_drafts:
        return None
    sizes: list[int] = []
    draft_ids: list[int] = []
    for row in rows:
        if row.is_sampled:
            sizes.append(row.num_drafts + 1)
            draft_ids += row.token_ids[len(row.token_ids) - row.num_drafts :]
            draft_ids.append(NO_DRAFT)
    return StepDrafts(
        np.array(sizes, np.int32), np.array(draft_ids, np.int32), draft_tokens or _IN_ROWS
    )
