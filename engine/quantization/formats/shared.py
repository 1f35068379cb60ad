"""Helpers shared by several formats' readers."""

from __future__ import annotations

import torch

from engine.models.config_reader import ConfigReader

INT32 = (torch.int32,)
UINT8 = (torch.uint8,)
FLOATS = (torch.float16, torch.bfloat16, torch.float32)
FLOAT8 = (torch.float8_e4m3fn,)


def stem_of(name: str) -> str:
    """Return the common prefix of a matrix's tensors: ``X`` of ``X.weight``."""
    return name.removesuffix(".weight")


def group_of(group_size: int | None, inputs: int) -> int:
    """Return the inputs of a group, at most all of them."""
    return inputs if group_size is None else min(group_size, inputs)


def read_group_size(reader: ConfigReader, *keys: str) -> int | None:
    """Return the inputs of a group, from the first of these keys that is present.

    None means all inputs: the value is -1, or no key is present. Raises ModelLoadError.
    """
    for key in keys:
        if key in reader and not reader.has_value(key, -1):
            return reader.count(key)
    return None


def expand_scales(scales: torch.Tensor, outputs: int, block: int = 1) -> torch.Tensor:
    """Expand scales [rows or 1, groups] that ``block`` outputs share to [outputs, groups].

    Raises:
        ValueError: one of them is not a positive number.
    """
    scales = scales.float()
    if not bool(((scales >= 0) & scales.isfinite()).all()):
        raise ValueError("a scale is negative or not finite")
    if scales.shape[0] == 1:
        return scales.repeat(outputs, 1)
    return scales.repeat_interleave(block, 0)[:outputs]


def check_float8(codes: torch.Tensor) -> None:
    """Raise ValueError if a code is not a number."""
    if bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        raise ValueError("a code is not a number")
