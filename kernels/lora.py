"""The nouns of adapters in a batch: which token has which, and their matrices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class AdapterWeights(NamedTuple):
    """Adapters of one layer, a slot each; unused ranks are zero."""

    down: torch.Tensor  # [slots, rank, inputs]
    up: torch.Tensor  # [outputs, slots, rank]: all slots together are one matrix


class AdapterRows(NamedTuple):
    """The slots of a step's tokens."""

    slots: torch.Tensor  # [n] int64 on the device; -1: no adapter
    is_own: torch.Tensor  # [n, slots, 1] bool: whether a token's adapter is in this slot
    # The same by slot, as the host knows it: (slot, its tokens [m] int64 on the device).
    groups: tuple[tuple[int, torch.Tensor], ...]


def adapter_rows(slots: np.ndarray, num_slots: int, device: torch.device) -> AdapterRows:
    """From the slot of each token, [n] int64, -1 for none, of so many."""
    groups = tuple(
        (int(slot), torch.from_numpy(np.flatnonzero(slots == slot)).to(device))
        for slot in np.unique(slots[slots >= 0])
    )
    is_own = torch.from_numpy(slots[:, None, None] == np.arange(num_slots)[:, None])
    return AdapterRows(torch.from_numpy(slots).to(device), is_own.to(device), groups)
