"""What a draft model has read, for each text and each KV block.

A text is looked at only when drafts for it are needed. Changes of blocks are recorded at once,
which costs nothing in steps that allocate none.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.types import BlockCopy


@dataclass(slots=True)
class ReadState:
    """How far the draft model has read one text."""

    num_read: int
    unread: list[int] = field(default_factory=list)  # the known tokens from there on
    read_drafts: Iterable[int] = ()  # drafts that it has read beyond the known text; read once
    num_recorded: int = 0  # how much of what was read is recorded in ReadBlocks

    @property
    def end(self) -> int:
        """The number of known tokens."""
        return self.num_read + len(self.unread)

    def update(self, text: Sequence[int], lead: int) -> None:
        """Note the known text, which has grown by at least a token.

        Accepted drafts have already been read; rejected ones are dropped.

        Args:
            text: prompt first.
            lead: leading tokens that are not read.
        """
        at, last = self.num_read + lead, len(text) - 1
        for guess in self.read_drafts:
            if at >= last or text[at] != guess:
                break
            at += 1
        self.read_drafts = ()
        self.num_read = at - lead
        self.unread = list(text[at:])


class ReadBlocks:
    """For each block, how many leading tokens have their keys and values in it.

    Args:
        num_blocks: number of blocks.
        block_size: tokens per block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._counts = np.zeros(num_blocks, np.int32)
        self._on_host: dict[int, int] = {}  # by slot of the host
        self._block_size = block_size

    def reset(self, block_ids: Iterable[int]) -> None:
        """Note that these blocks have been allocated: their contents are void."""
        for block in block_ids:
            self._counts[block] = 0

    def copy(self, copies: Sequence[BlockCopy], num_shared: Mapping[int, int]) -> None:
        """Copy the count of each pair's first block to its second.

        ``num_shared`` is how many tokens the two texts share there, by second block. Those that
        have been read behind them are the first text's own.
        """
        for source, target in copies:
            self._counts[target] = min(int(self._counts[source]), num_shared[target])

    def exchange(self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Note blocks copied to host slots, and then slots copied to blocks."""
        for block, slot in offloads:
            self._on_host[slot] = int(self._counts[block])
        for slot, block in loads:
            self._counts[block] = self._on_host[slot]

    def record(self, table: np.ndarray, begin: int, end: int) -> None:
        """Note that tokens [begin, end) of this table's text have been read, as all before."""
        size = self._block_size
        for index in range(begin // size, -(-end // size)):
            self._counts[table[index]] = min(size, end - index * size)

    def num_read(self, table: np.ndarray, end: int) -> int:
        """How many tokens of a text, up to ``end``, its blocks hold without a gap."""
        size = self._block_size
        for index in range(-(-end // size)):
            held = int(self._counts[table[index]])
            if held < min(size, end - index * size):
                return index * size + held
        return end
