"""The linear methods of a CPU: native panels, and fallbacks where these are not available."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.config import Quantization
from engine.models.linear import DenseLinear, Head, Linear
from kernels.cpu.linear import PanelDense, PanelInt4, PanelInt8
from kernels.cpu.screened import ScreenedHead

# The number of rows for which oneDNN lays out its weights; typical for decoding.
_PACKED_FOR_ROWS = 16
_SCREENED_WEIGHTS = 2**19  # minimum size of a head; a smaller one's codes save little


@dataclass(frozen=True, slots=True)
class PanelMethod:
    """Weights in the native kernels' panel layout."""

    layer: Callable[[torch.Tensor, torch.Tensor | None], Linear]
    head: Callable[[torch.Tensor, torch.Tensor | None], Head]

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return self.layer(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return self.head(weight, None)


def panel_method(quantization: Quantization | None) -> PanelMethod:
    """Return the native method. The head of an int4 model is int8, because it decides between
    tokens and is the embedding table if the two are tied."""
    if quantization is None:
        return PanelMethod(PanelDense, _dense_head)
    return PanelMethod(PanelInt8 if quantization == "int8" else PanelInt4, PanelInt8)


def _dense_head(weight: torch.Tensor, bias: torch.Tensor | None) -> Head:
    is_large = bias is None and weight.numel() >= _SCREENED_WEIGHTS
    return ScreenedHead(weight) if is_large else PanelDense(weight, bias)


def onednn_packs_bfloat16() -> bool:
    """Return whether this processor has what oneDNN needs for its layouts of bfloat16 weights."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class OneDnnLinear:
    """A bfloat16 weight in oneDNN's own layout, which would otherwise be made for each product."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.num_bytes = weight.nbytes
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``Linear``."""
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class OneDnnMethod:
    """Unquantised bfloat16 weights; the head, maybe an embedding table too, is not repacked."""

    def make(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
        """See ``LinearMethod``."""
        return OneDnnLinear(weight, bias)

    def make_head(self, weight: torch.Tensor) -> Head:
        """See ``LinearMethod``."""
        return DenseLinear(weight, None)
