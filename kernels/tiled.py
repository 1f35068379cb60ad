"""Weights in codes as the kernels of a GPU read them: one matrix, or those of all experts.

    byte j of a block      4 bits: input j | input 16 + j << 4     16 bytes hold 32 inputs
                           8 bits: input j                         16 bytes hold 16 inputs

Neighbouring bytes hold neighbouring inputs in either half, so the activations that belong to the
halves of a block are two runs of memory; and a half of a block is never in two groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch.nn import functional

from kernels.packed import INT4_LEVELS, MXFP4_LEVELS, PackedParts, PackedWeight, widen

BLOCK = 16  # bytes
_PIECE_BYTES = 2**22
_KINDS = {INT4_LEVELS: "int4", MXFP4_LEVELS: "e2m1"}


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """One matrix [outputs, inputs] in codes, or several of one form, one after the other.

    Attributes:
        codes: [matrices * outputs, bytes] uint8, whole blocks.
        scales: [matrices * outputs, groups]: float32 where an output has one; else float16, or
            uint8 exponents, less 127, where all are powers of two.
        factor: what float16 scales are multiplied by besides, so that none is out of range.
        zeros: as the scales, float16 or integers, in units of levels; None: all 0.
        levels: [16] float32, what 4-bit codes stand for; None with 8 bits.
        orders: [matrices, inputs] int32, which input each column of the codes belongs to; None:
            its own.
        kind: what a code is, ``int8``, ``e4m3``, ``int4``, ``e2m1``, or another of 4 bits that only
            the ``table`` of its levels tells.
        inputs: columns of a matrix.
        group: neighbouring codes that share a scale.
        num_matrices: one, or the experts.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    factor: float
    zeros: torch.Tensor | None
    levels: torch.Tensor | None
    orders: torch.Tensor | None
    kind: str
    inputs: int
    group: int
    num_matrices: int = 1

    @property
    def outputs(self) -> int:
        """Rows of a matrix."""
        return self.codes.shape[0] // self.num_matrices

    @property
    def num_groups(self) -> int:
        """Groups of an output."""
        return self.scales.shape[1]

    @property
    def codes_a_byte(self) -> int:
        """One or two."""
        return 1 if self.kind in ("int8", "e4m3") else 2

    @property
    def nbytes(self) -> int:
        """What it takes in memory."""
        tensors = (self.codes, self.scales, self.zeros, self.levels, self.orders)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def rows(self, ids: torch.Tensor, dtype: torch.dtype, matrix: int = 0) -> torch.Tensor:
        """Rows [n] of all matrices in ``dtype``, [n, inputs], their inputs in the order of
        ``matrix``. Nothing comes from the host: a CUDA graph can have captured it."""
        codes = self.codes[ids]
        if self.codes_a_byte == 2:
            pairs = _interleave(codes)
            codes = torch.stack((pairs & 15, pairs >> 4), dim=2).flatten(1)
        else:
            codes = codes.view(torch.int8 if self.kind == "int8" else torch.float8_e4m3fn)
        scales = self.scales[ids]
        if scales.dtype == torch.uint8:
            scales = (scales.int() << 23).view(torch.float32)
        zeros = None if self.zeros is None else self.zeros[ids]
        values = widen(codes[:, : self.inputs], self.levels, scales, zeros, self.group)
        if self.orders is not None:
            order = self.orders[matrix].long()
            values = torch.empty_like(values).index_copy_(1, order, values)
        return (values * self.factor).to(dtype)

    def matrix(self, index: int, dtype: torch.dtype) -> torch.Tensor:
        """One of the matrices, [outputs, inputs] in ``dtype``."""
        ids = torch.arange(self.outputs, device=self.codes.device) + index * self.outputs
        return self.rows(ids, dtype, index)


def refuse_tiles(weight: PackedWeight) -> str | None:
    """Why a weight cannot be held so, or None when it can."""
    if weight.num_groups > 1 and weight.group % BLOCK:
        return f"groups of {weight.group} inputs"
    return None


def tile(weight: PackedWeight) -> TiledWeight:
    """A weight that ``refuse_tiles`` has nothing against.

    Scales of groups and zeros that are no integers are rounded to float16: 2 ** -12 of each, less
    than what widened weights are rounded by.
    """
    orders = None if weight.order is None else weight.order[None].to(torch.int32)
    return _tile(weight, 1, orders)


def tile_experts(parts: PackedParts, count: int) -> TiledWeight:
    """The weights of ``count`` experts, one after the other in ``parts``.

    Raises:
        ValueError: they cannot be held so; why.
    """
    joined = parts.joined()
    if len(joined) > 1:  # of one form but for the order of their inputs, perhaps
        joined = tuple(_only(share) for share in parts.split(count))
    weights = [part for part in joined if isinstance(part, PackedWeight)]
    if len(weights) < len(joined):
        raise ValueError("parts of experts that are not in the same codes")
    reason = refuse_tiles(weights[0])
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


def _only(share: PackedParts) -> PackedWeight | torch.Tensor | None:
    """What an expert's parts are together; None: no one weight."""
    joined = share.joined()
    return joined[0] if len(joined) == 1 else None


def _tile(weight: PackedWeight, count: int, orders: torch.Tensor | None) -> TiledWeight:
    factor, scales = 1.0, weight.scales.float()
    if weight.num_groups > 1:
        factor, scales = _short_scales(scales)
    zeros = weight.zeros
    if zeros is not None and zeros.is_floating_point():
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
        weight.group,
        count,
    )


def _short_scales(scales: torch.Tensor) -> tuple[float, torch.Tensor]:
    """Scales in 8 or 16 bits, and what those in 16 are to be multiplied by."""
    mantissas, exponents = torch.frexp(scales)
    if bool((mantissas == 0.5).all()) and bool((exponents > -126).all()):
        return 1.0, (exponents + 126).to(torch.uint8)
    largest = int(torch.where(scales == 0, -126, exponents).max())
    return 2.0**largest, torch.ldexp(scales, torch.tensor(-largest)).to(torch.float16)


def _tile_codes(weight: PackedWeight) -> torch.Tensor:
    codes = weight.codes.view(torch.uint8)
    width = -(-codes.shape[1] // BLOCK) * BLOCK
    if weight.bits == 8 and width == codes.shape[1]:
        return codes.contiguous()
    tiled = torch.empty((codes.shape[0], width), dtype=torch.uint8, device=codes.device)
    for rows in _pieces(*tiled.shape):
        piece = functional.pad(codes[rows], (0, width - codes.shape[1]))
        tiled[rows] = piece if weight.bits == 8 else _deinterleave(piece)
    return tiled


def _deinterleave(codes: torch.Tensor) -> torch.Tensor:
    """[n, bytes]: from two neighbours in a byte to those that are 16 apart."""
    first, second = codes.unflatten(1, (-1, 2, BLOCK // 2)).unbind(2)
    even, odd = first & 15 | second << 4, first >> 4 | second & 0xF0
    return torch.stack((even, odd), dim=3).flatten(1)


def _interleave(codes: torch.Tensor) -> torch.Tensor:
    """The other way round."""
    even, odd = codes.unflatten(1, (-1, BLOCK // 2, 2)).unbind(3)
    return torch.stack((even & 15 | odd << 4, even >> 4 | odd & 0xF0), dim=2).flatten(1)


def _pieces(rows: int, width: int) -> Iterator[slice]:
    """Runs of rows whose copies are small."""
    step = max(1, _PIECE_BYTES // max(width, 1))
    for begin in range(0, rows, step):
        yield slice(begin, begin + step)
