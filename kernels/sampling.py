"""Data types of sampling kernels: what a sampling step reads on the device.

A request keeps its *slot* for its lifetime; a step names the slots of its rows. Everything here is
written when a request arrives or leaves, and only read by steps.
"""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingTable(NamedTuple):
    """Sampling parameters by slot, each [slots]."""

    temperature: torch.Tensor  # float32; 0: greedy
    top_k: torch.Tensor  # int32; 0, or at least the vocabulary size: off
    top_p: torch.Tensor  # float32; 1: off
    min_p: torch.Tensor  # float32; 0: off
    presence: torch.Tensor  # float32
    frequency: torch.Tensor  # float32
    repetition: torch.Tensor  # float32; 1: off
    seed: torch.Tensor  # int64
    count_line: torch.Tensor  # int32, line of TokenCounts; -1: no penalties
    mask_line: torch.Tensor  # int32, line of the grammar masks; -1: every token is allowed
    bias_begin: torch.Tensor  # int32, first entry of LogitBias
    bias_end: torch.Tensor  # int32, one past the last


class TokenCounts(NamedTuple):
    """Token counts of requests with penalties, one vocabulary-wide line each."""

    output: torch.Tensor  # [lines, vocab] int32, occurrences in the output
    prompt: torch.Tensor  # [lines, vocab] bool


class LogitBias(NamedTuple):
    """Entries [m] added to logits. A ban up to a position is -inf until that position."""

    token_ids: torch.Tensor  # distinct within a request, unless values are -inf
    values: torch.Tensor  # float32
    until: torch.Tensor  # int64: added while the position to be sampled is less


_ALIGNED = 16  # bytes: kernels are specialised on it


class SamplerOutput(NamedTuple):
    """The results of each row."""

    token_ids: torch.Tensor  # [n] int64
    # [n] bool; False: logits that are broken or overflow, a meaningless token
    is_finite: torch.Tensor

    @classmethod
    def empty(cls, num_rows: int, device: torch.device) -> SamplerOutput:
        """Allocate memory for results, one after the other: they can be copied together."""
        num_bytes = -(-8 * num_rows // _ALIGNED) * _ALIGNED
        both = torch.empty(num_bytes + num_rows, dtype=torch.uint8, device=device)
        token_ids = both[: 8 * num_rows].view(torch.int64)
        return cls(token_ids, both[num_bytes:].view(torch.bool))
