"""Products of few rows fused with their neighbours in a layer: the reference of a kernel."""

from __future__ import annotations

import torch
from torch.nn import functional

from kernels.reference.fused import gelu_mul
from kernels.reference.layers import rms_norm, silu_mul
from kernels.skinny import GateKind, RowNorm


def skinny_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    norm: RowNorm | None = None,
    gate: GateKind | None = None,
    stream: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
    experts: torch.Tensor | None = None,
) -> torch.Tensor:
    """``gate(norm(x) W^T + b)``, or its addition to a residual stream.

    Computed in float32 and rounded once, except that the gate's inputs are rounded as well.

    Args:
        x: [n, inputs].
        weight: [outputs, inputs]; for a gated product the gate's outputs first, then as many
            others.
        bias: [outputs] or None.
        norm: of ``x``, before the product.
        gate: from [n, outputs] to [n, outputs / 2].
        stream: [n, outputs] in the dtype of x, updated in place; not together with a gate.
        dtype: of the result; None: that of x.
        experts: [n, choices] int64, each token's experts, each of which gives a row of the result,
            of a ``weight`` [experts, outputs, inputs] and a ``bias`` [experts, outputs]; without
            ``stream``.

    Returns:
        [n or n * choices, outputs or outputs / 2], or ``stream``.
    """
    wide = x.float()
    if norm is not None:
        wide = rms_norm(wide, norm.weight.float(), norm.eps)
    weight, bias = weight.float(), None if bias is None else bias.float()
    if experts is None:
        out = functional.linear(wide, weight, bias)
    else:
        out = torch.einsum("ni,ncoi->nco", wide, weight[experts])
        out = (out if bias is None else out + bias[experts]).flatten(0, 1)
    if gate is not None:
        rounded = out.to(x.dtype).float()
        out = silu_mul(rounded) if gate == "silu" else gelu_mul(rounded)
    if stream is not None:
        return stream.copy_(stream.float() + out)
    return out.to(dtype or x.dtype)
