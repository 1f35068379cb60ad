"""KV cache compression to eight bits: half the bytes of the cache, and of what decoding reads.

    scale = max |row| / peak        one float32 for a token's key and one for its value, per KV head
    code  = round(row / scale)      int8: to integers up to 127; fp8: to float8_e4m3fn up to 448

A row is rounded when it is stored, independently of all others. Nothing is calibrated, and a
token's codes depend neither on its neighbours nor on the order of computation: a chunked prompt, a
cached prefix and a preempted sequence give the same codes.

A scale per block would save ``4 / head_dim`` of the bytes (3 % at 128), but earlier tokens would
have to be rounded again, with a loss, whenever a later one in their block is larger. A scale per
layer, as in checkpoints (``k_scale``), clips what exceeds its calibration, and rounds small rows by
the step of the largest. In int8 an error is at most 1/254 of a row's largest value. In fp8 it is at
most 1/16 of the value itself, or 1/2^19 of the row's largest.
"""

from __future__ import annotations

import torch

from kernels.attention import LayerCache

MAX_CODES = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code of each dtype

# Rows without a larger value are stored as zeros: the inverse of their scale would be infinite.
MIN_ROW_MAX = 1e-30


def encode(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return codes and scales of rows; ``code * scale`` is the row up to rounding.

    A row with an infinity or nan has a scale that is not a number, and decodes to nan.

    Args:
        rows: [..., head_dim] in any float dtype.
        dtype: one of ``MAX_CODES``.

    Returns:
        [..., head_dim] in ``dtype``, rounded to nearest, ties to even; [...] float32.
    """
    wide = rows if rows.dtype == torch.float64 else rows.float()
    largest = wide.abs().amax(dim=-1)
    # Not ``MAX_CODES[dtype] / largest``: for a Python scalar torch rounds the reciprocal as well.
    inverse = torch.where(
        largest > MIN_ROW_MAX, largest.new_tensor(MAX_CODES[dtype]) / largest, 0.0
    )
    scaled = (wide * inverse.unsqueeze(-1)).nan_to_num(0.0)
    if dtype == torch.int8:
        scaled = scaled.round()
    scales = torch.where(largest.isfinite(), largest / MAX_CODES[dtype], torch.nan)
    return scaled.to(dtype), scales.float()


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Decode rows: [..., head_dim] and [...] -> [..., head_dim] float32."""
    return codes.float() * scales.unsqueeze(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View memory in a dtype that every operation supports: torch does not index float8."""
    return tensor.view(torch.uint8) if tensor.dtype in MAX_CODES else tensor


def decode_cache(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of all blocks; codes are decoded to float32."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys, cache.values
    return decode(cache.keys, cache.key_scales), decode(cache.values, cache.value_scales)
