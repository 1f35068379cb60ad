"""Latent attention without attention itself: cache writes, and per-head products."""

from __future__ import annotations

import ctypes

import torch

from kernels.attention import LayerCache
from kernels.cpu.bindings import DTYPE_CODES, function
from kernels.cpu.experts import make_projection
from kernels.cpu.linear import PanelDense
from kernels.reference import fused as reference


def latent_rope_store(
    query: torch.Tensor,
    latent: torch.Tensor,
    norm_weight: torch.Tensor,
    eps: float,
    rotation: tuple[torch.Tensor, torch.Tensor],
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> None:
    """See ``kernels.reference.fused``."""
    if not query.is_contiguous() or latent.stride(1) != 1:
        reference.latent_rope_store(query, latent, norm_weight, eps, rotation, cache, slot_mapping)
        return
    num_tokens, num_heads, width = query.shape
    rank = norm_weight.shape[0]
    cos, sin = rotation
    function("quire_latent_rope_store")(
        *(DTYPE_CODES[query.dtype], query.data_ptr(), latent.data_ptr(), latent.stride(0)),
        *(norm_weight.data_ptr(), eps, cos.data_ptr(), sin.data_ptr(), slot_mapping.data_ptr()),
        *(num_tokens, num_heads, rank, (width - rank) // 2),
        cache.keys.data_ptr(),
    )


class PanelHeads:
    """A product for each head with its own weight, in bfloat16 panels.

    Args:
        weight: [heads, outputs, inputs].
    """

    def __init__(self, weight: torch.Tensor) -> None:
        self._heads = [PanelDense(own, None) for own in weight]
        self._projection, self._keepalive = make_projection([head.panels() for head in self._heads])
        self._inputs, self._outputs = weight.shape[2], weight.shape[1]

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        return sum(head.num_bytes for head in self._heads)

    def __call__(self, x: torch.Tensor, keep: int = 0) -> torch.Tensor:
        """[n, heads, inputs + keep] bfloat16 -> [n, heads, outputs + keep].

        A head's values are contiguous, and its last ``keep`` ones are copied.
        """
        num_tokens, num_heads, width = x.shape
        assert width == self._inputs + keep
        assert x.dtype is torch.bfloat16
        if x.stride(2) != 1:
            x = x.contiguous()
        out = torch.empty((num_tokens, num_heads, self._outputs + keep), dtype=x.dtype)
        function("quire_panel_heads")(
            ctypes.byref(self._projection),
            *(x.data_ptr(), x.stride(0), x.stride(1), num_tokens, num_heads, keep),
            out.data_ptr(),
        )
        return out
