"""Data types of adapters in a batch: which token has which adapter, and their matrices."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch

from kernels.transfer import to_device


class AdapterWeights(NamedTuple):
    """The adapters of one layer, one per slot; unused ranks are zero."""

    down: torch.Tensor  # [slots, rank, inputs]
    up: torch.Tensor  # [slots, rank, outputs]
    # [slots, rank, 2] int32 on the host: the outputs [begin, end) outside of which a rank's row of
    # ``up`` is zero. A rank covers one part of a fused layer; an unused one covers nothing.
    spans: torch.Tensor


class AdapterRows(NamedTuple):
    """The adapter slots of a step's tokens."""

    slots: torch.Tensor  # [n] int64 on the device; -1: no adapter
    slot_mask: torch.Tensor  # [n, slots, 1] bool: whether this slot is the token's adapter
    order: torch.Tensor  # [m] int64 on the device: the tokens with an adapter, by slot
    groups: np.ndarray  # [groups, 3] int64: a slot, and the range of its tokens in order
    plan: Any = None  # what kernels have derived for all layers; None: nothing


def adapter_rows(slots: np.ndarray, num_slots: int, device: torch.device) -> AdapterRows:
    """Make the rows from each token's slot, [n] int64; -1: no adapter."""
    order, groups = group_by_slot(slots)
    is_own = torch.from_numpy(slots[:, None, None] == np.arange(num_slots)[:, None])
    return AdapterRows(
        to_device(torch.from_numpy(slots), device),
        to_device(is_own, device),
        to_device(torch.from_numpy(order), device),
        groups,
    )


def group_by_slot(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return ``order`` and ``groups`` of ``AdapterRows``, on the host, from each token's slot."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    used, begins, counts = np.unique(slots[order], return_index=True, return_counts=True)
    return order, np.stack((used, begins, begins + counts), axis=1)


def nonzero_spans(up: torch.Tensor) -> torch.Tensor:
    """Return the spans of one slot's ``up`` [rank, outputs]: [rank, 2] int32, on the host."""
    is_used = up != 0
    outputs = up.shape[1]
    begins = is_used.int().argmax(dim=1)
    ends = outputs - is_used.flip(1).int().argmax(dim=1)
    spans = torch.stack((begins, ends), dim=1) * is_used.any(dim=1, keepdim=True)
    return spans.int().cpu()
