"""A whole sampling step by ``native/sampling.cpp``."""

from __future__ import annotations

import ctypes

import torch

from kernels.cpu.calls import COUNT, POINTER, function
from kernels.sampling import LogitBias, Sampled, SamplingTable, TokenCounts


class _Sampling(ctypes.Structure):
    """``Sampling`` of native/sampling.cpp: the tensors of the nouns, one after the other."""

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
) -> Sampled:
    """See ``kernels.reference.sampling_step``."""
    num_rows, vocab = logits.shape
    tensors = (*table, *(counts or (None, None)), *(bias or (None, None, None)), masks)
    sampling = _Sampling(*(None if each is None else each.data_ptr() for each in tensors), vocab)
    token_ids = torch.empty(num_rows, dtype=torch.int64)
    is_finite = torch.empty(num_rows, dtype=torch.bool)
    function("quire_sample")(
        ctypes.byref(sampling),
        logits.data_ptr(),
        slots.data_ptr(),
        positions.data_ptr(),
        num_rows,
        token_ids.data_ptr(),
        is_finite.data_ptr(),
    )
    return Sampled(token_ids, is_finite)
