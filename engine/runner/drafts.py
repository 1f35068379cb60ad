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
from typing import NamedTuple

import numpy as np
import torch

from engine.plan_rows import PlanRows, ScheduledRow
from engine.runner.inputs import HostBatch
from kernels.reference.drafts import NO_DRAFT
from kernels.sending import to_device


class Guesses(NamedTuple):
    """The drafts of a step, one after the other in the order of its rows."""

    # [drafts] int64, on a device that the host does not wait for; None: the rows tell them
    token_ids: torch.Tensor | None
    # [drafts, vocab] float32, what each was drawn from; None: no chance was in it
    proposed: torch.Tensor | None


_KNOWN = Guesses(None, None)


@dataclass(frozen=True, slots=True)
class StepDrafts:
    """The drafts of a step that verifies some, on the host. S judged tokens of G sequences."""

    sizes: np.ndarray  # [G] int32, judged tokens of each sequence that samples: its drafts and one
    # [S] int32, the draft behind each judged token; NO_DRAFT: there is none, DRAFT_TOKEN: only
    # ``guesses`` tell it
    draft_ids: np.ndarray
    guesses: Guesses = _KNOWN

    @property
    def drafted(self) -> np.ndarray:
        """[drafts] int64, judged tokens with a draft behind them."""
        return np.flatnonzero(self.draft_ids != NO_DRAFT)

    def known(self) -> np.ndarray:
        """``draft_ids`` with what the guesses tell; waits for the device where these are there."""
        if self.guesses.token_ids is None:
            return self.draft_ids
        told = self.draft_ids.copy()
        told[self.drafted] = self.guesses.token_ids.cpu().numpy()
        return told

    def fill(self, token_ids: torch.Tensor, places: np.ndarray) -> None:
        """Write the guesses to these places [drafts] of a tensor, [n] int32; all of them are
        written already where the rows tell them."""
        guessed = self.guesses.token_ids
        if guessed is not None:
            at = to_device(torch.from_numpy(places.astype(np.int64)), token_ids.device)
            token_ids.index_copy_(0, at, guessed.to(torch.int32))

    def fill_inputs(self, token_ids: torch.Tensor, batch: HostBatch) -> None:
        """Write them to the inputs of their batch, [N] int32: a draft is the row behind the judged
        token that it stands behind."""
        rows = batch.sampling_rows[self.drafted + 1]
        self.fill(token_ids, batch.query_start[rows])

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


def step_drafts(rows: PlanRows, guesses: Guesses | None = None) -> StepDrafts | None:
    """The drafts of these rows, which tell them or leave that to ``guesses``; None where there are
    none."""
    if not rows.num_drafts:
        return None
    sizes: list[int] = []
    draft_ids: list[int] = []
    for row in rows:
        if row.samples:
            sizes.append(row.num_drafts + 1)
            draft_ids += row.token_ids[len(row.token_ids) - row.num_drafts :]
            draft_ids.append(NO_DRAFT)
    return StepDrafts(np.array(sizes, np.int32), np.array(draft_ids, np.int32), guesses or _KNOWN)
