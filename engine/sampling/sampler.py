"""One step's tokens: the batch's logits go through the steps that some row of it needs.

    raw logits ─► bias ─► penalties ─► early ends banned ─► arg-max
                                                       └──► temperature ─► truncation ─► draw

Each row's result depends on that row alone. A step no row needs costs nothing; a batch of plain
greedy rows is an arg-max.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from engine.sampling.columns import SamplingColumns
from engine.sampling.logprobs import token_logprobs
from engine.sampling.penalties import TokenCounts
from engine.sampling.seeds import position_keys
from engine.types import TokenLogprobs
from kernels.reference.sampling import argmax, sample_gumbel, truncation_threshold


@dataclass(frozen=True, slots=True)
class SampledRows:
    """What became of each row, in the order given."""

    token_ids: list[int]
    is_finite: list[bool]  # False: the row's logits are broken, its token means nothing
    logprobs: list[TokenLogprobs | None]


class Sampler:
    """Stateless between steps apart from the columns and counts it is given."""

    def __init__(self, columns: SamplingColumns, counts: TokenCounts) -> None:
        self._columns = columns
        self._counts = counts

    def sample(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> SampledRows:
        """Choose a token for each row.

        Args:
            logits: [n, vocab] float32; written.
            slots: [n] the rows' slots in the columns.
            positions: [n] int64, of the tokens to be chosen.
        """
        columns = self._columns
        num_logprobs = columns.num_logprobs[slots]
        wants_logprobs = np.flatnonzero(num_logprobs >= 0)
        # A copy of the raw logits of the rows that tell them: the steps below write in place.
        raw = logits[_index(wants_logprobs, logits)] if wants_logprobs.size else None
        self._add_bias(logits, slots)
        self._penalise(logits, slots)
        self._ban_early_ends(logits, slots, positions)
        token_ids = argmax(logits)
        best = logits.gather(1, token_ids.unsqueeze(1)).squeeze(1)
        # nan is found as the maximum; +inf and a row of -inf are as useless.
        is_finite = torch.isfinite(best)
        drawn = np.flatnonzero(columns.temperature[slots] > 0)
        if drawn.size:
            at = _index(drawn, logits)
            chosen = self._draw(logits[at], slots[drawn], positions[drawn])
            token_ids[at] = chosen
        logprobs: list[TokenLogprobs | None] = [None] * slots.size
        if raw is not None:
            told = token_ids[_index(wants_logprobs, logits)]
            entries = token_logprobs(raw, told, num_logprobs[wants_logprobs].tolist())
            for row, entry in zip(wants_logprobs.tolist(), entries, strict=True):
                logprobs[row] = entry
        return SampledRows(token_ids.tolist(), is_finite.tolist(), logprobs)

    def _add_bias(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        biased = np.flatnonzero(self._columns.is_biased[slots])
        if biased.size == 0:
            return
        sparse = [self._columns.sparse[slot] for slot in slots[biased].tolist()]
        rows = np.repeat(biased, [row.bias_ids.size for row in sparse])
        ids = np.concatenate([row.bias_ids for row in sparse])
        values = np.concatenate([row.bias_values for row in sparse])
        places = (_index(rows, logits), _index(ids, logits))
        logits.index_put_(places, _index(values, logits), accumulate=True)

    def _penalise(self, logits: torch.Tensor, slots: np.ndarray) -> None:
        columns = self._columns
        penalised = np.flatnonzero(columns.is_penalised[slots])
        if penalised.size == 0:
            return
        at, chosen = _index(penalised, logits), slots[penalised]
        logits[at] = self._counts.penalise(
            logits[at],
            chosen,
            _column(columns.presence_penalty[chosen], logits),
            _column(columns.frequency_penalty[chosen], logits),
            _column(columns.repetition_penalty[chosen], logits),
        )

    def _ban_early_ends(
        self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> None:
        """No end token before ``min_tokens``; last, so that no bias lifts one again."""
        early = np.flatnonzero(positions < self._columns.min_position[slots])
        if early.size == 0:
            return
        banned = [self._columns.sparse[slot].end_ids for slot in slots[early].tolist()]
        rows = np.repeat(early, [ids.size for ids in banned])
        places = (_index(rows, logits), _index(np.concatenate(banned), logits))
        logits[places] = float("-inf")

    def _draw(self, logits: torch.Tensor, slots: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        """Random tokens [m] from rows with a temperature: [m, vocab]."""
        columns = self._columns
        logits = logits / _column(columns.temperature[slots], logits)
        truncated = np.flatnonzero(columns.is_truncated[slots])
        if truncated.size:
            at, chosen = _index(truncated, logits), slots[truncated]
            rows = logits[at]
            threshold = truncation_threshold(
                rows,
                _index(columns.top_k[chosen], logits),
                _index(columns.top_p[chosen], logits),
                _index(columns.min_p[chosen], logits),
            )
            logits[at] = rows.masked_fill_(rows < threshold, float("-inf"))
        keys = position_keys(columns.seed[slots], positions)
        return sample_gumbel(logits, _index(keys, logits))


def _index(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device)


def _column(values: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    return _index(values, like).unsqueeze(1)
