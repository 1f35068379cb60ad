"""Which experts a token goes to, and how much each of them counts."""

from __future__ import annotations

import torch
from torch.nn import functional

from engine.models.modules import RouterWeights
from engine.models.spec import MoeSpec

# What the sum of a token's weights is divided by is never zero (DeepSeek-V3).
_LEAST_SUM = 1e-20


class Router:
    """The ``top_k`` experts of the highest scores.

    Args:
        spec: how they are scored, grouped and weighed.
        weights: of the layer.
    """

    def __init__(self, spec: MoeSpec, weights: RouterWeights) -> None:
        self._spec = spec
        self._weights = weights

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """From [n, hidden_size] to experts [n, top_k] int64 and their weights [n, top_k] float32,
        the first in no order."""
        spec, (weight, bias, correction) = self._spec, self._weights
        said = functional.linear(x.to(weight.dtype), weight, bias).float()
        scores = said.softmax(dim=-1) if spec.scoring == "softmax" else said.sigmoid()
        chosen_by = scores if correction is None else scores + correction
        if spec.num_groups > 1:
            chosen_by = self._within_groups(chosen_by)
        ids = chosen_by.topk(spec.top_k, dim=-1).indices
        shares = scores.gather(-1, ids)
        if spec.normalised:
            shares = shares / (shares.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return ids, shares if spec.scale == 1.0 else shares * spec.scale

    def _within_groups(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores, those outside a token's best groups at -inf."""
        spec = self._spec
        grouped = scores.unflatten(-1, (spec.num_groups, -1))
        of_groups = grouped.topk(spec.group_best, dim=-1).values.sum(dim=-1)
        best = of_groups.topk(spec.top_groups, dim=-1).indices
        is_out = torch.ones_like(of_groups, dtype=torch.bool).scatter_(-1, best, False)
        return grouped.masked_fill(is_out.unsqueeze(-1), float("-inf")).flatten(-2)
