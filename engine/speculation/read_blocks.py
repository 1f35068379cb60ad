"""What a draft model has read: of each text, and of each KV block.

A text is looked at when it is to be guessed for, and not before; what happens to blocks is noted at
once, which costs nothing in a step that gives none out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from engine.types import BlockCopy


@dataclass(slots=True)
class Place:
    """How far the draft model has read one text."""

    num_read: int
    unread: list[int] = field(default_factory=list)  # tokens from there on that are known
    ahead: Iterable[int] = ()  # guesses that it has read behind all that was known; read once
    num_noted: int = 0  # of what was read, entered into the books

    @property
    def end(self) -> int:
        """Tokens that are known."""
        return self.num_read + len(self.unread)

    def go_on(self, text: Sequence[int], lead: int) -> None:
        """So much of the text is known by now, at least a token more than the last time: guesses
        that were kept have been read, the others are void.

        Args:
            text: prompt first.
            lead: tokens at its beginning that are not read.
        """
        at, last = self.num_read + lead, len(text) - 1
        for guess in self.ahead:
            if at >= last or text[at] != guess:
                break
            at += 1
        self.ahead = ()
        self.num_read = at - lead
        self.unread = list(text[at:])


class ReadBlocks:
    """How many tokens each block holds keys and values of, from its first on.

    Args:
        num_blocks: there are.
        block_size: tokens of one.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._counts = np.zeros(num_blocks, np.int32)
        self._on_host: dict[int, int] = {}  # by slot of the host
        self._block_size = block_size

    def renew(self, block_ids: Iterable[int]) -> None:
        """These blocks have been given out: what they held is void."""
        for block in block_ids:
            self._counts[block] = 0

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """The second block of each pair becomes what the first one is."""
        sources, targets = np.array(copies, np.int32).reshape(-1, 2).T
        self._counts[targets] = self._counts[sources]

    def exchange(self, offloads: Sequence[BlockCopy], loads: Sequence[BlockCopy]) -> None:
        """Blocks have been copied to slots of the host, and slots to other blocks after that."""
        for block, slot in offloads:
            self._on_host[slot] = int(self._counts[block])
        for slot, block in loads:
            self._counts[block] = self._on_host[slot]

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
