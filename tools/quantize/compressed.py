"""Rounded weights in the compressed-tensors format, which vLLM and transformers read.

    int4, int8   pack-quantized   X.weight_packed int32, X.weight_scale, X.weight_shape
    w8a8         int-quantized    X.weight int8, X.weight_scale
    fp8          float-quantized  X.weight float8_e4m3fn, X.weight_scale

Packed codes are offset by half their range and fill a word from the low bits up. Zero points are
packed in the same way, but along the outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from tools.quantize.grid import Grid, QuantisedWeight
from tools.quantize.recipe import Recipe

_FORMATS = {
    "int4": "pack-quantized",
    "int8": "pack-quantized",
    "w8a8": "int-quantized",
    "fp8": "float-quantized",
}


def tensors_of(module: str, rounded: QuantisedWeight, recipe: Recipe) -> dict[str, torch.Tensor]:
    """The tensors that represent a module's weight, by name."""
    grid = rounded.grid
    scale = rounded.scales.scale.to(grid.scale_dtype).contiguous()
    found = {f"{module}.weight_scale": scale}
    if _FORMATS[recipe.scheme] != "pack-quantized":
        return found | {f"{module}.weight": rounded.codes.contiguous()}
    found[f"{module}.weight_packed"] = pack(rounded.codes, grid.bits)
    found[f"{module}.weight_shape"] = torch.tensor(rounded.codes.shape, dtype=torch.int64)
    zero = rounded.scales.zero
    if zero is not None:
        packed = pack(zero.to(torch.int8).T.contiguous(), grid.bits).T
        found[f"{module}.weight_zero_point"] = packed.contiguous()
    return found


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Codes [n, inputs] int8, ``bits`` 4 or 8 -> [n, ceil(inputs * bits / 32)] int32."""
    times = 32 // bits
    unsigned = codes.to(torch.int32) + (1 << (bits - 1))
    unsigned = functional.pad(unsigned, (0, -codes.shape[1] % times)).unflatten(1, (-1, times))
    packed = torch.zeros(unsigned.shape[:2], dtype=torch.int32)
    for place in range(times):
        packed |= unsigned[..., place] << (bits * place)
    return packed


def quantization_config(recipe: Recipe, grid: Grid, ignored: list[str]) -> dict[str, Any]:
    """The ``quantization_config`` of config.json."""
    weights: dict[str, Any] = {
        "num_bits": grid.bits,
        "type": "float" if grid.is_float else "int",
        "symmetric": grid.symmetric,
        "strategy": "group" if grid.group_size else "channel",
        "group_size": grid.group_size or None,
        "dynamic": False,
    }
    inputs: dict[str, Any] | None = None
    if recipe.quantises_activations:
        inputs = {
            "num_bits": 8,
            "type": weights["type"],
            "symmetric": True,
            "strategy": "token",
            "group_size": None,
            "dynamic": True,
        }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": inputs,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[recipe.scheme],
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ignored,
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
