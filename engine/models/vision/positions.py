"""A patch's position in its image, for attention and embeddings."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch.nn import functional

from engine.models.vision.spec import AxialRope
from kernels.transfer import to_device


class PatchRotation(NamedTuple):
    """The rotation angles of each patch's pairs: [num_patches, 1, head_dim / 2].

    If the parts of a head rotate separately: [num_patches, 1, 2, head_dim / 4].
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def select(self, rows: slice) -> PatchRotation:
        """Return those of some patches."""
        return PatchRotation(self.cos[rows], self.sin[rows])

    def after_origin(self) -> PatchRotation:
        """Return these, preceded by that of a token that is not rotated."""
        cos, sin = self.cos[:1], self.sin[:1]
        return PatchRotation(
            torch.cat((torch.ones_like(cos), self.cos)),
            torch.cat((torch.zeros_like(sin), self.sin)),
        )

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotate [num_patches, heads, head_dim], in float32 internally."""
        parts = x.float().view(*x.shape[:2], *self.cos.shape[2:-1], -1)
        first, second = parts.chunk(2, dim=-1)
        turned = (first * self.cos - second * self.sin, second * self.cos + first * self.sin)
        return torch.cat(turned, dim=-1).view(x.shape).to(x.dtype)


def make_rotation(
    rope: AxialRope, head_dim: int, rows: torch.Tensor, columns: torch.Tensor
) -> PatchRotation:
    """Compute the angles of patches.

    Args:
        rope: of the encoder.
        head_dim: a multiple of 4.
        rows, columns: [num_patches] int64, of each patch.
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=rows.device) / head_dim
    frequencies = rope.theta**-steps  # [head_dim / 2]
    of_rows = frequencies[0::2]
    of_columns = frequencies[1::2] if rope.staggered else of_rows
    rows, columns = rows + rope.first, columns + rope.first
    by_row, by_column = rows[:, None].float() * of_rows, columns[:, None].float() * of_columns
    if rope.split_halves:
        angles = torch.stack((by_column, by_row), dim=1)
    else:
        angles = torch.cat((by_row, by_column), dim=-1)
    return PatchRotation(angles.cos()[:, None], angles.sin()[:, None])


def stored_pairs(head_dim: int, *, columns_first: bool = False) -> torch.Tensor:
    """Return where the dimensions of a head are stored if pairs are adjacent (``interleaved``).

    Args:
        head_dim: a multiple of 4.
        columns_first: the first half of the pairs is of the column; otherwise every other pair.

    Returns:
        [head_dim] int64, the stored place of each dimension as ``PatchRotation`` rotates them: the
            first ones of all pairs, those of rows before those of columns, and then the second ones
    """
    pairs = torch.arange(head_dim // 2).view(-1, 2)  # of column and row, by frequency
    if columns_first:
        pairs = torch.arange(head_dim // 2).view(2, -1).T
    first = 2 * torch.cat((pairs[:, 1], pairs[:, 0]))
    return torch.cat((first, first + 1))


def learned_positions(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Return the learned position embeddings of patches.

    Args:
        table: [side * side, hidden_size] float32, see ``interpolate_positions``; or [2, n,
            hidden_size], one table for columns and one for rows.
        rows, columns: [num_patches] int64, of each patch.

    Returns:
        [num_patches, hidden_size] float32.
    """
    if table.dim() == 2:
        return interpolate_positions(table, rows, columns)
    return functional.embedding(columns, table[0]).add_(functional.embedding(rows, table[1]))


def bucket_positions(side: int) -> torch.Tensor:
    """Return the row of a square table of positions that each row of an image takes in Idefics3.

    The n-th row takes the bucket of n / side among multiples of 1 / side (after Dehghani et al.
    2023, NaViT). That is the n-th but where rounding puts it into the bucket before, as at 25
    rows, and such models were trained with that.

    Args:
        side: of the table and of the image, in patches.

    Returns:
        [side] int64.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    at = torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side))
    return torch.bucketize(at.clamp(max=1.0 - 1e-6), bounds, right=True)


def nearest_positions(side: int, count: int) -> torch.Tensor:
    """Return the row of a square table in which each of an image's rows begins.

    Args:
        side: of the table.
        count: rows of the image.

    Returns:
        [count] int64.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    return torch.bucketize(torch.arange(count) / count, bounds, right=True)


def interpolate_positions(
    table: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor
) -> torch.Tensor:
    """Interpolate learned positions of a square grid over an image, aligning the corners.

    Args:
        table: [side * side, hidden_size] float32, row by row.
        rows, columns: [num_patches] int64, of each patch; the last one is the image's corner.

    Returns:
        [num_patches, hidden_size] float32, bilinear between the four nearest positions.
    """
    side = round(table.shape[0] ** 0.5)
    row, below = _taps(rows, side)
    column, beside = _taps(columns, side)
    found: torch.Tensor | None = None
    for down, row_weight in ((0, 1 - below), (1, below)):
        for across, column_weight in ((0, 1 - beside), (1, beside)):
            at = (row + down).clamp(max=side - 1) * side + (column + across).clamp(max=side - 1)
            tap = functional.embedding(at, table).mul_((row_weight * column_weight)[:, None])
            found = tap if found is None else found.add_(tap)
    assert found is not None
    return found


def sample_positions(
    table: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
    size: tuple[int, int],
    mode: Literal["bicubic", "bilinear", "averaged", "nearest"],
) -> torch.Tensor:
    """Interpolate learned positions of a square grid over an image, aligning its edges.

    Each position stands for the middle of its share of the image.

    Args:
        table: [side * side, hidden_size] float32, row by row.
        rows, columns: [num_patches] int64, of each patch.
        size: rows and columns of the image.
        mode: see ``VisionSpec.sampled_positions``; bicubic is cubic convolution (Keys 1981) with
            a = -0.75.

    Returns:
        [num_patches, hidden_size] float32.
    """
    side = round(table.shape[0] ** 0.5)
    if mode == "nearest":
        found = [to_device(nearest_positions(side, count), rows.device) for count in size]
        return functional.embedding(found[0][rows] * side + found[1][columns], table)
    grid = table.view(1, side, side, -1).permute(0, 3, 1, 2)
    if mode == "averaged":
        shrunk = functional.interpolate(grid, size, mode="bilinear", antialias=True)
        return shrunk[0, :, rows, columns].T
    places = [(columns + 0.5) / size[1] * 2 - 1, (rows + 0.5) / size[0] * 2 - 1]
    found = functional.grid_sample(
        grid, torch.stack(places, dim=-1)[None, :, None], mode, "border", align_corners=False
    )
    return found[0, :, :, 0].T


def _taps(index: torch.Tensor, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the grid position before each row or column, and the fractional distance from it."""
    last = index.max().clamp(min=1)
    at = index.float() * (side - 1) / last
    before = at.floor()
    return before.long(), at - before
