"""float8 products: activations are rounded row by row, and the device multiplies codes.

    y[m, n] = sum_k x8[m, k] * w8[n, k] * x_scale[m] * w_scale[n]

This is the dynamic activation scaling of FP8 formats (Micikevicius et al. 2022, FP8 Formats for
Deep Learning), with twice the speed of bfloat16 where multiplying takes longer than reading.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FP8_MAX = 448.0  # finite value of e4m3
MIN_SCALE = 2.0**-40
_MULTIPLE = 16  # of inputs and outputs, required by the library


def scaled_unsupported_reason(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a product of this shape is not supported, or None if it is."""
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return f"{outputs} outputs of {inputs} inputs are not multiples of {_MULTIPLE}"
    if dtype != torch.bfloat16:
        return f"the product is made in bfloat16, not in {dtype}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "scales by row need a GPU of compute capability 9.0"
    return None


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [n, inputs] to float8_e4m3fn.

    The scale of each row, [n, 1] float32, brings its largest magnitude to 448.
    """
    values = x.float()
    scales = (values.abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=MIN_SCALE)
    return (values / scales).clamp_(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn), scales


def scaled_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    round_rows: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]] = quantise_rows,
) -> torch.Tensor:
    """A linear layer.

    Args:
        x: [n, inputs] bfloat16, rounded here.
        codes: [outputs, inputs] float8_e4m3fn, contiguous.
        scales: [outputs, 1] float32.
        bias: [outputs] bfloat16, or None.
        round_rows: ``quantise_rows``, or a kernel that does the same.

    Returns:
        [n, outputs] bfloat16.
    """
    rounded, steps = round_rows(x)
    return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
        rounded, codes.T, steps, scales.T.contiguous(), bias=bias, out_dtype=x.dtype
    )
