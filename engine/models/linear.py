"""Linear layers behind a protocol, so that quantisation and adapters are other implementations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch.nn import functional

from kernels.moe import ExpertMatrices, GatedActivation
from kernels.packed import PackedParts
from kernels.sampling import SamplerOutput
from kernels.skinny import RowNorm

Weight = torch.Tensor | PackedParts  # [outputs, inputs], dense or as a format has it


def permute_outputs(weight: Weight, order: torch.Tensor) -> Weight:
    """Return the weight with its outputs reordered.

    ``order`` [outputs] int64 is the source of each output; a source may occur several times. A
    tensor that keeps its number of outputs keeps its memory.
    """
    if isinstance(weight, torch.Tensor):
        ordered = weight[order.to(weight.device)]
        return weight.copy_(ordered) if ordered.shape == weight.shape else ordered
    return weight.select(order)


class Linear(Protocol):
    """``x W^T + b``: [n, inputs] -> [n, outputs]."""

    @property
    def num_bytes(self) -> int:
        """The layer's size in memory."""
        ...

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to a batch of rows."""
        ...


class Head(Linear, Protocol):
    """The layer that makes logits, and with tied embeddings also their table."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of the weight: ids [n] -> [n, inputs], in the model's dtype."""
        ...

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """[n, inputs] -> [n, outputs], in float32 where that costs nothing, else in x's dtype."""
        ...


@runtime_checkable
class GreedyHead(Head, Protocol):
    """A head that can find the likeliest token without computing all logits."""

    def sample_greedy(
        self, x: torch.Tensor, scale: float = 1.0, cap: float | None = None
    ) -> SamplerOutput:
        """Sample each row [n, inputs] at temperature 0.

        Its ``logits`` are multiplied by ``scale`` above 0, and then capped if there is a cap.
        """
        ...


@runtime_checkable
class GatedLinear(Linear, Protocol):
    """A linear layer that can gate its outputs in the same kernel."""

    def forward_gated(self, x: torch.Tensor, gating: GatedActivation) -> torch.Tensor:
        """Return ``gating(self(x))``, bit for bit: [n, inputs] -> [n, outputs / 2]."""
        ...


@runtime_checkable
class FusedLinear(GatedLinear, Protocol):
    """A linear layer that can fuse its neighbours in the model, for up to ``MAX_SKINNY_ROWS``
    rows."""

    @property
    def max_fused_rows(self) -> int:
        """Up to how many rows that is faster than one after the other."""
        ...

    def forward_normed(
        self, x: torch.Tensor, norm: RowNorm, gating: GatedActivation | None = None
    ) -> torch.Tensor:
        """Apply the layer to the norm of ``x``, and gate it: [n, inputs] -> [n, outputs (/ 2)]."""
        ...

    def add_to(self, stream: torch.Tensor, x: torch.Tensor) -> None:
        """``stream += self(x)``, in place and rounded once: [n, outputs], [n, inputs]."""
        ...


class PerHeadLinear(Protocol):
    """A product for each head with its own weight."""

    @property
    def num_bytes(self) -> int:
        """The weights' size in memory."""
        ...

    def __call__(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """[n, heads, inputs + keep] -> [n, heads, outputs + keep]; each head's last ``keep``
        values are copied."""
        ...


class LinearMethod(Protocol):
    """How linear layers are held and computed; chosen once, at load."""

    def make(self, weight: Weight, bias: torch.Tensor | None) -> Linear:
        """Make a layer from a loaded weight [outputs, inputs], which it may repack and free."""
        ...

    def make_unquantized(self, weight: torch.Tensor) -> Linear:
        """Make a layer from a weight [outputs, inputs] that is never quantised."""
        ...

    def make_head(self, weight: Weight) -> Head:
        """Make the head from its weight [vocab_size, hidden_size], or an embedding table."""
        ...

    def make_per_head(self, weight: torch.Tensor) -> PerHeadLinear:
        """Make per-head layers from weights [heads, outputs, inputs] that are never quantised."""
        ...

    def make_experts(self, weight: Weight, count: int) -> ExpertMatrices:
        """Make the weights of ``count`` experts, [count * outputs, inputs], for a grouped
        product."""
        ...


class DenseLinearMethod(Protocol):
    """How linear layers with dense weights are held and computed."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """Make a layer from a weight [outputs, inputs], which it may repack and free."""
        ...

    def make_head(self, weight: torch.Tensor) -> Head:
        """Make the head from its weight [vocab_size, hidden_size]."""
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


class BiasedHead:
    """A head with a bias, which finds the likeliest token by all logits only.

    Args:
        head: without it.
        bias: [vocab_size], in the model's dtype.
    """

    def __init__(self, head: Head, bias: torch.Tensor) -> None:
        self._head, self._bias = head, bias

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._head.num_bytes + self._bias.nbytes

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return self._head(x) + self._bias

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._head.rows(ids)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._head.logits(x) + self._bias


class UnquantizedLinearMethod:
    """Unquantised weights."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return DenseLinear(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return DenseLinear(weight, None)


@dataclass(frozen=True, slots=True)
class DensePerHeadLinear:
    """See ``PerHeadLinear``.

    Attributes:
        weight: [heads, outputs, inputs].
        product: as ``kernels.reference.matmul.invariant_heads``.
    """

    weight: torch.Tensor
    product: Callable[[torch.Tensor, torch.Tensor, int], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        """See ``PerHeadLinear``."""
        return self.weight.nbytes

    def __call__(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """See ``PerHeadLinear``."""
        return self.product(x, self.weight, keep)


class JoinedLinear:
    """Layers with the same input; their outputs are concatenated."""

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
    """Unquantised weights with batch-invariant products: a row has the same bits in any batch.

    Args:
        product: of x [n, inputs], a weight [outputs, inputs] and a bias [outputs] or None.
        product_for: returns a layer's own product, for its weight and bias; default ``product``.
    """

    def __init__(
        self,
        product: Product,
        product_for: Callable[[torch.Tensor, torch.Tensor | None], Product] | None = None,
    ) -> None:
        self._product, self._product_for = product, product_for

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        choose = self._product_for
        product = self._product if choose is None else choose(weight, bias)
        return _InvariantLinear(weight, bias, product)

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
