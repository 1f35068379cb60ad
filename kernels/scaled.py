"""Products of eight-bit codes: activations are rounded row by row, and the device multiplies codes.

    y[m, n] = sum_k x8[m, k] * w8[n, k] * x_scale[m] * w_scale[n]

This is dynamic scaling of activations, in float8 (Micikevicius et al. 2022, FP8 Formats for Deep
Learning) or int8 (the vector-wise scales of LLM.int8, Dettmers et al. 2022), with twice the speed
of bfloat16 where multiplying takes longer than reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

LARGEST_CODES = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # by the codes' dtype
MIN_SCALE = 2.0**-40
# Products of so few rows are bound by reading codes, which widening in registers does not delay.
MAX_UNROUNDED_ROWS = 32
_MULTIPLE = 16  # of inputs and outputs, required by the library
_MAX_SUMS_BYTES = 128 << 20  # of a part of the rows


class ScaledKernels(NamedTuple):
    """What surrounds the product itself."""

    round_rows: Callable[[torch.Tensor, torch.dtype], tuple[torch.Tensor, torch.Tensor]]
    rescale: Callable[
        [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor], None
    ]


def scaled_unsupported_reason(
    codes: torch.dtype, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> str | None:
    """Return why a product of this shape with such codes is not supported, or None if it is."""
    if codes not in LARGEST_CODES:
        return f"its codes are {codes}"
    if outputs % _MULTIPLE or inputs % _MULTIPLE:
        return f"{outputs} outputs of {inputs} inputs are not multiples of {_MULTIPLE}"
    if codes == torch.int8:
        return None
    if dtype != torch.bfloat16:
        return f"the product is made in bfloat16, not in {dtype}"
    if device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0):
        return "scales by row need a GPU of compute capability 9.0"
    return None


def quantise_rows(x: torch.Tensor, codes: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Round [n, inputs] to float8_e4m3fn or int8, to nearest.

    The scale of each row, [n, 1] float32, brings its largest magnitude to the largest code.
    """
    largest, values = LARGEST_CODES[codes], x.float()
    scales = (values.abs().amax(1, keepdim=True) / largest).clamp_(min=MIN_SCALE)
    values = (values / scales).clamp_(-largest, largest)
    return (values.round_() if codes == torch.int8 else values).to(codes), scales


def rescale(
    sums: torch.Tensor,
    steps: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    output: torch.Tensor,
) -> None:
    """Write int32 ``sums`` [n, outputs] * ``steps`` [n, 1] * ``scales`` [outputs, 1] + ``bias``."""
    values = sums.float() * steps * scales.T
    output.copy_(values if bias is None else values + bias.float())


_REFERENCE = ScaledKernels(quantise_rows, rescale)


def scaled_linear(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    kernels: ScaledKernels = _REFERENCE,
) -> torch.Tensor:
    """A linear layer.

    Args:
        x: [n, inputs], rounded here; n over ``MAX_UNROUNDED_ROWS``. Float8 takes bfloat16 only.
        codes: [outputs, inputs] float8_e4m3fn or int8, contiguous.
        scales: [outputs, 1] float32.
        bias: [outputs] in the dtype of x, or None.
        kernels: of a device.

    Returns:
        [n, outputs] in the dtype of x.
    """
    rounded, steps = kernels.round_rows(x, codes.dtype)
    if codes.dtype != torch.int8:
        return torch._scaled_mm(  # pyright: ignore[reportPrivateImportUsage]
            rounded, codes.T, steps, scales.T.contiguous(), bias=bias, out_dtype=x.dtype
        )
    num_rows, outputs = x.shape[0], codes.shape[0]
    output = torch.empty((num_rows, outputs), dtype=x.dtype, device=x.device)
    # In equal parts: the library does not take few rows.
    num_parts = -(-num_rows * outputs * 4 // _MAX_SUMS_BYTES)
    parts = (each.tensor_split(num_parts) for each in (rounded, steps, output))
    for own, own_steps, target in zip(*parts, strict=True):
        sums = torch._int_mm(own, codes.T)  # pyright: ignore[reportPrivateImportUsage]
        kernels.rescale(sums, own_steps, scales, bias, target)
    return output
