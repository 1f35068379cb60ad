"""Unpack ggml's blocks of quantised weights into codes and scales.

A row is a sequence of blocks; a block begins or ends with its scale, and holds its codes in ggml's
bit order (``ggml-common.h``, ``ggml-quants.c``). Nothing is rounded: every code keeps its value.
Only in blocks with a minimum in addition to a scale, the minimum is divided by the scale, in
float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, PackedWeight, pack_nibbles

# The values of IQ4_NL and IQ4_XS codes.
_IQ4_LEVELS = (
    *(-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0),
    *(1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0),
)
_LEAST_STEPS = 2.0**15
_MIDDLE = 8  # INT4_LEVELS[_MIDDLE] is 0


class _Codes(NamedTuple):
    """Unpacked rows [n], with one code per element."""

    codes: torch.Tensor  # [n, inputs] int8, or uint8 of 4 bits
    scales: torch.Tensor  # [n, groups]
    minimums: torch.Tensor | None = None  # [n, groups] float32, the value of code 0


class BlockFormat(NamedTuple):
    """How the blocks of a tensor type are unpacked, and how they map to a PackedWeight."""

    read: Callable[[torch.Tensor], _Codes]  # of [n, blocks, bytes of a block] uint8
    group: int
    levels: tuple[float, ...] | None = None


def unpack_rows(kind: BlockFormat, raw: torch.Tensor, block_bytes: int) -> PackedWeight:
    """Unpack rows of blocks into a weight.

    Args:
        kind: from :data:`FORMATS`.
        raw: [outputs, bytes of a row] uint8.
        block_bytes: of a block.
    """
    codes, scales, least = kind.read(raw.view(raw.shape[0], -1, block_bytes))
    zeros = None
    if least is not None:
        # A block of equal values has no scale: the scale becomes its minimum, and every code 1. The
        # same applies if the steps vanish beside the minimum, which keeps zeros within float16's
        # range, the kernels' dtype for them.
        flat = scales.abs() * _LEAST_STEPS < least.abs()
        codes = torch.where(flat.repeat_interleave(kind.group, 1), codes.new_ones(()), codes)
        scales = torch.where(flat, least, scales)
        steps = torch.where(scales == 0, 1.0, scales)
        zeros = torch.where(flat, 0.0, -least / steps)
        if kind.levels is not None:
            zeros -= _MIDDLE
    inputs = codes.shape[1]
    if kind.levels is not None:
        codes = pack_nibbles(codes)
    return PackedWeight(codes, scales, inputs, kind.group, kind.levels, zeros)


# ---------------------------------------------------------------- blocks of 32


def _q4_0(blocks: torch.Tensor) -> _Codes:
    return _Codes(_nibbles(blocks[:, :, 2:]), _half(blocks, 0))


def _q4_1(blocks: torch.Tensor) -> _Codes:
    return _Codes(_nibbles(blocks[:, :, 4:]), _half(blocks, 0).float(), _half(blocks, 2).float())


def _q5_0(blocks: torch.Tensor) -> _Codes:
    codes = _nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks[:, :, 2:6]) << 4
    return _Codes(codes.to(torch.int8) - 16, _half(blocks, 0))


def _q5_1(blocks: torch.Tensor) -> _Codes:
    codes = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks[:, :, 4:8]) << 4
    scales, least = _half(blocks, 0).float(), _half(blocks, 2).float()
    return _Codes(codes.to(torch.int8), scales, least)


def _q8_0(blocks: torch.Tensor) -> _Codes:
    return _Codes(blocks[:, :, 2:].contiguous().view(torch.int8).flatten(1), _half(blocks, 0))


def _mxfp4(blocks: torch.Tensor) -> _Codes:
    exponents = blocks[:, :, 0].float() - 127
    return _Codes(_nibbles(blocks[:, :, 1:]), torch.exp2(exponents))


# ---------------------------------------------------------------- blocks of 256


def _q2_k(blocks: torch.Tensor) -> _Codes:
    scales, least = blocks[:, :, :16] & 15, blocks[:, :, :16] >> 4
    codes = _by_bits(blocks[:, :, 16:80], 32, (0, 2, 4, 6)) & 3
    return _Codes(
        codes.flatten(1),
        (_half(blocks, 80).float()[:, :, None] * scales).flatten(1),
        -(_half(blocks, 82).float()[:, :, None] * least).flatten(1),
    )


def _q3_k(blocks: torch.Tensor) -> _Codes:
    high = _by_bits(blocks[:, :, :32], 32, range(8)) & 1
    low = _by_bits(blocks[:, :, 32:96], 32, (0, 2, 4, 6)) & 3
    packed = blocks[:, :, 96:108]
    scales = torch.cat((packed[:, :, :8] & 15, packed[:, :, :8] >> 4), 2)
    scales |= (_by_bits(packed[:, :, 8:], 4, (0, 2, 4, 6)) & 3).flatten(2) << 4
    # -4 to 3, as 4-bit codes whose zero is 8.
    codes = low.flatten(1) + (high.flatten(1) << 2) + 4
    d = _half(blocks, 108).float()[:, :, None]
    return _Codes(codes, (d * (scales.float() - 32)).flatten(1))


def _q4_k(blocks: torch.Tensor) -> _Codes:
    codes = _by_bits(blocks[:, :, 16:], 32, (0, 4)) & 15
    return _Codes(codes.flatten(1), *_scales_of_eight(blocks))


def _q5_k(blocks: torch.Tensor) -> _Codes:
    low = _by_bits(blocks[:, :, 48:], 32, (0, 4)) & 15
    high = _by_bits(blocks[:, :, 16:48], 32, range(8)) & 1
    codes = low.flatten(1) | high.flatten(1) << 4
    return _Codes(codes.to(torch.int8), *_scales_of_eight(blocks))


def _q6_k(blocks: torch.Tensor) -> _Codes:
    low = _by_bits(blocks[:, :, :128], 64, (0, 4)) & 15
    high = _by_bits(blocks[:, :, 128:192], 32, (0, 2, 4, 6)) & 3
    codes = low.flatten(1) | high.flatten(1) << 4
    scales = blocks[:, :, 192:208].contiguous().view(torch.int8)
    d = _half(blocks, 208).float()[:, :, None]
    return _Codes(codes.to(torch.int8) - 32, (d * scales).flatten(1))


def _iq4_xs(blocks: torch.Tensor) -> _Codes:
    high = blocks[:, :, 2:4].contiguous().view(torch.int16).to(torch.int32)
    high = (high >> torch.arange(0, 16, 2, dtype=torch.int32)) & 3
    low = (blocks[:, :, 4:8, None] >> torch.tensor((0, 4), dtype=torch.uint8)).flatten(2) & 15
    d = _half(blocks, 0).float()[:, :, None]
    return _Codes(
        _nibbles(blocks[:, :, 8:].unflatten(2, (8, 16)).flatten(1, 2)),
        (d * (low + (high << 4) - 32)).flatten(1),
    )


def _scales_of_eight(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales and minima of a block's eight groups, of six bits each in 12 bytes."""
    first, second, both = blocks[:, :, 4:16].unflatten(2, (3, 4)).unbind(2)
    scales = torch.cat((first & 63, both & 15 | first >> 2 & 48), 2)
    least = torch.cat((second & 63, both >> 4 | second >> 2 & 48), 2)
    d, d_least = _half(blocks, 0).float(), _half(blocks, 2).float()
    return (d[:, :, None] * scales).flatten(1), -(d_least[:, :, None] * least).flatten(1)


# ---------------------------------------------------------------- bits


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """Read the float16 at an offset of every block: [n, blocks]."""
    return blocks[:, :, at : at + 2].contiguous().view(torch.float16).squeeze(2)


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """[n, blocks, 16] -> [n, inputs]: the low nibbles of a block's bytes, then the high ones."""
    return torch.cat((codes & 15, codes >> 4), 2).flatten(1)


def _fifth_bits(codes: torch.Tensor) -> torch.Tensor:
    """[n, blocks, 4] -> [n, inputs]: one bit for each of a block's 32 weights."""
    bits = codes[:, :, :, None] >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(2).flatten(1)


def _by_bits(codes: torch.Tensor, run: int, shifts: tuple[int, ...] | range) -> torch.Tensor:
    """Shift runs of bytes by each of ``shifts``: [n, blocks, runs, shifts, run].

    The caller masks the remaining higher bits.
    """
    by = torch.tensor(tuple(shifts), dtype=torch.uint8)[:, None]
    return codes.unflatten(2, (-1, 1, run)) >> by


FORMATS: dict[str, BlockFormat] = {
    "Q4_0": BlockFormat(_q4_0, 32, INT4_LEVELS),
    "Q4_1": BlockFormat(_q4_1, 32, INT4_LEVELS),
    "Q5_0": BlockFormat(_q5_0, 32),
    "Q5_1": BlockFormat(_q5_1, 32),
    "Q8_0": BlockFormat(_q8_0, 32),
    "Q2_K": BlockFormat(_q2_k, 16, INT4_LEVELS),
    "Q3_K": BlockFormat(_q3_k, 16, INT4_LEVELS),
    "Q4_K": BlockFormat(_q4_k, 32, INT4_LEVELS),
    "Q5_K": BlockFormat(_q5_k, 32),
    "Q6_K": BlockFormat(_q6_k, 16),
    "IQ4_NL": BlockFormat(_q4_0, 32, _IQ4_LEVELS),
    "IQ4_XS": BlockFormat(_iq4_xs, 32, _IQ4_LEVELS),
    "MXFP4": BlockFormat(_mxfp4, 32, MXFP4_LEVELS),
}
