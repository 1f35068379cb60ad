"""Keys and values as codes of eight bits: half of the KV cache's bytes, and of what decode reads.

    scale = max |row| / peak        one float32 for a token's key and one for its value, per KV head
    code  = round(row / scale)      int8: to integers up to 127; fp8: to float8_e4m3fn up to 448

A row is rounded when it is stored, from itself alone. So nothing is calibrated beforehand, and what
a token's key becomes depends neither on its neighbours nor on the order in which tokens come: a
prompt in chunks, a prefix from the cache and a sequence that was preempted give the same codes. One
scale for a whole block would save ``4 / head_dim`` of the bytes (3 % at 128), and would have to
round earlier tokens again, with a loss, whenever a later one of their block is larger. One for a
whole layer, as checkpoints bring them (``k_scale``), cuts off what is larger than its calibration
saw, and rounds small rows by the step of the largest. An error is at most 1/254 of a row's largest
value in int8. In fp8 it is at most 1/16 of a value itself, or 1/2^19 of the row's largest.
"""

from __future__ import annotations

import torch

from kernels.attention import LayerCache

PEAKS = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}  # the largest code of each dtype

# A row without a value above this is stored as zeros: the inverse of its scale would be infinite.
SMALLEST = 1e-30


def encode(rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of rows; ``code * scale`` is the row but for rounding.

    A row with an infinite value or nan has a scale that is no number, and reads as such.

    Args:
        rows: [..., head_dim] in any float dtype.
        dtype: one of ``PEAKS``.

    Returns:
        [..., head_dim] in ``dtype``, rounded to nearest, ties to even; [...] float32.
    """
    wide = rows if rows.dtype == torch.float64 else rows.float()
    largest = wide.abs().amax(dim=-1)
    # Not ``PEAKS[dtype] / largest``, for which torch rounds a reciprocal and then the product.
    inverse = torch.where(largest > SMALLEST, largest.new_tensor(PEAKS[dtype]) / largest, 0.0)
    scaled = (wide * inverse.unsqueeze(-1)).nan_to_num(0.0)
    if dtype == torch.int8:
        scaled = scaled.round()
    scales = torch.where(largest.isfinite(), largest / PEAKS[dtype], torch.nan)
    return scaled.to(dtype), scales.float()


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The rows that codes stand for: [..., head_dim] and [...] -> [..., head_dim] float32."""
    return codes.float() * scales.unsqueeze(-1)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every operation takes: torch moves no float8 by index."""
    return tensor.view(torch.uint8) if tensor.dtype in PEAKS else tensor


def contents(cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of all blocks, whatever they are stored as; codes give float32."""
    if cache.key_scales is None or cache.value_scales is None:
        return cache.keys, cache.values
    return decode(cache.keys, cache.key_scales), decode(cache.values, cache.value_scales)
