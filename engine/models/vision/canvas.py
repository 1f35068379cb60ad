"""The embeddings of an image's tiles as those of one image (LLaVA-NeXT, Liu et al. 2024)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from engine.images.types import Region


def assemble_tiles(
    tiles: Sequence[torch.Tensor], columns: int, region: Region, newline: torch.Tensor | None
) -> torch.Tensor:
    """Join the cells of tiles, cut the region out of them, and end its rows.

    Args:
        tiles: row by row, each [num_cells, out_size], a square of cells.
        columns: of tiles.
        region: of the canvas that they make.
        newline: [out_size], the embedding that ends rows.

    Returns:
        [region.num_tokens, out_size].
    """
    assert newline is not None, "models with regions have one"
    across = round(tiles[0].shape[0] ** 0.5)
    grid = torch.stack(list(tiles)).unflatten(1, (across, across)).unflatten(0, (-1, columns))
    whole = grid.transpose(1, 2).flatten(2, 3).flatten(0, 1)  # [rows, columns, out_size], of cells
    top, left = region.top, region.left
    cells = whole[top : top + region.rows, left : left + region.columns]
    shown = region.shown_rows, region.shown_columns
    if shown != (region.rows, region.columns):
        planes = cells.permute(2, 0, 1)[None]
        cells = functional.interpolate(planes, shown, mode="bilinear")[0].permute(1, 2, 0)
    if not region.ends_rows:
        return torch.cat((cells.flatten(0, 1), newline[None]))
    ends = newline.expand(shown[0], 1, -1)
    return torch.cat((cells, ends), dim=1).flatten(0, 1)
