"""The experts of a layer, as grouped matrix products read them."""

from __future__ import annotations

from typing import NamedTuple

import torch


class ExpertTensors(NamedTuple):
    """Gated MLPs of one shape, ``down(activate(gate_up(x)))``; the gate comes before up."""

    gate_up: torch.Tensor  # [experts, 2 * inner, hidden]
    down: torch.Tensor  # [experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None  # [experts, hidden]
