"""What a draft model has read: of each text, and of each KV block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from engine.types import BlockCopy


@dataclass(slots=True)
class Place:
    """How far the draft model has read one text."""

    num_read: int
    unread: list[int]  # tokens from there on that are known
    num_noted: int = 0  # of what was read, entered into the books

    @property
    def end(self) -> int:
        """Tokens that are known."""
        return self.num_read + len(self.unread)

    def go_to(self, start: int) -> None:
        """The text goes on at ``start``: what was guessed behind it is void."""
        if start < self.num_read or start > self.num_read + len(self.unread):
            self.num_read, self.unread = start, []
            self.num_noted = min(self.num_noted, start)
        else:
            del self.unread[start - self.num_read :]


class ReadBlocks:
    """How many tokens each block holds keys and values of, from its first on.

    Args:
        num_blocks: there are.
        block_size: tokens of one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._counts = np.zeros(num_blocks, np.int32)
        self._block_size = block_size

    def renew(self, block_ids: Iterable[int]) -> None:
        """These blocks have been given out: what they held is void."""
        for block in block_ids:
            self._counts[block] = 0

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """The second block of each pair becomes what the first one is."""
        sources, targets = np.array(copies, np.int32).reshape(-1, 2).T
        self._counts[targets] = self._counts[sources]

    def note(self, table: np.ndarray, begin: int, end: int) -> None:
        """Tokens [begin, end) of the text with these blocks have been read, as all before them."""
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
