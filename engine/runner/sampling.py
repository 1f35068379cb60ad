"""The last part of a step: from logits to tokens, and the tokens back to where they are read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from engine.errors import Failure
from engine.runner.drafts import StepDrafts
from engine.runner.inputs import HostBatch
from engine.runner.outcome import SampledRows
from engine.runner.rows import RowTable
from engine.runner.transfer import Uploads
from engine.runner.verification import Verifier
from engine.sampling.logprobs import logprob_columns
from engine.sampling.masks import MaskedRow
from kernels.operations import Operations
from kernels.sampling import LogitBias, Sampled, TokenCounts
from kernels.sending import to_device

# Tokens that a row whose mask has waited asks for. Where a fifth of the vocabulary is allowed, even
# a model without a clue finds one among them, but for three times in a hundred.
_NUM_CANDIDATES = 16


class StepMasks(NamedTuple):
    """What some of a step's rows may choose."""

    lines: torch.Tensor | None  # see ``MaskLines``; None: every row may choose every token
    failures: dict[int, Failure]  # why rows cannot go on, by sampling row
    waiting: dict[int, MaskedRow]  # rows whose line is yet to be written, by sampling row


class Sampler:
    """Chooses tokens by the table's parameters; keeps nothing itself.

    Args:
        operations: the kernels'.
        rows: those of the runner.
        uploads: for masks and drafts alone; they are sent while the step's other inputs are in
            use.
        rejects: judge drafts of sampled texts by rejection (``engine/runner/verification.py``).
    """

    def __init__(
        self, operations: Operations, rows: RowTable, uploads: Uploads, *, rejects: bool = False
    ) -> None:
        self._operations = operations
        self._rows = rows
        self._uploads = uploads
        self._verifier = Verifier(operations, rows, uploads, rejects=rejects)

    def is_plain(self, batch: HostBatch) -> bool:
        """Whether no row asks for more than the table's columns say: no counts, biases, masks or
        log-probabilities."""
        state, slots = self._rows.sampling, batch.slots
        tells = (state.num_logprobs[slots] >= 0).any()
        if tells or state.is_masked(slots).any():
            return False
        return state.counts(slots) is None and state.bias(slots) is None

    def is_greedy(self, batch: HostBatch) -> bool:
        """Whether all rows take the likeliest token."""
        return not self._rows.sampling.temperature(batch.slots).any()

    def sample(
        self,
        logits: torch.Tensor,
        batch: HostBatch,
        slots: torch.Tensor,
        positions: torch.Tensor,
        drafts: StepDrafts | None = None,
        masks: StepMasks | None = None,
    ) -> SampledRows:
        """A token for each sampling row, and which drafts are kept.

        Args:
            logits: [S, vocab] float32; overwritten.
            batch: of the step.
            slots: [S] int32, the rows' places in the table.
            positions: [S] int64, of the tokens to be chosen.
            drafts: among the rows; None: there are none.
            masks: of a step without drafts; None: they are made here, while the device computes.
        """
        state = self._rows.sampling
        host_slots = batch.slots[batch.sampling_rows]
        num_logprobs = state.num_logprobs[host_slots]
        telling = np.flatnonzero(num_logprobs >= 0)
        at: torch.Tensor | None = None
        raw: torch.Tensor | None = None
        if telling.size:  # a copy of the rows that tell of them: sampling writes in place
            at = to_device(torch.from_numpy(telling), logits.device)
            raw = logits[at]
        accepted: torch.Tensor | None = None
        if drafts is None:
            masks = self.masks(batch) if masks is None else masks
            sampled, failures = self._choose(logits, batch, slots, positions, masks)
        else:
            judged = self._verifier.sample(logits, batch, drafts, slots, positions)
            sampled, accepted, failures = judged
        if at is None or raw is None:
            return SampledRows(sampled, failures=failures, num_accepted=accepted)
        num_top = num_logprobs[telling].tolist()
        columns = logprob_columns(raw, sampled.token_ids[at], max(num_top))
        return SampledRows(sampled, telling.tolist(), num_top, columns, failures, accepted)

    def _choose(
        self,
        logits: torch.Tensor,
        batch: HostBatch,
        slots: torch.Tensor,
        positions: torch.Tensor,
        masks: StepMasks,
    ) -> tuple[Sampled, dict[int, Failure]]:
        """The tokens of a step without drafts, and why some rows cannot go on."""
        state = self._rows.sampling
        host_slots = batch.slots[batch.sampling_rows]
        counts, bias = state.counts(host_slots), state.bias(host_slots)
        if masks.waiting:
            self._settle(logits, slots, positions, masks, counts, bias)
        sampled = self._operations.sample(
            logits, slots, positions, state.table, counts, bias, masks.lines
        )
        self._operations.feed_back(
            self._rows.newest, slots, sampled.token_ids, state.table.count_line, counts
        )
        return sampled, masks.failures

    def _settle(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        masks: StepMasks,
        counts: TokenCounts | None,
        bias: LogitBias | None,
    ) -> None:
        """Write the lines that have waited, now that the rows' likeliest tokens can be told."""
        state, (at, rows) = self._rows.sampling, zip(*masks.waiting.items(), strict=True)
        where = torch.tensor(at)
        candidates = self._operations.candidates(
            logits,
            where,
            slots[where],
            positions[where],
            state.table,
            _NUM_CANDIDATES,
            counts,
            bias,
        )
        failures = state.masks.settle(rows, candidates.tolist())
        masks.failures.update((at[index], why) for index, why in failures.items())

    def masks(self, batch: HostBatch) -> StepMasks:
        """The masks of a step without drafts, which follow its tokens; once a step.

        Where the layers compute on the host, it is called before them: what they read leaves none
        of the planning's code and objects in a core's caches.
        """
        state = self._rows.sampling
        if not len(state.masks):
            return StepMasks(None, {}, {})
        masked = np.flatnonzero(state.is_masked(batch.slots[batch.sampling_rows]))
        if not masked.size:
            return StepMasks(None, {}, {})
        rows = _masked_rows(batch, batch.sampling_rows[masked])
        failures, waiting = state.masks.update(rows, self._uploads.send)
        return StepMasks(
            state.masks.lines,
            {int(masked[index]): why for index, why in failures.items()},
            {int(masked[index]): rows[index] for index in waiting},
        )


def _masked_rows(batch: HostBatch, at: np.ndarray) -> list[MaskedRow]:
    """What these rows of a batch tell their constraints."""
    slots, starts = batch.slots[at].tolist(), batch.starts[at].tolist()
    if batch.is_decode:  # a token each
        return list(zip(slots, starts, batch.token_ids[at][:, None].tolist(), strict=True))
    begins, ends = batch.query_start[at].tolist(), batch.query_start[at + 1].tolist()
    all_ids = batch.token_ids.tolist()
    token_ids = [all_ids[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return list(zip(slots, starts, token_ids, strict=True))
