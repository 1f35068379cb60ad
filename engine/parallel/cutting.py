"""A rank's share of a matrix that has been read whole: some outputs, or some inputs."""

from __future__ import annotations

import torch

from engine.parallel.shard import Cut
from kernels.packed import PackedWeight


def cut_dense(whole: torch.Tensor, cut: Cut, part: int | None, into: torch.Tensor) -> None:
    """Copy what a rank has of ``whole``, which fills ``part`` of a parameter or all parts, to its
    place in ``into``, all that the rank has of the parameter."""
    for rows, own in cut.pieces(part):
        kept = whole[rows]
        into[own].copy_(kept if cut.columns is None else kept[:, cut.columns])


def cut_packed(weight: PackedWeight, cut: Cut, part: int | None) -> PackedWeight:
    """What a rank has of a quantised matrix that fills ``part`` of a parameter, or all parts.

    Raises:
        ValueError: its groups of inputs cannot be told apart there.
    """
    runs = [rows for rows, _ in cut.pieces(part)]
    kept = sum(rows.stop - rows.start for rows in runs)
    if kept < weight.shape[0]:
        weight = weight.select(torch.cat([torch.arange(rows.start, rows.stop) for rows in runs]))
    if cut.columns is None:
        return weight
    return weight.columns(cut.columns.start, cut.columns.stop)
