"""Runs plans on a loaded model (see ``engine/runner/protocol.py`` for the contract)."""

from __future__ import annotations

import math

import numpy as np
import torch

from engine.errors import EngineDead, Failure, OutOfMemory
from engine.kv_cache.storage import KVCache
from engine.models.decoder import Decoder, StepState
from engine.runner.inputs import ForwardInput, build_input
from engine.runner.rows import RowTable
from engine.sampling.logprobs import token_logprobs
from engine.sampling.sampler import SampledRows, Sampler
from engine.types import EngineInfo, ScheduledRow, StepPlan, StepResult, TokenLogprobs
from kernels.attention import AttentionSpec
from kernels.operations import Kernels

# Prompt positions whose logits are made at once: a long chunk's would take gigabytes.
_PROMPT_LOGPROB_ROWS = 128

_NOT_FINITE = Failure(
    kind="RequestFailed", message="the model's scores for this request are not finite"
)


class ModelRunner:
    """A model, its KV cache and the rows it has been told of. All calls from one thread."""

    def __init__(
        self,
        info: EngineInfo,
        model: Decoder,
        cache: KVCache,
        kernels: Kernels,
        attention_spec: AttentionSpec,
        rows: RowTable,
    ) -> None:
        self._info = info
        self._model = model
        self._cache = cache
        self._kernels = kernels
        self._attention_spec = attention_spec
        self._rows = rows
        self._sampler = Sampler(rows.columns, rows.counts)

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info

    def run(self, plan: StepPlan) -> StepResult:
        """Compute one step. Raises as ``Runner.run`` says."""
        try:
            with torch.inference_mode():
                return self._run(plan)
        except torch.OutOfMemoryError as error:
            raise OutOfMemory(str(error).splitlines()[0]) from error
        except torch.AcceleratorError as error:
            raise EngineDead(f"the GPU is lost: {str(error).splitlines()[0]}") from error
        except RuntimeError as error:
            if "can't allocate memory" in str(error):  # torch's CPU allocator has no type for it
                raise OutOfMemory("the step ran out of memory") from error
            raise

    def _run(self, plan: StepPlan) -> StepResult:
        for row_id in plan.removed:
            self._rows.remove(row_id)
        for added in plan.added:
            self._rows.add(added)
        if not plan.rows:
            if plan.copies:
                self._cache.copy(plan.copies)
            return StepResult()
        spec = self._attention_spec
        batch = build_input(plan.rows, self._rows, spec.block_size, spec.device)
        if plan.copies:
            self._cache.copy(plan.copies)
        prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]] = {}
        errors: dict[str, Failure] = {}
        if self._rows.judged:
            hidden = self._forward(batch, None)
            prompt_logprobs, errors = self._prompt_logprobs(plan.rows, batch, hidden)
            hidden = hidden.index_select(0, batch.sampling_tokens)
        else:
            samples_all = batch.sampling_rows.size == batch.input_ids.shape[0]
            hidden = self._forward(batch, None if samples_all else batch.sampling_tokens)
        if batch.sampling_rows.size == 0:
            return StepResult(prompt_logprobs=prompt_logprobs, errors=errors)
        sampled = self._sample(batch, hidden)
        return _result(plan.rows, batch, sampled, prompt_logprobs, errors)

    def _forward(self, batch: ForwardInput, wanted: torch.Tensor | None) -> torch.Tensor:
        spec = self._attention_spec
        state = StepState(
            attention=self._kernels.attention.plan(batch.geometry, spec),
            slot_mapping=batch.slot_mapping,
            rotation=self._model.rotation(batch.positions),
        )
        return self._model.forward(batch.input_ids, state, self._cache.layers, wanted)

    def _sample(self, batch: ForwardInput, hidden: torch.Tensor) -> SampledRows:
        """Tokens of the rows that sample, from their last positions' [rows, hidden_size]."""
        rows = batch.sampling_rows
        logits = self._model.logits(hidden)
        positions = batch.geometry.seq_lens[rows].astype(np.int64)
        return self._sampler.sample(logits, batch.slots[rows], positions)

    def _prompt_logprobs(
        self, rows: tuple[ScheduledRow, ...], batch: ForwardInput, hidden: torch.Tensor
    ) -> tuple[dict[str, tuple[TokenLogprobs, ...]], dict[str, Failure]]:
        """For the rows that asked, and the rows among them whose numbers are broken."""
        told: dict[str, tuple[TokenLogprobs, ...]] = {}
        errors: dict[str, Failure] = {}
        for index, (row, slot) in enumerate(zip(rows, batch.slots.tolist(), strict=True)):
            request = self._rows.requests[slot]
            num_top = request.sampling.prompt_logprobs
            if num_top is None:
                continue
            # The logits at position p judge the prompt's token p + 1; the last has none.
            prompt = request.prompt_token_ids
            judged = prompt[row.start + 1 : row.start + len(row.token_ids) + 1]
            begin = int(batch.geometry.query_start[index])
            entries = self._judge(hidden[begin : begin + len(judged)], judged, num_top)
            if all(math.isfinite(entry.logprob) for entry in entries):
                told[row.id] = entries
            else:
                errors[row.id] = _NOT_FINITE
        return told, errors

    def _judge(
        self, hidden: torch.Tensor, token_ids: tuple[int, ...], num_top: int
    ) -> tuple[TokenLogprobs, ...]:
        entries: list[TokenLogprobs] = []
        for begin in range(0, len(token_ids), _PROMPT_LOGPROB_ROWS):
            ids = token_ids[begin : begin + _PROMPT_LOGPROB_ROWS]
            logits = self._model.logits(hidden[begin : begin + len(ids)])
            chosen = torch.tensor(ids, device=logits.device)
            entries.extend(token_logprobs(logits, chosen, [num_top] * len(ids)))
        return tuple(entries)


def _result(
    rows: tuple[ScheduledRow, ...],
    batch: ForwardInput,
    sampled: SampledRows,
    prompt_logprobs: dict[str, tuple[TokenLogprobs, ...]],
    errors: dict[str, Failure],
) -> StepResult:
    """Columns of the rows that sampled; a row with an error is in ``errors`` alone."""
    ids = [rows[row].id for row in batch.sampling_rows.tolist()]
    errors |= {
        row_id: _NOT_FINITE
        for row_id, finite in zip(ids, sampled.is_finite, strict=True)
        if not finite
    }
    good = [i for i, row_id in enumerate(ids) if row_id not in errors] if errors else None
    if good is None:
        good = range(len(ids))
    logprobs = sampled.logprobs
    return StepResult(
        ids=tuple(ids[i] for i in good),
        token_ids=tuple((sampled.token_ids[i],) for i in good),
        logprobs=tuple(None if (entry := logprobs[i]) is None else (entry,) for i in good),
        prompt_logprobs={
            row_id: entries for row_id, entries in prompt_logprobs.items() if row_id not in errors
        },
        errors=errors,
    )
