"""The norms of a decoder, bound to the kernels that compute them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from engine.models.linear import Linear
from engine.models.peers import Peers
from engine.models.spec import NormSpec
from kernels.operations import Operations
from kernels.reference.layers import layer_norm

LayerNormOperation = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor | None, float], torch.Tensor
]


class NormGate(NamedTuple):
    """What makes the gates of a norm's output."""

    down: Linear  # from the norm's output, to few dimensions
    up: Linear

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        return self.down.num_bytes + self.up.num_bytes


class NormWeights(NamedTuple):
    """The loaded weights of a norm."""

    weight: torch.Tensor  # [dim]
    bias: torch.Tensor | None = None
    gate: NormGate | None = None  # of its output

    @property
    def num_bytes(self) -> int:
        """Their size in memory."""
        parts = (self.bias.nbytes if self.bias is not None else 0, self.weight.nbytes)
        return sum(parts) + (0 if self.gate is None else self.gate.num_bytes)


class Norm(Protocol):
    """A norm over the last dimension; [n, dim] -> [n, dim] in the same dtype."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the norm of ``x``."""
        ...

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """``residual += x``, in place; return the norm of the sum."""
        ...


class RmsNorm:
    """``x / sqrt(mean(x^2) + eps) * weight`` (Zhang & Sennrich 2019)."""

    __slots__ = ("_add_norm", "_eps", "_norm", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float, operations: Operations) -> None:
        self._weight = weight
        self._eps = eps
        self._norm = operations.rms_norm
        self._add_norm = operations.add_rms_norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        return self._norm(x, self._weight, self._eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        return self._add_norm(x, residual, self._weight, self._eps)


class LayerNorm:
    """``(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`` (Ba et al. 2016)."""

    __slots__ = ("_bias", "_eps", "_norm", "_weight")

    def __init__(
        self, weights: NormWeights, eps: float, norm: LayerNormOperation = layer_norm
    ) -> None:
        self._weight, self._bias = weights.weight, weights.bias
        self._eps = eps
        self._norm = norm

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        return self._norm(x, self._weight, self._bias, self._eps)

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        residual += x
        return self(residual)


class GatedNorm:
    """``y * sigmoid(up(silu(down(y))))``, y being the norm of x (A.X K2)."""

    __slots__ = ("_gate", "_norm", "_operations")

    def __init__(self, norm: Norm, gate: NormGate, operations: Operations) -> None:
        self._norm, self._gate, self._operations = norm, gate, operations

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        return self._gated(self._norm(x))

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """See ``Norm``."""
        return self._gated(self._norm.add_norm(x, residual))

    def _gated(self, normed: torch.Tensor) -> torch.Tensor:
        inner = self._operations.activate(self._gate.down(normed), "silu")
        return self._operations.apply_gate(normed, self._gate.up(inner), "sigmoid")


class IdentityNorm:
    """Stands in for a norm that a model lacks."""

    __slots__ = ()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` itself."""
        return x

    def add_norm(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """Return ``residual`` after adding ``x`` to it."""
        residual += x
        return residual


class ShardedRmsNorm:
    """An RMS norm over values that are sharded over ranks in equal parts.

    Args:
        weight: [dim] of this rank.
        eps: added to the mean square.
        peers: the ranks.
    """

    __slots__ = ("_eps", "_peers", "_weight")

    def __init__(self, weight: torch.Tensor, eps: float, peers: Peers) -> None:
        self._weight, self._eps, self._peers = weight, eps, peers

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, dim] -> [n, dim].

        Parts that several ranks hold are counted several times: if all are, the mean is the same.
        """
        wide = x.float()
        squares = self._peers.all_reduce(wide.square().sum(-1, keepdim=True))
        inverse = squares.div_(x.shape[-1] * self._peers.size).add_(self._eps).rsqrt_()
        return (wide * inverse).mul_(self._weight).to(x.dtype)


def bind_norm(spec: NormSpec, weights: NormWeights, operations: Operations) -> Norm:
    """Make the norm that ``spec`` describes, computed by ``operations`` where they have it."""
    norm: Norm = (
        RmsNorm(weights.weight, spec.eps, operations)
        if spec.kind == "rms"
        else LayerNorm(weights, spec.eps, operations.layer_norm)
    )
    return norm if weights.gate is None else GatedNorm(norm, weights.gate, operations)
