"""Quantised weights in the layout of GPU kernels: one matrix, or those of all experts.

    byte j of a block      4 bits: input j | input 16 + j << 4     16 bytes hold 32 inputs
                           8 bits: input j                         16 bytes hold 16 inputs

Adjacent bytes hold adjacent inputs in both halves, so the activations for each half of a block are
contiguous; and no half of a block spans two groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, PackedParts, PackedWeight, dequantise_codes

BLOCK = 16  # bytes
# Weights that are widened in memory for a product take at most this at a time, or one matrix.
MAX_WIDENED_BYTES = 512 << 20
_PIECE_BYTES = 2**22
# Larger ones, which 4-bit codes hardly have, are held as fractions: kernels take whole zeros, and
# what they add to levels (``codes.py``), for exact in bfloat16.
_MOST_WHOLE_ZERO = 120
_KINDS = {INT4_LEVELS: "int4", MXFP4_LEVELS: "e2m1"}


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """One matrix [outputs, inputs] in codes, or several of the same form, concatenated.

    Attributes:
        codes: [matrices * outputs, bytes] uint8, whole blocks.
        scales: [matrices * outputs, groups]: float32 if there is one per output; else float16, or
            uint8 exponents, plus 127, if all are powers of two.
        factor: an additional factor of float16 scales, which keeps them in range.
        zeros: like the scales, float16 or integers up to 120, in units of levels; None: all 0.
        levels: [16] float32, the values of 4-bit codes; None with 8 bits.
        orders: [matrices, inputs] int32, the input of each column of the codes; None: its own.
        kind: the meaning of a code: ``int8``, ``e4m3``, ``int4``, ``e2m1``, or ``table`` for other
            4-bit codes, given by their levels.
        inputs: columns of a matrix.
        group_size: consecutive codes that share a scale.
        num_matrices: one, or the number of experts.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    factor: float
    zeros: torch.Tensor | None
    levels: torch.Tensor | None
    orders: torch.Tensor | None
    kind: str
    inputs: int
    group_size: int
    num_matrices: int = 1

    @property
    def outputs(self) -> int:
        """Rows of a matrix."""
        return self.codes.shape[0] // self.num_matrices

    @property
    def num_groups(self) -> int:
        """Groups per output."""
        return self.scales.shape[1]

    @property
    def codes_per_byte(self) -> int:
        """Codes per byte: one or two."""
        return 1 if self.kind in ("int8", "e4m3") else 2

    @property
    def nbytes(self) -> int:
        """Its size in memory."""
        tensors = (self.codes, self.scales, self.zeros, self.levels, self.orders)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype, matrix: int = 0) -> torch.Tensor:
        """Return rows [n] of all matrices in ``dtype``, [n, inputs], with inputs in the order of
        ``matrix``.

        Nothing comes from the host, so a CUDA graph can capture it.
        """
        codes = self.codes[ids]
        if self.codes_per_byte == 2:
            pairs = _interleave(codes)
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
        else:
            codes = codes.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn)
        scales = self.scales[ids]
        if scales.dtype == torch.uint8:
            scales = (scales.int() << 23).view(torch.float32)
        zeros = None if self.zeros is None else self.zeros[ids]
        values = dequantise_codes(
            codes[:, : self.inputs], self.levels, scales, zeros, self.group_size
        )
        if self.orders is not None:
            order = self.orders[matrix].long()
            values = torch.empty_like(values).index_copy_(1, order, values)
        return (values * self.factor).to(dtype)

    def matrix(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """Return one of the matrices, [outputs, inputs] in ``dtype``."""
        ids = torch.arange(self.outputs, device=self.codes.device) + index * self.outputs
        return self.rows(ids, dtype, index)


def tiling_unsupported_reason(weight: PackedWeight) -> str | None:
    """Return why a weight cannot be held this way, or None if it can."""
    if weight.num_groups > 1 and weight.group_size % BLOCK:
        return f"groups of {weight.group_size} inputs"
    return None


def tile(weight: PackedWeight) -> TiledWeight:
    """Convert a weight that ``tiling_unsupported_reason`` accepts.

    Group scales and fractional zeros are rounded to float16: a relative error of 2 ** -12, less
    than that of widened weights.
    """
    orders = None if weight.order is None else weight.order[None].to(torch.int32)
    return _tile(weight, 1, orders)


def tile_experts(parts: PackedParts, count: int) -> TiledWeight:
    """Convert the weights of ``count`` experts, concatenated in ``parts``.

    Raises:
        ValueError: they cannot be held this way; gives the reason.
    """
    joined = parts.joined()
    if len(joined) > 1:  # possibly equal except for the order of inputs
        joined = tuple(_single_part(share) for share in parts.split(count))
    weights = [part for part in joined if isinstance(part, PackedWeight)]
    if len(weights) < len(joined):
        raise ValueError("parts of experts that are not in the same codes")
    reason = tiling_unsupported_reason(weights[0])
    if reason is not None:
        raise ValueError(reason)
    inputs, orders = weights[0].inputs, None
    if any(weight.order is not None for weight in weights):
        own = torch.arange(inputs, device=weights[0].codes.device)
        orders = torch.stack([own if w.order is None else w.order for w in weights])
        orders = orders.to(torch.int32).expand(count, -1).contiguous()
    (whole, *others) = PackedParts(tuple(weight.without_order() for weight in weights)).joined()
    if others or not isinstance(whole, PackedWeight):
        raise ValueError("experts in different codes")
    return _tile(whole, count, orders)


def _single_part(share: PackedParts) -> PackedWeight | torch.Tensor | None:
    """Return an expert's parts as one weight; None if they are not one."""
    joined = share.joined()
    return joined[0] if len(joined) == 1 else None


def _tile(weight: PackedWeight, count: int, orders: torch.Tensor | None) -> TiledWeight:
    factor, scales = 1.0, weight.scales.float()
    if weight.num_groups > 1:
        factor, scales = _compress_scales(scales)
    zeros = weight.zeros
    if zeros is not None and (zeros.is_floating_point() or int(zeros.max()) > _MOST_WHOLE_ZERO):
        zeros = zeros.to(torch.float16)
    kind, levels = "int8" if weight.codes.dtype == torch.int8 else "e4m3", None
    if weight.levels is not None:
        kind = _KINDS.get(weight.levels, "table")
        levels = torch.tensor(weight.levels, device=weight.codes.device)
    return TiledWeight(
        _tile_codes(weight),
        scales.contiguous(),
        factor,
        None if zeros is None else zeros.contiguous(),
        levels,
        orders,
        kind,
        weight.inputs,
        weight.group_size,
        count,
    )


def _compress_scales(scales: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Return the scales in 8 or 16 bits, and the factor of 16-bit ones."""
    mantissas, exponents = torch.frexp(scales)
    if bool((mantissas == 0.5).all()) and bool((exponents > -126).all()):
        return 1.0, (exponents + 126).to(torch.uint8)
    largest = int(torch.where(scales == 0, -126, exponents).max())
    shift = torch.tensor(-largest, device=scales.device)
    return 2.0**largest, torch.ldexp(scales, shift).to(torch.float16)


def _tile_codes(weight: PackedWeight) -> torch.Tensor:
    codes = weight.codes.view(torch.uint8)
    width = -(-codes.shape[1] // BLOCK) * BLOCK
    if weight.bits == 8 and width == codes.shape[1]:
        return codes.contiguous()
    tiled = torch.empty((codes.shape[0], width), dtype=torch.uint8, device=codes.device)
    for rows in _row_ranges(*tiled.shape):
        piece = functional.pad(codes[rows], (0, width - codes.shape[1]))
        tiled[rows] = piece if weight.bits == 8 else _deinterleave(piece)
    return tiled


def _deinterleave(codes: torch.Tensor) -> torch.Tensor:
    """[n, bytes]: from adjacent codes in a byte to codes that are 16 apart."""
    first, second = codes.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.stack((even, odd), dim=3).flatten(1)


def _interleave(codes: torch.Tensor) -> torch.Tensor:
    """The inverse of ``_deinterleave``."""
    even, odd = codes.unflatten(1, (-1, BLOCK // 2, 2)).unbind(3)
    return torch.stack((even & 15 | odd << 4, even >> 4 | odd & 0xF0), dim=2).flatten(1)


def _row_ranges(rows: int, width: int) -> Iterator[slice]:
    """Yield ranges of rows whose copies are small."""
    step = max(1, _PIECE_BYTES // max(width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, begin + step)
