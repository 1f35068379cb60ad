"""A whole sampling step by ``native/sampling.cpp``."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.bindings import COUNT, POINTER, function
from kernels.sampling import LogitBias, SamplerOutput, SamplingTable, TokenCounts


class _Sampling(ctypes.Structure):
    """``Sampling`` of native/sampling.cpp: the addresses of all tensors."""

    _fields_ = (
        *((name, POINTER) for name in SamplingTable._fields),
        *((name, POINTER) for name in TokenCounts._fields),
        *((f"bias_{name}", POINTER) for name in LogitBias._fields),
        ("masks", POINTER),
        ("vocab", COUNT),
    )


def sample(
    logits: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
    masks: torch.Tensor | None = None,
    out: SamplerOutput | None = None,
) -> SamplerOutput:
    """See ``kernels.reference.sampling_step``."""
    (num_rows, vocab), logits = logits.shape, logits.float()
    sampling = _sampling(vocab, table, counts, bias, masks)
    if out is None:
        out = SamplerOutput.empty(num_rows, logits.device)
    function("quire_sample")(
        ctypes.byref(sampling),
        logits.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        num_rows,
        out.token_ids.data_ptr(),
        out.is_finite.data_ptr(),
    )
    return out


def candidates(
    logits: torch.Tensor,
    at: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    table: SamplingTable,
    count: int,
    counts: TokenCounts | None = None,
    bias: LogitBias | None = None,
) -> torch.Tensor:
    """See ``kernels.reference.sampling_step``."""
    sampling = _sampling(logits.shape[1], table, counts, bias, None)
    token_ids = torch.empty(at.numel(), count, dtype=torch.int64)
    function("quire_candidates")(
        ctypes.byref(sampling),
        logits.data_ptr(),
        at.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        at.numel(),
        count,
        token_ids.data_ptr(),
    )
    return token_ids


def _sampling(
    vocab: int,
    table: SamplingTable,
    counts: TokenCounts | None,
    bias: LogitBias | None,
    masks: torch.Tensor | None,
) -> _Sampling:
    tensors = (*table, *(counts or (None, None)), *(bias or (None, None, None)), masks)
    return _Sampling(*(None if each is None else each.data_ptr() for each in tensors), vocab)
