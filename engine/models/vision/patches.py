"""An image cut into patches, in the order in which an encoder computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from engine.models.vision.spec import PixelSpec, VisionSpec
from kernels.sending import to_device


class Windows(NamedTuple):
    """Windows of one shape, whose patches lie one window after the other."""

    begin: int  # the first patch of the first one
    num_windows: int
    length: int  # patches of each

    @property
    def end(self) -> int:
        """Behind the last patch of the last one."""
        return self.begin + self.num_windows * self.length

    def of_each(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, heads, head_dim] -> [num_windows, length, heads, head_dim], a view."""
        return x[self.begin : self.end].unflatten(0, (self.num_windows, self.length))

    def parts(self, most: int) -> Iterator[tuple[Windows, slice]]:
        """About ``most`` patches at a time, and which of the windows they see."""
        if self.length <= most:
            for windows in spans(self.num_windows, most // self.length):
                begin = self.begin + windows.start * self.length
                part = Windows(begin, windows.stop - windows.start, self.length)
                yield part, windows
            return
        for window in range(self.num_windows):
            begin = self.begin + window * self.length
            for rows in spans(self.length, most):
                part = Windows(begin + rows.start, 1, rows.stop - rows.start)
                yield part, slice(window, window + 1)


class Layout(NamedTuple):
    """Where the patches of an image lie while it is computed: those of a cell side by side, the
    cells of a window as well, and windows of one shape."""

    rows: torch.Tensor  # [num_patches] int64, of each patch in the image
    columns: torch.Tensor
    windows: tuple[Windows, ...]  # one, the whole image, where the encoder has no windows
    cells: torch.Tensor | None  # [num_cells] int64: where the image's cells lie; None: row by row

    @property
    def whole(self) -> Windows:
        """All patches as one window."""
        return Windows(0, 1, self.windows[-1].end)

    def of(self, rows: slice) -> Layout:
        """That of some patches, for ``cut``."""
        return self._replace(rows=self.rows[rows], columns=self.columns[rows])

    def row_by_row(self, x: torch.Tensor) -> torch.Tensor:
        """What is of each cell, [num_cells, n], as the cells lie in the image."""
        return x if self.cells is None else x[self.cells]


def lay_out(num_rows: int, num_columns: int, spec: VisionSpec, device: torch.device) -> Layout:
    """The layout of an image of so many patches.

    Args:
        num_rows, num_columns: of patches; whole cells.
        spec: of the encoder.
        device: of the layout's tensors.
    """
    merge = spec.merge_size
    height, width = num_rows // merge, num_columns // merge
    table = torch.arange(height * width).view(height, width)
    pieces: list[torch.Tensor] = []
    windows: list[Windows] = []
    num_patches = 0
    for row, end_row, tall in _bands(height, spec.window or height):
        for column, end_column, wide in _bands(width, spec.window or width):
            block = table[row:end_row, column:end_column]
            block = block.unflatten(1, (-1, wide)).unflatten(0, (-1, tall)).transpose(1, 2)
            pieces.append(block.flatten())  # [windows down, across, tall, wide]
            count, length = block.shape[0] * block.shape[1], tall * wide * merge**2
            windows.append(Windows(num_patches, count, length))
            num_patches = windows[-1].end
    order = torch.cat(pieces)
    steps = torch.arange(merge)
    rows = (order // width * merge)[:, None, None] + steps[:, None]  # [cells, merge, 1]
    columns = (order % width * merge)[:, None, None] + steps  # [cells, 1, merge]
    shape = (order.numel(), merge, merge)
    cells = None
    if len(windows) > 1 or windows[0].num_windows > 1:
        cells = to_device(order.argsort(), device)
    return Layout(
        to_device(rows.expand(shape).flatten(), device),
        to_device(columns.expand(shape).flatten(), device),
        tuple(windows),
        cells,
    )


def cut(pixels: torch.Tensor, layout: Layout, size: int, spec: PixelSpec) -> torch.Tensor:
    """The patches of an image.

    Args:
        pixels: [height, width, 3] uint8, whole patches.
        layout: their order.
        size: of a patch.
        spec: how they are normalised.

    Returns:
        [num_patches, 3 * size * size] float32: the channels one after the other.
    """
    height, width, channels = pixels.shape
    grid = pixels.view(height // size, size, width // size, size, channels)
    rows = grid.permute(0, 2, 4, 1, 3).reshape(-1, channels, size * size)
    patches = rows[layout.rows * (width // size) + layout.columns].float().mul_(spec.rescale)
    for channel, (mean, std) in enumerate(zip(spec.mean, spec.std, strict=True)):
        patches[:, channel].sub_(mean).div_(std)
    return patches.flatten(1)


def spans(length: int, most: int) -> Iterator[slice]:
    """``length`` things, ``most`` at a time."""
    for begin in range(0, length, most):
        yield slice(begin, min(begin + most, length))


def _bands(length: int, window: int) -> Iterator[tuple[int, int, int]]:
    """From, to and the length of each window in between: whole ones, and the rest as one."""
    whole = length - length % window
    if whole:
        yield 0, whole, window
    if whole < length:
        yield whole, length, length - whole
