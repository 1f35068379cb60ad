"""The work items that a step's attention is divided into, as ``plan.py`` numbers them, and the
bounds of their numbers that the host knows.

    splits      runs of SPLIT_SIZE slots of a single query's keys
    units       runs of UNIT slots, cut into parts or shares of nearly equal size
    tiles       runs of adjacent queries of a row that has several
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from kernels.attention import BatchGeometry, DeviceGeometry

# In slots. One sequence of 4k tokens with 8 KV heads makes 128 work items, about one for each
# multiprocessor. The partial results of a group of 4 heads take 3 % of the bytes of their keys and
# values, and are read again while they are still in the L2 cache.
SPLIT_SIZE = 256
UNIT = 64  # slots; a part is a whole number of units
TILE_ROWS = 128  # queries times heads per KV head: products of two warp groups


@dataclass(frozen=True, slots=True)
class WorkList:
    """Splits, numbered row by row; entries after the last one are unused."""

    starts: torch.Tensor  # [rows + 1] int32, first split of each row
    rows: torch.Tensor  # [capacity] int32, row of each split

    @property
    def capacity(self) -> int:
        """An upper bound of the number of splits."""
        return self.rows.shape[0]


@dataclass(frozen=True, slots=True)
class TileList:
    """Query tiles, row by row; those of a row from its end on. Records after the last are unused.

    A tile is described by itself, not by its row: what a program needs before it can request its
    first keys is one access away.
    """

    count: torch.Tensor  # [1] int32
    records: torch.Tensor  # [capacity, fields] int32: see ``describe_tile``

    @property
    def capacity(self) -> int:
        """An upper bound of the number of tiles."""
        return self.records.shape[0]


@dataclass(frozen=True, slots=True)
class WorkUnits:
    """Units of single queries' keys, numbered row by row, and the parts that each head's are cut
    into: as many as there are programs for, if there are enough for all heads."""

    starts: torch.Tensor  # [rows + 1] int32, first unit of each row
    parts: torch.Tensor  # [rows + 1] int32, first part of each row's heads; the last -1: no parts
    past: torch.Tensor  # [rows + 1] int32, each sequence's tokens before the step
    programs: int  # an upper bound of the parts of all heads
    may_have_parts: bool  # otherwise there are more heads than programs
    arrivals: torch.Tensor  # [rows, kv_heads] int32, 0 between layers: finished parts of a row


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What the layers of one step share; all of it is on the device.

    ``splits`` and ``units`` are by window, and empty if no row may have a single query; a plan has
    one or the other.
    """

    geometry: DeviceGeometry
    splits: dict[int | None, WorkList]
    units: dict[int | None, WorkUnits]
    tiles: TileList | None  # None if no row may have several queries
    merges: bool  # False: no row has more than one split


@dataclass(frozen=True, slots=True)
class WorkBounds:
    """Upper bounds of a batch's work items, or those that a CUDA graph was captured with."""

    num_rows: int
    num_splits: int  # without a window, which never adds any
    num_tiles: int
    tiles_only: bool  # single queries are tiles as well
    split_size: int = SPLIT_SIZE  # or UNIT: the splits are units

    @classmethod
    def of(
        cls,
        geometry: BatchGeometry,
        group: int,
        *,
        tiles_only: bool,
        split_size: int = SPLIT_SIZE,
    ) -> WorkBounds:
        """Count the items from the host arrays; ``group`` is the query heads per KV head."""
        lengths = np.diff(geometry.query_start)
        is_split = (lengths == 1) & (not tiles_only)
        # A row of length 0 has an output too, which is 0.
        splits = np.maximum(-(-geometry.seq_lens[is_split] // split_size), 1)
        tiles = int((-(-lengths[~is_split] // queries_per_tile(group))).sum())
        return cls(lengths.size, int(splits.sum()), tiles, tiles_only, split_size)

    @property
    def has_units(self) -> bool:
        """Whether single queries are divided into equal shares of units, not into splits."""
        return self.split_size == UNIT

    @property
    def merges(self) -> bool:
        """Whether a row may have several splits."""
        # If all rows have single queries, and there are no more splits than rows, each has one.
        return self.num_splits > self.num_rows or (self.num_splits > 0 and self.num_tiles > 0)

    def splits_within(self, window: int | None) -> int:
        """Return the bound for this window, which may touch one split more than it fills."""
        if window is None:
            return self.num_splits
        return min(self.num_splits, self.num_rows * (-(-window // self.split_size) + 1))

    def covers(self, actual: WorkBounds) -> bool:
        """Return whether a batch, padded with rows of length 0, fits within these bounds.

        Of units there may be any number: they only make shares larger.
        """
        padding = self.num_rows - actual.num_rows
        split_padding, tile_padding = (0, padding) if self.tiles_only else (padding, 0)
        return (
            padding >= 0
            and (self.has_units or actual.num_splits + split_padding <= self.num_splits)
            and actual.num_tiles + tile_padding <= self.num_tiles
        )


def queries_per_tile(group: int) -> int:
    """Return the adjacent queries of a tile; with a group of 7, 18 queries make 126 rows."""
    return TILE_ROWS // group
