"""Attention without a cache in which every query attends to all keys, as in encoders.

This is torch's, except on a CPU with native kernels. These read keys in blocks of a cache, and
contiguous keys are a single block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch.nn import functional

from kernels.attention import (
    AttentionBackend,
    AttentionSpec,
    BatchGeometry,
    LayerAttention,
    LayerCache,
)


def attend(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float | None = None
) -> torch.Tensor:
    """``softmax(q k^T * scale) v``, separately for each window.

    Args:
        query: [windows, queries, heads, head_dim].
        keys, values: [windows, heads, length, head_dim], contiguous.
        scale: of the scores; None: ``head_dim ** -0.5``.

    Returns:
        [windows, queries, heads, head_dim] in the query's dtype, contiguous.
    """
    if query.device.type == "cpu":
        num_windows, num_queries, num_heads, head_dim = query.shape
        length = keys.shape[2]
        spec = AttentionSpec(
            *(num_heads, num_heads, head_dim, length, query.dtype, query.device),
            is_bidirectional=True,
        )
        backend = _native_backend(spec)
        # A single query is summed in a different order than one of several.
        if backend is not None and num_queries > 1:
            geometry = BatchGeometry.of(
                np.arange(num_windows + 1) * num_queries,
                np.full(num_windows, length),
                np.arange(num_windows)[:, None],
                query.device,
                query_ends=np.full(num_windows * num_queries, length),
            )
            layer = LayerAttention(
                head_dim**-0.5 if scale is None else scale, is_bidirectional=True
            )
            state = backend.plan(geometry, spec)
            found = backend.forward(state, layer, query.flatten(0, 1), LayerCache(keys, values))
            return found.view(query.shape)
    found = functional.scaled_dot_product_attention(
        query.transpose(1, 2), keys, values, scale=scale
    )
    return found.transpose(1, 2).contiguous()


def _native_backend(spec: AttentionSpec) -> AttentionBackend | None:
    """Return the native kernels, if they support this."""
    from kernels.cpu.backend import CpuAttention
    from kernels.cpu.native import build

    backend = CpuAttention()
    return backend if backend.refuse(spec) is None and build.load() is not None else None
