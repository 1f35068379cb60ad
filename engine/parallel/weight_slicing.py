"""Cut a rank's shard out of a matrix that was read whole, by outputs or by inputs."""

from __future__ import annotations

import torch

from engine.parallel.shard import ParameterSlice
from kernels.packed import PackedWeight


def slice_dense(
    whole: torch.Tensor, cut: ParameterSlice, part: int | None, into: torch.Tensor
) -> None:
    """Copy a rank's part of ``whole`` to its place in ``into``.

    ``whole`` fills ``part`` of a parameter, or all parts (None); ``into`` is the rank's parameter.
    """
    for rows, own in cut.row_ranges(part):
        kept = whole[rows]
        into[own].copy_(kept if cut.columns is None else kept[:, cut.columns])


def slice_packed(weight: PackedWeight, cut: ParameterSlice, part: int | None) -> PackedWeight:
    """Return a rank's part of a quantised matrix that fills ``part`` of a parameter, or all parts.

    Raises:
        ValueError: the cut would split a group of inputs.
    """
    runs = [rows for rows, _ in cut.row_ranges(part)]
    kept = sum(rows.stop - rows.start for rows in runs)
    if kept < weight.shape[0]:
        weight = weight.select(torch.cat([torch.arange(rows.start, rows.stop) for rows in runs]))
    if cut.columns is None:
        return weight
    return weight.columns(cut.columns.start, cut.columns.stop)
