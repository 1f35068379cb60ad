"""A rank's share of a quantised matrix: whole outputs, or whole groups of inputs."""

from __future__ import annotations

import torch

from engine.parallel.shard import Cut
from kernels.packed import PackedWeight


def cut_packed(weight: PackedWeight, cut: Cut, part: int | None) -> PackedWeight:
    """What a rank has of the matrix that fills ``part`` of a parameter, or all parts.

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
