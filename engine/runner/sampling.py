"""The last part of a step: from logits to tokens, which are fed back to the rows."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
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
from engine.sampling.timestamps import prefer_timestamps
from kernels.operations import Operations
from kernels.sampling import LogitBias, SamplerOutput, TokenCounts
from kernels.transfer import to_device

# Candidates of a row whose mask is computed late. If a fifth of the vocabulary is allowed, even
# random candidates include an allowed token in all but 3 % of cases.
_NUM_CANDIDATES = 16


class StepMasks(NamedTuple):
    """The grammar masks of a step's rows; their lines are in ``MaskLines``."""

    is_masked: bool  # whether any row is constrained
    failures: dict[int, Failure]  # why rows cannot continue, by sampling row
    deferred: dict[int, MaskedRow]  # rows whose line is not written yet, by sampling row
    # The first timestamp of rows with timestamps, by sampling row.
    stamped: Mapping[int, int] = MappingProxyType({})


class Sampler:
    """Samples tokens by the row table's parameters; stateless.

    Args:
        operations: the kernels'.
        rows: those of the runner.
        uploads: for masks and drafts alone; these are sent while the step's other inputs are in
            use.
        rejection_sampling: verify drafts by rejection sampling (``engine/runner/verification.py``).
    """

    def __init__(
        self,
        operations: Operations,
        rows: RowTable,
        uploads: Uploads,
        *,
        rejection_sampling: bool = False,
    ) -> None:
        self._operations = operations
        self._rows = rows
        self._uploads = uploads
        self._verifier = Verifier(operations, rows, uploads, rejection_sampling=rejection_sampling)

    def is_plain(self, batch: HostBatch) -> bool:
        """Whether no row has counts, biases, masks or log-probabilities: table columns suffice."""
        state, slots = self._rows.sampling, batch.slots
        has_logprobs = (state.num_logprobs[slots] >= 0).any()
        if has_logprobs or state.is_masked(slots).any():
            return False
        return state.counts(slots) is None and state.bias(slots) is None

    def is_greedy(self, batch: HostBatch) -> bool:
        """Whether all rows are greedy."""
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
        """Sample a token for each sampling row, and decide which drafts are accepted.

        Args:
            logits: [S, vocab] float32; overwritten.
            batch: of the step.
            slots: [S] int32, the rows' slots in the table.
            positions: [S] int64, of the tokens to be sampled.
            drafts: among the rows; None: there are none.
            masks: of a step without drafts; None: they are computed here, while the device
                computes.
        """
        state = self._rows.sampling
        host_slots = batch.slots[batch.sampling_rows]
        num_logprobs = state.num_logprobs[host_slots]
        reporting = np.flatnonzero(num_logprobs >= 0)
        at: torch.Tensor | None = None
        raw: torch.Tensor | None = None
        if reporting.size:  # copied, as sampling overwrites the logits
            at = to_device(torch.from_numpy(reporting), logits.device)
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
        num_top = num_logprobs[reporting].tolist()
        columns = logprob_columns(raw, sampled.token_ids[at], max(num_top))
        return SampledRows(sampled, reporting.tolist(), num_top, columns, failures, accepted)

    def feed_back(self, sampled: SamplerOutput, slots: torch.Tensor) -> SampledRows:
        """Make tokens that the head has chosen the newest ones of plain, greedy rows.

        ``sampled`` holds [S] tokens, and ``slots`` [S] int32 the rows' slots in the table.
        """
        lines = self._rows.sampling.table.count_line
        self._operations.feed_back(self._rows.newest, slots, sampled.token_ids, lines)
        return SampledRows(sampled)

    def _choose(
        self,
        logits: torch.Tensor,
        batch: HostBatch,
        slots: torch.Tensor,
        positions: torch.Tensor,
        masks: StepMasks,
    ) -> tuple[SamplerOutput, dict[int, Failure]]:
        """Sample the tokens of a step without drafts; also return why some rows cannot continue."""
        state = self._rows.sampling
        host_slots = batch.slots[batch.sampling_rows]
        counts, bias = state.counts(host_slots), state.bias(host_slots)
        if masks.deferred:
            self._write_deferred_masks(logits, slots, positions, masks, counts, bias)
        if masks.stamped:
            self._prefer_timestamps(logits, host_slots, masks)
        # Read now: rows added since the masks were computed, by a step behind this one in a
        # pipeline, may have moved the lines.
        lines = state.masks.lines if masks.is_masked else None
        sampled = self._operations.sample(
            logits, slots, positions, state.table, counts, bias, lines
        )
        self._operations.feed_back(
            self._rows.newest, slots, sampled.token_ids, state.table.count_line, counts
        )
        return sampled, masks.failures

    def _prefer_timestamps(
        self, logits: torch.Tensor, host_slots: np.ndarray, masks: StepMasks
    ) -> None:
        """See ``prefer_timestamps``. All rows have one model, and so the same first timestamp."""
        state = self._rows.sampling
        at = np.fromiter(masks.stamped, np.int64, len(masks.stamped))
        lines = state.mask_lines(host_slots[at]).astype(np.int64)
        rows, lines = (to_device(torch.from_numpy(each), logits.device) for each in (at, lines))
        begin = next(iter(masks.stamped.values()))
        prefer_timestamps(logits, rows, begin, state.masks.lines.index_select(0, lines))

    def _write_deferred_masks(
        self,
        logits: torch.Tensor,
        slots: torch.Tensor,
        positions: torch.Tensor,
        masks: StepMasks,
        counts: TokenCounts | None,
        bias: LogitBias | None,
    ) -> None:
        """Write the deferred mask lines, now that the rows' likeliest tokens are known."""
        state, (at, rows) = self._rows.sampling, zip(*masks.deferred.items(), strict=True)
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
        failures = state.masks.write_deferred(rows, candidates.tolist())
        masks.failures.update((at[index], why) for index, why in failures.items())

    def masks(self, batch: HostBatch) -> StepMasks:
        """Compute the masks of a step without drafts and advance their constraints; once a step.

        If the layers run on the host, this comes before them: the weights they read would evict the
        planner's code and objects from the core's caches.
        """
        state = self._rows.sampling
        if not len(state.masks):
            return StepMasks(False, {}, {})
        masked = np.flatnonzero(state.is_masked(batch.slots[batch.sampling_rows]))
        if not masked.size:
            return StepMasks(False, {}, {})
        rows = _masked_rows(batch, batch.sampling_rows[masked])
        failures, waiting = state.masks.update(rows, self._uploads.send)
        return StepMasks(
            True,
            {int(masked[index]): why for index, why in failures.items()},
            {int(masked[index]): rows[index] for index in waiting},
            {
                int(at): begin
                for at, (slot, *_) in zip(masked, rows, strict=True)
                if (begin := state.masks.timestamp_begin(slot)) is not None
            },
        )


def _masked_rows(batch: HostBatch, at: np.ndarray) -> list[MaskedRow]:
    """Collect slot, start and tokens of the batch's rows ``at``, for their constraints."""
    slots, starts = batch.slots[at].tolist(), batch.starts[at].tolist()
    if batch.is_decode:  # one token each
        return list(zip(slots, starts, batch.token_ids[at][:, None].tolist(), strict=True))
    begins, ends = batch.query_start[at].tolist(), batch.query_start[at + 1].tolist()
    all_ids = batch.token_ids.tolist()
    token_ids = [all_ids[begin:end] for begin, end in zip(begins, ends, strict=True)]
    return list(zip(slots, starts, token_ids, strict=True))
