"""Packed weights in the Triton kernels of a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Unpack

import torch

from engine.quantization.skinny import FusedOps, SmallBatchLinear
from kernels.packed import PackedWeight
from kernels.scaled import MAX_UNROUNDED_ROWS, scaled_linear, scaled_unsupported_reason
from kernels.tiled import tile
from kernels.triton.quantised import packed_linear
from kernels.triton.scaled import SCALED_KERNELS
from kernels.triton.skinny_packed import skinny_packed_linear


class TritonPacked(SmallBatchLinear):
    """A packed weight that is widened for the product.

    All but few rows are rounded as well and multiplied as codes, if the format rounds activations,
    the weight has only a scale for each output, and ``refuse_scaled`` returns None for the dtype of
    its codes, instead of a reason.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        refuse_scaled: Callable[[torch.dtype], str | None],
    ) -> None:
        is_meant = weight.has_quantised_activations and _has_scales_of_outputs(weight)
        codes, shape, device = weight.codes.dtype, weight.shape, weight.codes.device
        self._multiplied_as: torch.dtype | None = None
        if is_meant and scaled_unsupported_reason(codes, *shape, dtype, device) is None:
            self._multiplied_as = codes if refuse_scaled(codes) is None else None
        self._weight = tile(weight)
        self._bias = bias
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def forward_small(self, x: torch.Tensor, **fused_ops: Unpack[FusedOps]) -> torch.Tensor:
        """See ``SmallBatchLinear``."""
        return skinny_packed_linear(x, self._weight, self._bias, **fused_ops)

    def forward_large(self, x: torch.Tensor) -> torch.Tensor:
        """See ``SmallBatchLinear``."""
        if self._multiplied_as is not None and x.shape[0] > MAX_UNROUNDED_ROWS:
            codes = self._weight.codes.view(self._multiplied_as)
            return scaled_linear(x, codes, self._weight.scales, self._bias, SCALED_KERNELS)
        return packed_linear(x, self._weight, self._bias)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._weight.rows(ids, self._dtype)


class InvariantPacked:
    """The same with batch-invariant products: a row has the same bits in any batch."""

    def __init__(self, weight: PackedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        self._weight = tile(weight)
        self._bias = bias
        self._dtype = dtype

    @property
    def num_bytes(self) -> int:
        """See ``Linear``."""
        return self._weight.nbytes + (0 if self._bias is None else self._bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return packed_linear(x, self._weight, self._bias, invariant=True)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self._weight.rows(ids, self._dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Head``."""
        return self(x)


def _has_scales_of_outputs(weight: PackedWeight) -> bool:
    """Return whether a weight is only a code times its output's scale."""
    return weight.num_groups == 1 and weight.zeros is None and weight.order is None
