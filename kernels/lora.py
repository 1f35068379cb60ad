"""The nouns of adapters in a batch: which token has which, and their matrices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from kernels.sending import to_device


class AdapterWeights(NamedTuple):
    """Adapters of one layer, a slot each; unused ranks are zero."""

    down: torch.Tensor  # [slots, rank, inputs]
    up: torch.Tensor  # [slots, rank, outputs]
    # [slots, rank, 2] int32 on the host: the outputs [begin, end) outside of which a rank's row of
    # ``up`` is zero. A rank reaches one part of a fused layer; an unused one reaches nothing.
    spans: torch.Tensor


class AdapterRows(NamedTuple):
    """The slots of a step's tokens."""

    slots: torch.Tensor  # [n] int64 on the device; -1: no adapter
    is_own: torch.Tensor  # [n, slots, 1] bool: whether a token's adapter is in this slot
    order: torch.Tensor  # [m] int64 on the device: the tokens with an adapter, by slot
    groups: np.ndarray  # [groups, 3] int64: a slot, and where its tokens begin and end in order


def adapter_rows(slots: np.ndarray, num_slots: int, device: torch.device) -> AdapterRows:
    """From the slot of each token, [n] int64, -1 for none, of so many."""
    order, groups = by_slot(slots)
    is_own = torch.from_numpy(slots[:, None, None] == np.arange(num_slots)[:, None])
    return AdapterRows(
        to_device(torch.from_numpy(slots), device),
        to_device(is_own, device),
        to_device(torch.from_numpy(order), device),
        groups,
    )


def by_slot(slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``order`` and ``groups`` of ``AdapterRows``, on the host, from the slot of each token."""
    order = np.argsort(slots, kind="stable")[np.count_nonzero(slots < 0) :]
    used, begins, counts = np.unique(slots[order], return_index=True, return_counts=True)
    return order, np.stack((used, begins, begins + counts), axis=1)


def reached(up: torch.Tensor) -> torch.Tensor:
    """The spans of one slot's ``up`` [rank, outputs]: [rank, 2] int32, on the host."""
    is_used = up != 0
    outputs = up.shape[1]
    begins = is_used.int().argmax(dim=1)
    ends = outputs - is_used.flip(1).int().argmax(dim=1)
    spans = torch.stack((begins, ends), dim=1) * is_used.any(dim=1, keepdim=True)
    return spans.int().cpu()
