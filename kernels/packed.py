"""A quantised weight matrix, independent of its source: codes, scales, and the codes' levels.

    weight[n, order[k]] = (level(codes[n, k]) - zeros[n, k // group]) * scales[n, k // group]

Every file format is converted to this (``engine/quantization/formats``, GGUF, quantisation at
load), and every linear method starts from it, so neither side depends on the other. ``dequantise``
is the reference that kernels are tested against.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

# The values of 4-bit codes, in units of their group's scale.
INT4_LEVELS = tuple(float(code - 8) for code in range(16))
# Sixteen quantiles of a normal distribution, one of them zero (Dettmers et al. 2023, QLoRA,
# appendix E).
NF4_LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
# Floats with a sign, two exponent bits and one mantissa bit (OCP Microscaling Formats 1.0, 5.3.3).
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_LEVELS = (*_E2M1, *(-value for value in _E2M1))

_PIECE_ELEMENTS = 2**20


@dataclass(frozen=True, slots=True, eq=False)
class PackedWeight:
    """A weight [outputs, inputs] in 4 or 8 bits; formats with fewer bits are widened to 4.

    Attributes:
        codes: 8 bits: [outputs, inputs] int8 or float8_e4m3fn, each code its own level. 4 bits:
            [outputs, ceil(inputs / 2)] uint8, an even input in the low half of a byte and the next
            one in the high half.
        scales: [outputs, groups], of any float dtype. A scale per output is one group; a scale for
            the tensor is expanded; the rows of scales for blocks of outputs are repeated.
        inputs: columns of the weight.
        group_size: consecutive codes that share a scale; the last group may be shorter.
        levels: the values of the sixteen 4-bit codes; None with 8 bits.
        zeros: [outputs, groups], of any dtype, in units of levels; None: all 0.
        order: [inputs] int64, the input of each column of the codes; None: its own. This makes
            groups contiguous that were formed in another order of the inputs (act-order).
        has_quantised_activations: the format rounds activations to eight bits too, so a method may.

    Raises:
        ValueError: the parts are inconsistent.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    inputs: int
    group_size: int
    levels: tuple[float, ...] | None = None
    zeros: torch.Tensor | None = None
    order: torch.Tensor | None = None
    has_quantised_activations: bool = False

    def __post_init__(self) -> None:
        problem = self._validation_error()
        if problem is not None:
            raise ValueError(problem)

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 8 if self.levels is None else 4

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs]."""
        return self.codes.shape[0], self.inputs

    @property
    def num_groups(self) -> int:
        """Groups per output."""
        return self.scales.shape[1]

    @property
    def num_bytes(self) -> int:
        """Its size in memory."""
        tensors = (self.codes, self.scales, self.zeros, self.order)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def unpacked(self) -> torch.Tensor:
        """Return one code per element, [outputs, inputs]: uint8 of 4 bits, or 8-bit codes
        unchanged."""
        if self.bits == 8:
            return self.codes
        halves = torch.stack((self.codes & 15, self.codes >> 4), dim=2)
        return halves.flatten(1)[:, : self.inputs]

    def select(self, outputs: torch.Tensor | slice) -> PackedWeight:
        """Return some of the outputs, in any order."""
        zeros = None if self.zeros is None else self.zeros[outputs]
        codes = _as_bytes(self.codes)[outputs].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[outputs], zeros=zeros)

    def columns(self, begin: int, end: int) -> PackedWeight:
        """Return the consecutive inputs [begin, end).

        Raises:
            ValueError: a group or a byte of codes would be split, or groups were formed in another
                order of the inputs.
        """
        if self.order is not None:
            raise ValueError("its groups were formed by another order of the inputs (act-order)")
        is_whole = self.num_groups == 1
        size = end - begin if is_whole else self.group_size
        if not is_whole and (begin % size or (end % size and end != self.inputs)):
            raise ValueError(f"inputs {begin} to {end} do not begin and end with groups of {size}")
        if self.bits == 4 and (begin % 2 or (end % 2 and end != self.inputs)):
            raise ValueError(f"inputs {begin} to {end} do not begin and end with bytes of two")
        groups = slice(0, 1) if is_whole else slice(begin // size, -(-end // size))
        per_byte = 1 if self.bits == 8 else 2
        return replace(
            self,
            codes=self.codes[:, begin // per_byte : -(-end // per_byte)],
            scales=self.scales[:, groups],
            zeros=None if self.zeros is None else self.zeros[:, groups],
            inputs=end - begin,
            group_size=size,
        ).contiguous()

    def with_quantised_activations(self) -> PackedWeight:
        """Return the weight as one of a format that rounds activations too."""
        return replace(self, has_quantised_activations=True)

    def without_order(self) -> PackedWeight:
        """Return the weight with the same codes, as if column i belonged to input i."""
        return replace(self, order=None)

    def contiguous(self) -> PackedWeight:
        """Return the weight with contiguous tensors."""
        zeros = None if self.zeros is None else self.zeros.contiguous()
        codes, scales = self.codes.contiguous(), self.scales.contiguous()
        return replace(self, codes=codes, scales=scales, zeros=zeros)

    def to(self, device: torch.device) -> PackedWeight:
        """Return the weight on a device."""
        zeros = None if self.zeros is None else self.zeros.to(device)
        order = None if self.order is None else self.order.to(device)
        codes, scales = self.codes.to(device), self.scales.to(device)
        return replace(self, codes=codes, scales=scales, zeros=zeros, order=order)

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [outputs, inputs] in ``dtype``, computed in float32 and rounded once."""
        whole = torch.empty(self.shape, dtype=dtype, device=self.codes.device)
        for rows in _row_ranges(*self.shape):
            whole[rows] = self.select(rows)._values()
        return whole

    def _values(self) -> torch.Tensor:
        codes = self.unpacked()
        levels = None if self.levels is None else torch.tensor(self.levels, device=codes.device)
        values = dequantise_codes(codes, levels, self.scales, self.zeros, self.group_size)
        if self.order is not None:
            values = torch.empty_like(values).index_copy_(1, self.order, values)
        return values

    def _validation_error(self) -> str | None:
        outputs, groups = self.scales.shape
        if self.levels is None:
            if self.codes.dtype not in (torch.int8, torch.float8_e4m3fn):
                return f"codes of 8 bits are int8 or float8_e4m3fn, not {self.codes.dtype}"
            width = self.inputs
        else:
            if self.codes.dtype != torch.uint8 or len(self.levels) != 16:
                return "codes of 4 bits are uint8 with 16 levels"
            width = -(-self.inputs // 2)
        if self.codes.shape != (outputs, width):
            return f"codes {list(self.codes.shape)} for {outputs} outputs and {self.inputs} inputs"
        if self.group_size < 1 or groups != -(-self.inputs // self.group_size):
            return f"{groups} groups of {self.group_size} for {self.inputs} inputs"
        if self.zeros is not None and self.zeros.shape != self.scales.shape:
            return f"zeros {list(self.zeros.shape)} beside scales {list(self.scales.shape)}"
        if self.order is not None and self.order.shape != (self.inputs,):
            return f"an order {list(self.order.shape)} of {self.inputs} inputs"
        return None


@dataclass(frozen=True, slots=True, eq=False)
class PackedParts:
    """A weight whose outputs are concatenated parts: fused projections, or experts.

    Parts may differ in format and in the order of their inputs, or be dense.
    """

    parts: tuple[PackedWeight | torch.Tensor, ...]

    @property
    def shape(self) -> tuple[int, int]:
        """[outputs, inputs] of all parts."""
        return sum(part.shape[0] for part in self.parts), self.parts[0].shape[1]

    def joined(self) -> tuple[PackedWeight | torch.Tensor, ...]:
        """Return the parts with adjacent ones of the same form merged."""
        runs: list[list[PackedWeight | torch.Tensor]] = []
        for part in self.parts:
            if runs and _can_merge(runs[-1][0], part):
                runs[-1].append(part)
            else:
                runs.append([part])
        return tuple(run[0] if len(run) == 1 else _join(run) for run in runs)

    def split(self, count: int) -> tuple[PackedParts, ...]:
        """Split the weight into ``count`` weights with equally many outputs: the experts of a
        layer.

        Raises:
            ValueError: the outputs are not divisible by ``count``.
        """
        outputs = self.shape[0]
        if outputs % count:
            raise ValueError(f"{outputs} outputs are not {count} times as many")
        size, at = outputs // count, 0
        shares: list[list[PackedWeight | torch.Tensor]] = [[] for _ in range(count)]
        for part in self.parts:
            begin = 0
            while begin < part.shape[0]:
                end = min(part.shape[0], begin + size - at % size)
                shares[at // size].append(_select(part, slice(begin, end)))
                at += end - begin
                begin = end
        return tuple(PackedParts(tuple(share)) for share in shares)

    def select(self, outputs: torch.Tensor) -> PackedParts:
        """Return the weight with its outputs in the order [n] int64; parts are merged where
        necessary.

        Raises:
            ValueError: parts that cannot be merged would be mixed.
        """
        found: list[PackedWeight | torch.Tensor] = []
        begin = 0
        for part in self.joined():
            own = outputs[begin : begin + part.shape[0]] - begin
            if own.numel() and not (own.min() >= 0 and own.max() < part.shape[0]):
                raise ValueError("outputs of parts in different formats cannot change places")
            found.append(_select(part, own))
            begin += part.shape[0]
        return PackedParts(tuple(found))

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """Return [outputs, inputs] in ``dtype``."""
        dense = [
            part.dequantise(dtype) if isinstance(part, PackedWeight) else part.to(dtype)
            for part in self.parts
        ]
        return dense[0] if len(dense) == 1 else torch.cat(dense)


def pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Pack codes 0 to 15, [outputs, inputs] of any integer dtype, two to a byte."""
    codes = codes.to(torch.uint8)
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, ::2] | codes[:, 1::2] << 4


def dequantise_codes(
    codes: torch.Tensor,
    levels: torch.Tensor | None,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
) -> torch.Tensor:
    """``(level - zero) * scale`` in float32: [outputs, inputs].

    Args:
        codes: [outputs, inputs], one per element.
        levels: [16] float32 on the codes' device, for 4 bits; None: codes are their own levels.
        scales, zeros: [outputs, groups].
        group: consecutive codes that share them.
    """
    values = codes.float() if levels is None else levels[codes.long()]
    groups = torch.arange(codes.shape[1], device=codes.device) // group
    if zeros is not None:
        values = values - zeros.float()[:, groups]
    return values * scales.float()[:, groups]


def _select(
    part: PackedWeight | torch.Tensor, outputs: torch.Tensor | slice
) -> PackedWeight | torch.Tensor:
    return part.select(outputs) if isinstance(part, PackedWeight) else part[outputs]


def _can_merge(one: PackedWeight | torch.Tensor, other: PackedWeight | torch.Tensor) -> bool:
    """Return whether the two can be merged."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    if (one.zeros is None) != (other.zeros is None) or (one.order is None) != (other.order is None):
        return False
    if (
        one.order is not None
        and other.order is not None
        and not torch.equal(one.order, other.order)
    ):
        return False
    return _merge_key(one) == _merge_key(other)


def _merge_key(weight: PackedWeight) -> tuple[object, ...]:
    dtypes = weight.codes.dtype, weight.scales.dtype
    return (
        *dtypes,
        weight.inputs,
        weight.group_size,
        weight.levels,
        weight.has_quantised_activations,
    )


def _join(run: Sequence[PackedWeight | torch.Tensor]) -> PackedWeight | torch.Tensor:
    packed = [part for part in run if isinstance(part, PackedWeight)]
    if not packed:
        return torch.cat([part for part in run if isinstance(part, torch.Tensor)])
    first = packed[0]
    codes = torch.cat([_as_bytes(part.codes) for part in packed]).view(first.codes.dtype)
    scales = torch.cat([part.scales for part in packed])
    zeros = [part.zeros for part in packed if part.zeros is not None]
    return replace(first, codes=codes, scales=scales, zeros=torch.cat(zeros) if zeros else None)


def _as_bytes(codes: torch.Tensor) -> torch.Tensor:
    """View as bytes: torch does not index or join float8."""
    return codes.view(torch.uint8)


def _row_ranges(outputs: int, inputs: int) -> Iterator[slice]:
    """Yield ranges of rows whose float32 copies are small."""
    step = max(1, _PIECE_ELEMENTS // max(inputs, 1))
    for begin in range(0, outputs, step):
        yield slice(begin, begin + step)
