"""Verification of drafts: the sampler of steps that have some.

Coupled, each token is the one that the ordinary sampler would pick at its position, and a draft is
accepted while it equals that token: the text is the same as without drafts, seed by seed. A draft
model that samples with the same noise guesses right nearly as often as any scheme allows (Daliri,
Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding").

With rejection sampling, drafts of sampled texts are verified as published
(``kernels/reference/drafts.py``): this accepts as many as possible without changing the
distribution. Which tokens are sampled then depends on the positions of drafts, so a seed gives the
same text only with the same drafts.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.errors import Failure
from engine.runner.drafts import StepDrafts
from engine.runner.inputs import HostBatch
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from engine.sampling.masks import MaskedRow
from kernels.operations import Operations
from kernels.reference.drafts import NO_DRAFT
from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts
from kernels.transfer import to_device


class VerifiedTokens(NamedTuple):
    """Results of a step's verified tokens."""

    sampled: SamplerOutput
    num_accepted: torch.Tensor  # [G] int64, accepted drafts of each sequence
    failures: dict[int, Failure]  # by verified token


class _Parameters(NamedTuple):
    """The sampler's parameters, with a line for each verified token where requests need one."""

    slots: torch.Tensor
    table: SamplingTable
    counts: TokenCounts | None
    bias: LogitBias | None
    masks: torch.Tensor | None


class Verifier:
    """Verifies drafts; stateless.

    Args:
        operations: the kernels'.
        rows: those of the runner.
        uploads: for what a step with drafts needs beyond others.
        rejection_sampling: verify sampled texts by rejection sampling.
    """

    def __init__(
        self, operations: Operations, rows: RowTable, uploads: Uploads, *, rejection_sampling: bool
    ) -> None:
        self._operations = operations
        self._rows = rows
        self._uploads = uploads
        self._rejection_sampling = rejection_sampling

    def sample(
        self,
        logits: torch.Tensor,
        batch: HostBatch,
        drafts: StepDrafts,
        slots: torch.Tensor,
        positions: torch.Tensor,
    ) -> VerifiedTokens:
        """Sample the tokens of a step, and decide how many drafts each sequence accepts.

        Args:
            logits: [S, vocab] float32; overwritten.
            batch: of the step.
            drafts: of the step.
            slots: [S] int32, the rows' slots in the table.
            positions: [S] int64, of the tokens to be sampled.
        """
        state = self._rows.sampling
        draft_ids, sizes = self._uploads.send((drafts.draft_ids, drafts.sizes))
        drafts.fill(draft_ids, drafts.drafted_indices)
        parameters, failures = self._parameters(batch, drafts, slots, draft_ids)
        non_greedy = (
            self._non_greedy_drafts(batch, drafts)
            if self._rejection_sampling
            else np.empty(0, np.int64)
        )
        judged = to_device(torch.from_numpy(non_greedy), logits.device) if non_greedy.size else None
        raw = logits[judged] if judged is not None else None
        sampled = self._operations.sample(logits, parameters.slots, positions, *parameters[1:])
        token_ids = sampled.token_ids
        is_kept = token_ids == draft_ids
        if judged is not None and raw is not None:
            own = parameters.slots[judged]
            do = self._operations
            wanted = do.distribution(raw, own, positions[judged], *parameters[1:])
            tokens, kept = do.verify_drafts(
                wanted,
                _of_drafts(drafts, non_greedy),
                draft_ids[judged].long(),
                state.table.seed[slots[judged].long()],
                positions[judged],
            )
            token_ids[judged], is_kept[judged] = tokens, kept
        newest = self._rows.newest
        accepted = self._operations.accept_drafts(newest, slots, token_ids, is_kept, sizes)
        self._count(token_ids, slots, accepted, batch, drafts)
        return VerifiedTokens(sampled, accepted, failures)

    def _non_greedy_drafts(self, batch: HostBatch, drafts: StepDrafts) -> np.ndarray:
        """[w] int64, the verified tokens followed by a draft, in texts that are not greedy."""
        temperature = self._rows.sampling.temperature(batch.slots[batch.sampling_rows])
        return np.flatnonzero((drafts.draft_ids != NO_DRAFT) & (temperature > 0))

    def _count(
        self,
        token_ids: torch.Tensor,
        slots: torch.Tensor,
        accepted: torch.Tensor,
        batch: HostBatch,
        drafts: StepDrafts,
    ) -> None:
        """Add the new tokens of texts with penalties to their counts."""
        state = self._rows.sampling
        counts = state.counts(batch.slots[batch.sampling_rows])
        if counts is None:
            return
        groups, places = self._uploads.send((drafts.groups, drafts.group_positions))
        lines = state.table.count_line[slots.long()].long()
        is_counted = (places <= accepted[groups.long()]) & (lines >= 0)
        counts.output.index_put_(
            (lines.clamp(min=0), token_ids), is_counted.to(counts.output.dtype), accumulate=True
        )

    # ------------------------------------------------------------ parameters by verified token

    def _parameters(
        self,
        batch: HostBatch,
        drafts: StepDrafts,
        slots: torch.Tensor,
        draft_ids: torch.Tensor,
    ) -> tuple[_Parameters, dict[int, Failure]]:
        """Make each verified token's parameters, which depend on the drafts before it."""
        state = self._rows.sampling
        host_slots = batch.slots[batch.sampling_rows]
        counts, bias = state.counts(host_slots), state.bias(host_slots)
        masked = np.flatnonzero(state.is_masked(host_slots))
        if counts is None and not masked.size:
            return _Parameters(slots, state.table, None, bias, None), {}
        at = slots.long()
        columns = {name: getattr(state.table, name)[at] for name in SamplingTable._fields}
        masks: torch.Tensor | None = None
        failures: dict[int, Failure] = {}
        if counts is not None:
            counted = self._counts(counts, host_slots, drafts, draft_ids)
            counts, columns["count_line"] = counted
        if masked.size:
            lines, failures = self._masks(batch, drafts, masked)
            mask_line = np.full(host_slots.size, -1, np.int32)
            mask_line[masked] = np.arange(masked.size, dtype=np.int32)
            columns["mask_line"], masks = self._uploads.send((mask_line, lines))
        own = torch.arange(host_slots.size, dtype=torch.int32, device=slots.device)
        return _Parameters(own, SamplingTable(**columns), counts, bias, masks), failures

    def _counts(
        self,
        counts: TokenCounts,
        host_slots: np.ndarray,
        drafts: StepDrafts,
        draft_ids: torch.Tensor,
    ) -> tuple[TokenCounts, torch.Tensor]:
        """Make each verified token's counts in texts with penalties, with the drafts before it."""
        lines = self._rows.sampling.count_lines(host_slots)
        counted = np.flatnonzero(lines >= 0)
        count_line = np.full(host_slots.size, -1, np.int32)
        count_line[counted] = np.arange(counted.size, dtype=np.int32)
        places, begins = (
            drafts.group_positions[counted],
            (counted - drafts.group_positions[counted]),
        )
        # The token at place p of its group counts the drafts that follow places 0 .. p - 1.
        of_line = np.repeat(np.arange(counted.size), places)
        nth = np.arange(of_line.size) - np.repeat(np.cumsum(places) - places, places)
        before = np.repeat(begins, places) + nth
        sent = self._uploads.send(
            (count_line, lines[counted], of_line.astype(np.int32), before.astype(np.int32))
        )
        own, seen = sent[1].long(), draft_ids.index_select(0, sent[3])
        output = counts.output[own]
        ones = torch.ones(of_line.size, dtype=output.dtype, device=output.device)
        output.index_put_((sent[2].long(), seen.long()), ones, accumulate=True)
        return TokenCounts(output, counts.prompt[own]), sent[0]

    def _masks(
        self, batch: HostBatch, drafts: StepDrafts, masked: np.ndarray
    ) -> tuple[np.ndarray, dict[int, Failure]]:
        """Make each verified token's mask in constrained texts; also failures by verified token."""
        places, sizes = drafts.group_positions, drafts.sizes[drafts.groups]
        firsts = masked[places[masked] == 0]
        rows: list[MaskedRow] = []
        ahead: list[list[int]] = []
        known = drafts.host_draft_ids()
        for first in firsts.tolist():
            row = batch.sampling_rows[first]
            begin, end = batch.query_start[row], batch.query_start[row + 1]
            newest = batch.token_ids[begin:end].tolist()
            rows.append((int(batch.slots[row]), int(batch.starts[row]), newest))
            ahead.append(known[first : first + sizes[first] - 1].tolist())
        lines, failures = self._rows.sampling.masks.draft_masks(rows, ahead)
        return lines, {int(firsts[index]): why for index, why in failures.items()}


def _of_drafts(drafts: StepDrafts, judged: np.ndarray) -> torch.Tensor | None:
    """Return the distributions from which the drafts after these verified tokens were sampled."""
    proposed = drafts.draft_tokens.draft_probs
    if proposed is None:
        return None
    nth = np.cumsum(drafts.draft_ids != NO_DRAFT)[judged] - 1
    return proposed[to_device(torch.from_numpy(nth), proposed.device)]
