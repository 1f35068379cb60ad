"""Convert codes from files' packing to that of ``PackedWeight``."""

from __future__ import annotations

import torch

from kernels.packed import INT4_LEVELS, PackedWeight, pack_nibbles

_WORD_BITS = 32


def num_words(count: int, bits: int) -> int:
    """Return the number of 32-bit words that hold ``count`` codes of ``bits`` bits."""
    return -(-count * bits // _WORD_BITS)


def unpack_words(words: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unpack codes that are stored end to end in the words of a row, the first in the lowest bits.

    Args:
        words: [rows, words] int32.
        bits: of a code: 2, 3, 4 or 8. Codes of three bits may straddle two words.
        count: codes of a row.

    Returns:
        [rows, count] uint8.
    """
    stream = words.contiguous().view(torch.uint8)  # in memory, words are little-endian
    if 8 % bits == 0:
        shifts = range(0, 8, bits)
        codes = torch.stack([stream >> shift & (1 << bits) - 1 for shift in shifts], dim=2)
        return codes.flatten(1)[:, :count]
    first = torch.arange(count) * bits
    low, shift = first // 8, first % 8
    pairs = stream.to(torch.int16)
    pairs[:, :-1] |= pairs[:, 1:] << 8  # of adjacent bytes: every code lies within one pair
    found = pairs[:, low].to(torch.int32) & 0xFFFF
    return (found >> shift & (1 << bits) - 1).to(torch.uint8)


def integer_weight(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    group: int,
    groups_of_inputs: torch.Tensor | None = None,
) -> PackedWeight:
    """Make the weight ``(code - zero) * scale`` of unsigned codes; 2 and 3 bits are widened to 4.

    Args:
        codes: [outputs, inputs] uint8.
        bits: of a code: 2, 3, 4 or 8.
        scales: [outputs, groups].
        zeros: [outputs, groups] integers; None: half of the range, as in symmetric quantisation.
        group: inputs of a group.
        groups_of_inputs: [inputs], the group of each; None: in order.

    Raises:
        ValueError: the inputs' groups contradict the number of groups.
    """
    order = None
    if groups_of_inputs is not None:
        order = _order(groups_of_inputs, group, scales.shape[1])
    if order is not None:
        codes = codes.index_select(1, order)
    # Shift codes so that a symmetric zero is in the middle of the stored range.
    middle, shift = 1 << bits - 1, None
    if zeros is not None:
        shift = zeros.to(torch.int16) - middle
        if not shift.any():
            shift = None
        elif int(shift.abs().max()) < 128:
            shift = shift.to(torch.int8)
    inputs = codes.shape[1]
    if bits == 8:
        held = (codes ^ 0x80).view(torch.int8)
        return PackedWeight(held, scales, inputs, group, None, shift, order)
    held = pack_nibbles(codes + (8 - middle))
    return PackedWeight(held, scales, inputs, group, INT4_LEVELS, shift, order)


def _order(groups: torch.Tensor, group: int, num_groups: int) -> torch.Tensor | None:
    """Return the inputs sorted by group, or None if they are sorted already.

    Raises:
        ValueError: a group has the wrong number of inputs.
    """
    inputs = len(groups)
    if bool((groups < 0).any()) or bool((groups >= num_groups).any()):
        raise ValueError(f"an input is in a group that is not one of {num_groups}")
    in_order = torch.arange(inputs) // group
    order = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[order], in_order):
        raise ValueError(f"the groups of its inputs are not {group} each")
    return None if torch.equal(groups.long(), in_order) else order
