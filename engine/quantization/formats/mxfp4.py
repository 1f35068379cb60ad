"""MXFP4 checkpoints (OCP Microscaling Formats 1.0), such as GPT-OSS.

    X_blocks [experts, outputs, inputs / 32, 16] uint8   two codes a byte, the first in the low half
    X_scales [experts, outputs, inputs / 32] uint8       exponent of a power of two, plus 127

A code is a float with a sign, two exponent bits and one mantissa bit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from engine.models.config_reader import ConfigReader
from engine.models.packed_tensors import ExpectedTensor, Recipe
from engine.models.safetensors import TensorEntry
from engine.quantization.formats.shared import UINT8
from kernels.packed import MXFP4_LEVELS, PackedWeight

GROUP = 32
_NOT_A_NUMBER = 255


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """See ``engine.models.packed_tensors.QuantFormat``."""

    name = "MXFP4"

    def recipe(
        self, name: str, shape: tuple[int, int], present: Mapping[str, TensorEntry]
    ) -> Recipe | None:
        """See ``QuantFormat``: matrices with blocks are quantised."""
        blocks = present.get(f"{name}_blocks")
        if blocks is None:
            return None
        experts = blocks.shape[0] if blocks.shape and blocks.shape[0] else 1
        outputs, groups = shape[0] // experts, -(-shape[1] // GROUP)
        tensors = {
            "codes": ExpectedTensor(
                f"{name}_blocks", (experts, outputs, groups, GROUP // 2), UINT8
            ),
            "exponents": ExpectedTensor(f"{name}_scales", (experts, outputs, groups), UINT8),
        }
        return Recipe(tensors, lambda read: _make(shape, read))


def read_mxfp4(reader: ConfigReader) -> Mxfp4:
    """Read a ``quantization_config`` of MXFP4. Raises ModelLoadError."""
    for key in ("quant_method", "modules_to_not_convert", "dequantize"):
        reader.ignore(key)
    return Mxfp4()


def powers_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return the values of uint8 scales, in float32.

    Raises:
        ValueError: one of them is not a number.
    """
    if bool((exponents == _NOT_A_NUMBER).any()):
        raise ValueError("a scale is not a number")
    return torch.ldexp(torch.ones(exponents.shape), exponents.int() - 127)


def _make(shape: tuple[int, int], tensors: Mapping[str, torch.Tensor]) -> PackedWeight:
    outputs, inputs = shape
    codes = tensors["codes"].reshape(outputs, -1)
    scales = powers_of_two(tensors["exponents"]).reshape(outputs, -1)
    if codes.shape[1] * 2 != inputs:
        raise ValueError(f"{inputs} inputs are not a multiple of {GROUP}")
    return PackedWeight(codes, scales, inputs, GROUP, MXFP4_LEVELS)
