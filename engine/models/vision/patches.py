"""Cut an image into patches, in the order in which an encoder computes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch

from engine.models.vision.spec import PixelSpec, VisionSpec
from kernels.transfer import to_device


class Windows(NamedTuple):
    """Windows of one shape, whose patches are stored window after window."""

    begin: int  # first patch of the first window
    num_windows: int
    length: int  # patches per window

    @property
    def end(self) -> int:
        """One past the last patch of the last window."""
        return self.begin + self.num_windows * self.length

    def view_windows(self, x: torch.Tensor) -> torch.Tensor:
        """[num_patches, heads, head_dim] -> [num_windows, length, heads, head_dim], a view."""
        return x[self.begin : self.end].unflatten(0, (self.num_windows, self.length))

    def split(self, max_patches: int) -> Iterator[tuple[Windows, slice]]:
        """Yield about ``most`` patches at a time, and the slice of windows that they attend to."""
        if self.length <= max_patches:
            for windows in chunk_slices(self.num_windows, max_patches // self.length):
                begin = self.begin + windows.start * self.length
                part = Windows(begin, windows.stop - windows.start, self.length)
                yield part, windows
            return
        for window in range(self.num_windows):
            begin = self.begin + window * self.length
            for rows in chunk_slices(self.length, max_patches):
                part = Windows(begin + rows.start, 1, rows.stop - rows.start)
                yield part, slice(window, window + 1)


class PatchLayout(NamedTuple):
    """The order of an image's patches during the computation.

    The patches of a cell are adjacent, as are the cells of a window and the windows of one shape.
    So are those of a cell that become one within the encoder.
    """

    rows: torch.Tensor  # [num_patches] int64, of each patch in the image
    columns: torch.Tensor
    windows: tuple[Windows, ...]  # without windows: the whole image
    cells: torch.Tensor | None  # [num_cells] int64, where the image's cells are; None: row by row

    @property
    def full_window(self) -> Windows:
        """All patches as one window."""
        return Windows(0, 1, self.windows[-1].end)

    def select(self, rows: slice) -> PatchLayout:
        """Return the layout of some patches, for ``patchify``."""
        return self._replace(rows=self.rows[rows], columns=self.columns[rows])

    def raster(self, num_columns: int) -> torch.Tensor:
        """Return where each patch is in the image, row by row: [num_patches] int64."""
        return self.rows * num_columns + self.columns

    def to_row_major(self, x: torch.Tensor) -> torch.Tensor:
        """Reorder per-cell values [num_cells, n] to the order of cells in the image."""
        return x if self.cells is None else x[self.cells]


def make_layout(
    num_rows: int, num_columns: int, spec: VisionSpec, device: torch.device
) -> PatchLayout:
    """Compute the layout of an image.

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
    rows, columns = rows.expand(shape).flatten(1), columns.expand(shape).flatten(1)
    if spec.inner_merge is not None:
        inner = _by_square(merge, spec.inner_merge.side)
        rows, columns = rows[:, inner], columns[:, inner]
    cells = None
    if len(windows) > 1 or windows[0].num_windows > 1:
        cells = to_device(order.argsort(), device)
    return PatchLayout(
        to_device(rows.flatten(), device),
        to_device(columns.flatten(), device),
        tuple(windows),
        cells,
    )


def patchify(pixels: torch.Tensor, layout: PatchLayout, size: int, spec: PixelSpec) -> torch.Tensor:
    """Cut an image, or frames that are seen together, into patches.

    Args:
        pixels: [num_frames, height, width, 3] uint8, whole patches.
        layout: their order.
        size: of a patch.
        spec: how they are normalised.

    Returns:
        [num_patches, 3 * num_frames * size * size] float32, channel by channel, frame by frame.
    """
    frames, height, width, channels = pixels.shape
    grid = pixels.view(frames, height // size, size, width // size, size, channels)
    rows = grid.permute(1, 3, 5, 0, 2, 4).reshape(-1, channels, frames * size * size)
    patches = rows[layout.rows * (width // size) + layout.columns].float().mul_(spec.rescale)
    for channel, (mean, std) in enumerate(zip(spec.mean, spec.std, strict=True)):
        patches[:, channel].sub_(mean).div_(std)
    return patches.flatten(1)


def chunk_slices(length: int, max_length: int) -> Iterator[slice]:
    """Yield slices of at most ``most`` items that cover ``length``."""
    for begin in range(0, length, max_length):
        yield slice(begin, min(begin + max_length, length))


def _by_square(merge: int, side: int) -> torch.Tensor:
    """Return the patches of a cell square after square: [merge * merge] int64."""
    squares = torch.arange(merge**2).view(merge // side, side, merge // side, side)
    return squares.transpose(1, 2).flatten()


def _bands(length: int, window: int) -> Iterator[tuple[int, int, int]]:
    """Yield start, end and window length of the bands: whole windows, and the remainder as one."""
    whole = length - length % window
    if whole:
        yield 0, whole, window
    if whole < length:
        yield whole, length, length - whole
