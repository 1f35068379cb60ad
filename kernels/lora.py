"""The nouns of adapters in a batch: which token has which, and their matrices."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch


class AdapterWeights(NamedTuple):
    """Adapters of one layer, a slot each; unused ranks are zero."""

    down: torch.Tensor  # [slots, rank, inputs]
    up: torch.Tensor  # [slots, outputs, rank]


class AdapterRows(NamedTuple):
    """The slots of a step's tokens."""

    slots: torch.Tensor  # [n] int64 on the device; -1: no adapter
    # The same by slot, as the host knows it: (slot, its tokens [m] int64 on the device).
    groups: tuple[tuple[int, torch.Tensor], ...]


def adapter_rows(slots: np.ndarray, device: torch.device) -> AdapterRows:
    """From the slot of each token, [n] int64, -1 for none."""
    groups = tuple(
        (int(slot), torch.from_numpy(np.flatnonzero(slots == slot)).to(device))
        for slot in np.unique(slots[slots >= 0])
    )
    return AdapterRows(torch.from_numpy(slots).to(device), groups)
