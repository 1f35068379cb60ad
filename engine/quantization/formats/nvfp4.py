"""NVFP4: 4-bit floats whose scales are float8 in groups of 16, with a factor for the whole matrix.

Two codes a byte and their levels are as in MXFP4. Activations are not rounded here, even if the
checkpoint's were: GPUs without products of 4-bit floats widen the weights instead.
"""

from __future__ import annotations

import torch

from engine.models.packed_tensors import ExpectedTensor
from engine.quantization.formats.shared import FLOAT8, UINT8, expand_scales
from kernels.packed import MXFP4_LEVELS, PackedWeight

GROUP = 16


def nvfp4_tensors(codes: str, scales: str, shape: tuple[int, int]) -> dict[str, ExpectedTensor]:
    """Return what a matrix [outputs, inputs] has, besides its factor, under these names."""
    outputs, inputs = shape
    return {
        "codes": ExpectedTensor(codes, (outputs, -(-inputs // 2)), UINT8),
        "scales": ExpectedTensor(scales, (outputs, -(-inputs // GROUP)), FLOAT8),
    }


def make_nvfp4(codes: torch.Tensor, scales: torch.Tensor, inputs: int) -> PackedWeight:
    """Make the weight; ``scales`` have the matrix's factor.

    Raises:
        ValueError: a scale is negative or not finite.
    """
    scales = expand_scales(scales, scales.shape[0])
    return PackedWeight(codes, scales, inputs, GROUP, MXFP4_LEVELS)
