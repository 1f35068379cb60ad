"""Statistics of a linear layer's inputs: their second moments, and their magnitudes.

For a change ``D`` of a weight, the mean squared change of the layer's output over inputs x is
``tr(D H D^T)`` with ``H = mean(x x^T)``. So one [inputs, inputs] matrix is enough to compute the
error of any rounding, however many inputs were seen.
"""

from __future__ import annotations

import torch

from engine.models.linear import Linear


class InputStats:
    """Running statistics of a layer's inputs."""

    def __init__(self, inputs: int, device: torch.device) -> None:
        self._sum = torch.zeros(inputs, inputs, device=device)
        self._magnitude = torch.zeros(inputs, device=device)
        self.count = 0

    def add(self, x: torch.Tensor) -> None:
        """Add rows [n, inputs]."""
        x = x.float()
        self._sum.addmm_(x.T, x)
        self._magnitude += x.abs().sum(0)
        self.count += x.shape[0]

    @property
    def hessian(self) -> torch.Tensor:
        """``mean(x x^T)``, [inputs, inputs] float32; the unit matrix before any input."""
        if not self.count:
            return torch.eye(self._sum.shape[0], device=self._sum.device)
        return self._sum / self.count

    @property
    def magnitude(self) -> torch.Tensor:
        """``mean(|x|)``, [inputs] float32; ones before any input."""
        return self._magnitude / self.count if self.count else torch.ones_like(self._magnitude)

    def scale(self, factor: torch.Tensor) -> None:
        """Adjust the statistics as if every input had been multiplied by ``factor`` [inputs]."""
        self._sum *= factor
        self._sum *= factor.unsqueeze(1)
        self._magnitude *= factor


class ObservedLinear:
    """A linear layer that collects statistics of its inputs. Satisfies ``Linear``."""

    def __init__(self, layer: Linear, stats: InputStats) -> None:
        self._layer = layer
        self._stats = stats

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._layer.num_bytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        self._stats.add(x)
        return self._layer(x)


def squared_output(change: torch.Tensor, hessian: torch.Tensor) -> float:
    """``tr(D H D^T)`` of ``change`` [outputs, inputs]: the mean squared length of ``D x``."""
    return float(((change @ hessian) * change).sum(dtype=torch.float64))


def output_error(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    """The mean squared error of a layer's output, as a share of its mean square."""
    whole = squared_output(weight, hessian)
    return squared_output(weight - rounded, hessian) / whole if whole else 0.0
