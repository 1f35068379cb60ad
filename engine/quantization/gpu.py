"""Packed weights in the Triton kernels of a GPU."""

from __future__ import annotations

from typing import Unpack

import torch

from engine.quantization.skinny import FusedOps, SmallBatchLinear
from kernels.packed import PackedWeight
from kernels.scaled import scaled_linear, scaled_unsupported_reason
from kernels.tiled import tile
from kernels.triton.quantised import packed_linear
from kernels.triton.scaled import quantise_rows
from kernels.triton.skinny_packed import skinny_packed_linear


class TritonPacked(SmallBatchLinear):
    """A packed weight that is widened for the product.

    With ``in_float8``, all but few rows are rounded to float8 and multiplied as codes, if the
    format rounds activations and the weight has only a scale for each output.
    """

    def __init__(
        self,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        *,
        in_float8: bool = False,
    ) -> None:
        is_meant = in_float8 and weight.has_quantised_activations
        self._is_scaled = is_meant and _float8_unsupported_reason(weight, dtype) is None
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
        if self._is_scaled:
            codes = self._weight.codes.view(torch.float8_e4m3fn)
            return scaled_linear(x, codes, self._weight.scales, self._bias, quantise_rows)
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


def _float8_unsupported_reason(weight: PackedWeight, dtype: torch.dtype) -> str | None:
    """Return why products with a weight cannot be computed in float8, or None if they can."""
    if weight.codes.dtype != torch.float8_e4m3fn:
        return f"its codes are {weight.codes.dtype}"
    if weight.num_groups > 1 or weight.zeros is not None or weight.order is not None:
        return "it has more than a scale for each output"
    return scaled_unsupported_reason(*weight.shape, dtype, weight.codes.device)
