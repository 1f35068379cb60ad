"""Rows that verify drafts, as the tensors see them: single tokens, judged as a group.

    plan       row  (t, x, y, z)            one sequence, three drafts
    batch      rows (t) (x) (y) (z)         the same slot, neighbouring positions
    logits     after each of them           what follows t, x, y and z
    result     the drafts that were kept, and one more token

So a token has the same kernels whether it was guessed or not, and the same bits where those do not
depend on the batch; a step that only decodes stays one, drafts or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.plan_rows import PlanRows, ScheduledRow
from kernels.reference.drafts import NO_DRAFT


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step that verifies some, on the host. S judged tokens of G sequences."""

    sizes: np.ndarray  # [G] int32, judged tokens of each sequence that samples: its drafts and one
    draft_ids: np.ndarray  # [S] int32, the draft behind each judged token; NO_DRAFT: there is none
    # [number of drafts, vocab] float32, what each was drawn from; None: no chance was in it
    proposed: torch.Tensor | None = None

    @property
    def begins(self) -> np.ndarray:
        """[G] int32, where each group begins among the judged tokens."""
        return (np.cumsum(self.sizes) - self.sizes).astype(np.int32)

    @property
    def groups(self) -> np.ndarray:
        """[S] int32, whose each judged token is."""
        return np.repeat(np.arange(self.sizes.size, dtype=np.int32), self.sizes)

    @property
    def places(self) -> np.ndarray:
        """[S] int32, each judged token's place in its group."""
        return np.arange(self.draft_ids.size, dtype=np.int32) - self.begins[self.groups]


def spread(rows: PlanRows) -> PlanRows:
    """The rows, with a row for each token of those that verify drafts. Their blocks are known."""
    spread_rows = PlanRows()
    for row in rows:
        if not row.num_drafts:
            spread_rows.append(row)
            continue
        for position, token in enumerate(row.token_ids, row.start):
            spread_rows.append(ScheduledRow(row.id, position, (token,), (), samples=True))
    return spread_rows


def step_drafts(rows: PlanRows, proposed: torch.Tensor | None = None) -> StepDrafts | None:
    """The drafts of these rows, all of them known; None where there are none."""
    if not rows.num_drafts:
        return None
    sizes: list[int] = []
    draft_ids: list[int] = []
    for row in rows:
        if row.samples:
            sizes.append(row.num_drafts + 1)
            draft_ids += row.token_ids[len(row.token_ids) - row.num_drafts :]
            draft_ids.append(NO_DRAFT)
    return StepDrafts(np.array(sizes, np.int32), np.array(draft_ids, np.int32), proposed)
