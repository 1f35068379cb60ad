"""What a sampling step reads, on the device: the nouns that its kernels share.

A request has a *slot* for its life; a step names the slots of its rows. Everything here is
written when a request comes or goes, and only read by a step.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingTable(NamedTuple):
    """Parameters by slot, each [slots]."""

    temperature: torch.Tensor  # float32; 0: the likeliest token
    top_k: torch.Tensor  # int32; 0, or the vocabulary and more: off
    top_p: torch.Tensor  # float32; 1: off
    min_p: torch.Tensor  # float32; 0: off
    presence: torch.Tensor  # float32
    frequency: torch.Tensor  # float32
    repetition: torch.Tensor  # float32; 1: off
    seed: torch.Tensor  # int64
    count_line: torch.Tensor  # int32, of TokenCounts; -1: no penalties
    mask_line: torch.Tensor  # int32, of the grammar masks; -1: every token is allowed
    bias_begin: torch.Tensor  # int32, of LogitBias
    bias_end: torch.Tensor  # int32


class TokenCounts(NamedTuple):
    """What penalised requests have in their text, a vocabulary-wide line each."""

    output: torch.Tensor  # [lines, vocab] int32, occurrences in the output
    prompt: torch.Tensor  # [lines, vocab] bool


class LogitBias(NamedTuple):
    """Entries [m] added to logits. A ban until some position is -inf until that position."""

    token_ids: torch.Tensor  # int32, different ones within a request unless values are -inf
    values: torch.Tensor  # float32
    until: torch.Tensor  # int64: added while the position to be filled is less


class Sampled(NamedTuple):
    """What became of each row."""

    token_ids: torch.Tensor  # [n] int64
    is_finite: torch.Tensor  # [n] bool; False: the logits are broken, the token means nothing

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> Sampled:
        """Room for what is yet to be sampled."""
        return cls(
            torch.empty(num_rows, dtype=torch.int64, device=device),
            torch.empty(num_rows, dtype=torch.bool, device=device),
        )
