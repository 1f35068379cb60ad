"""A linear layer behind a protocol, so that quantisation and adapters come as other methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from kernels.moe import ExpertMatrices, Gating
from kernels.packed import PackedParts
from kernels.sampling import Sampled
from kernels.skinny import RowNorm

Weight = torch.Tensor | PackedParts  # [outputs, inputs], dense or as a format has it


def in_order(weight: Weight, order: torch.Tensor) -> Weight:
    """The weight with its outputs in another order: [outputs] int64, the one that comes to each
    place; some may come to several. A tensor of as many outputs as before keeps its memory."""
    if isinstance(weight, torch.Tensor):
        ordered = weight[order.to(weight.device)]
        return weight.copy_(ordered) if ordered.shape == weight.shape else ordered
    return weight.select(order)


class Linear(Protocol):
    """``x W^T + b``: [n, inputs] -> [n, outputs]."""

    @property
    def num_bytes(self) -> int:
        """What the layer takes in memory."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply to a batch of rows."""
        ...


class Head(Linear, Protocol):
    """The layer that makes logits; where embeddings are tied to it, it is their table too."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight: ids [n] -> [n, inputs], in the model's dtype."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """The product: [n, inputs] -> [n, outputs]; unrounded in float32 where that is free, else
        in x's dtype."""
        ...


@runtime_checkable
class GreedyHead(Head, Protocol):
    """One that can tell the likeliest token without making all logits."""

    def likeliest(self, x: torch.Tensor, scale: float = 1.0, cap: float | None = None) -> Sampled:
        """Of each row [n, inputs], as sampling at temperature 0 chooses from its ``logits``, times
        ``scale`` above 0, and then capped where there is a cap."""
        ...


@runtime_checkable
class GatedLinear(Linear, Protocol):
    """One that can gate its outputs while it makes them."""

    def gated(self, x: torch.Tensor, gating: Gating) -> torch.Tensor:
        """``gating(self(x))``, to the last bit: [n, inputs] -> [n, outputs / 2]."""
        ...


@runtime_checkable
class FusedLinear(GatedLinear, Protocol):
    """One that can take along what stands around it in a layer, for up to ``MOST_ROWS`` rows."""

    def normed(self, x: torch.Tensor, norm: RowNorm, gating: Gating | None = None) -> torch.Tensor:
        """The layer of the norm of ``x``, and its gate: [n, inputs] -> [n, outputs (/ 2)]."""
        ...

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """``stream += self(x)``, in place and rounded once: [n, outputs], [n, inputs]."""
        ...


class HeadProducts(Protocol):
    """A product of each head with a weight of its own."""

    @property
    def num_bytes(self) -> int:
        """What the weights take in memory."""
        ...

    def __call__(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """[n, heads, inputs + keep] -> [n, heads, outputs + keep], the last ``keep`` values of a
        head as they were."""
        ...


class LinearMethod(Protocol):
    """How linear layers are held and computed; chosen once, at load."""

    def make(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """A layer from a loaded weight [outputs, inputs], which it may repack and let go."""
        ...

    def make_plain(self, weight: torch.Tensor) -> Linear:
        """A layer from a weight [outputs, inputs] that is not rounded, whatever others are."""
        ...

    def make_head(self, weight: Weight) -> Head:
        """The head from its weight [vocab_size, hidden_size], or a table of embeddings."""
        ...

    def make_heads(self, weight: torch.Tensor) -> HeadProducts:
        """Layers of heads from their weights, [heads, outputs, inputs], that are not rounded."""
        ...

    def make_experts(self, weight: Weight, count: int) -> ExpertMatrices:
        """The weights of ``count`` experts, [count * outputs, inputs], for one grouped product."""
        ...


class DenseForm(Protocol):
    """How linear layers that come as dense tensors are held and computed."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """A layer from a weight [outputs, inputs], which it may repack and let go."""
        ...

    def make_head(self, weight: torch.Tensor) -> Head:
        """The head from its weight [vocab_size, hidden_size]."""
        ...


class DenseLinear:
    """The weight as it is, in the model's dtype."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return functional.linear(x, self.weight, self.bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return functional.embedding(ids, self.weight)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self(x)


class DenseMethod:
    """Unquantised weights."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return DenseLinear(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return DenseLinear(weight, None)


@dataclass(frozen=True, slots=True)
class DenseHeads:
    """See ``HeadProducts``.

    Attributes:
        weight: [heads, outputs, inputs].
        product: as ``kernels.reference.matmul.invariant_heads``.
    """

    weight: torch.Tensor
    product: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """See ``HeadProducts``."""
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """See ``HeadProducts``."""
        return self.product(x, self.weight, keep)


class JoinedLinear:
    """Layers that read the same inputs; their outputs lie one after the other."""

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._layers = tuple(layers)

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return sum(layer.num_bytes for layer in self._layers)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return torch.cat([layer(x) for layer in self._layers], dim=1)


Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]


class InvariantMethod:
    """Unquantised weights, whose products have the same bits for a row in any batch.

    Args:
        product: of x [n, inputs], a weight [outputs, inputs] and a bias [outputs] or None.
    """

    def __init__(self, product: Product) -> None:
        self._product = product

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return _InvariantLinear(weight, bias, self._product)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return _InvariantLinear(weight, None, self._product)


class _InvariantLinear(DenseLinear):
    __slots__ = ("_product",)

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, product: Product) -> None:
        super().__init__(weight, bias)
        self._product = product

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._product(x, self.weight, self.bias)
