"""The experts of a layer, as grouped matrix products read them."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.tiled import TiledWeight

ExpertMatrices = torch.Tensor | TiledWeight  # [experts, outputs, inputs]


class ExpertTensors(NamedTuple):
    """Gated MLPs of one shape, ``down(activate(gate_up(x)))``; the gate comes before up."""

    gate_up: ExpertMatrices  # [experts, 2 * inner, hidden]
    down: ExpertMatrices  # [experts, hidden, inner]
    gate_up_bias: torch.Tensor | None = None  # [experts, 2 * inner]
    down_bias: torch.Tensor | None = None  # [experts, hidden]

    @property
    def num_experts(self) -> int:
        """How many there are."""
        part = self.gate_up
        return part.num_matrices if isinstance(part, TiledWeight) else part.shape[0]
