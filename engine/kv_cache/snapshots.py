"""Bookkeeping of snapshots of recurrent states, from which sequences with a common prefix continue.

Attention can start in the middle of a text, because its keys and values are stored token by token.
A recurrent layer can start only where its state was copied. A snapshot is a copy of the states of
all layers at the end of a full block, identified by that block's digest in the prefix cache. So the
part of a prefix that can be reused is a run of cached blocks with a snapshot at its end.

               reserve                 complete
    free ──────────────► pending ──────────────────► usable ──┐
      ▲                    │  ▲                               │ reserve another: the line of the
      └───────cancel───────┘  └───────────────────────────────┘ oldest, of low priority first

The runner copies states in plan order: restores before a step, saves after it. A line may therefore
be taken for a new snapshot while a step that restores from it is still in flight.

Snapshots of *low priority* are made in passing, at the ends of a prompt's chunks. They only help a
sequence that recomputes the same prompt, as after preemption. They are evicted before all others,
and never evict one of those, until a sequence has continued from them.

No torch: lines are just numbers here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _PendingSnapshot(NamedTuple):
    digest: bytes
    low_priority: bool


class SnapshotPool:
    """Digests and ages of ``num_lines`` snapshots.

    Args:
        num_lines: number of lines, numbered from 0.
    """

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self._free = list(range(num_lines - 1, -1, -1))
        self._pending: dict[int, _PendingSnapshot] = {}  # by line, for steps that have not landed
        self._line_of: dict[bytes, int] = {}  # snapshots that can be used
        self._lru: OrderedDict[bytes, None] = OrderedDict()  # of these, oldest first
        self._low_priority: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """The number of snapshots that sequences could continue from."""
        return len(self._line_of)

    def longest_prefix(self, digests: Sequence[bytes], num_blocks: int) -> int:
        """How many of a text's first ``num_blocks`` blocks come before its last snapshot."""
        for count in range(num_blocks, 0, -1):
            if digests[count - 1] in self._line_of:
                return count
        return 0

    def use(self, digest: bytes) -> int:
        """The line of a snapshot found by ``longest_prefix``, which a sequence now continues
        from."""
        self._low_priority.pop(digest, None)
        self._lru[digest] = None
        self._lru.move_to_end(digest)
        return self._line_of[digest]

    def reserve(self, digest: bytes, *, low_priority: bool) -> int | None:
        """Take a line for a snapshot that a step will make.

        None if the snapshot exists or is already being made, or if there is no line for it.
        """
        if digest in self._line_of:
            return None
        if any(coming.digest == digest for coming in self._pending.values()):
            return None
        line = self._next_line(low_priority=low_priority)
        if line is not None:
            self._pending[line] = _PendingSnapshot(digest, low_priority)
        return line

    def complete(self, lines: Iterable[int]) -> None:
        """Note that the steps that make these snapshots have landed."""
        for line in lines:
            digest, low_priority = self._pending.pop(line)
            self._line_of[digest] = line
            (self._low_priority if low_priority else self._lru)[digest] = None

    def cancel(self, lines: Iterable[int]) -> None:
        """Free the lines of snapshots that will not be made."""
        for line in lines:
            del self._pending[line]
            self._free.append(line)

    def clear(self) -> None:
        """Drop all snapshots. Called only while no step is in flight."""
        self._free = list(range(self.num_lines - 1, -1, -1))
        self._line_of.clear()
        self._lru.clear()
        self._low_priority.clear()

    def check(self) -> list[str]:
        """Check the bookkeeping; returns the problems found."""
        problems: list[str] = []
        lines = sorted([*self._free, *self._pending, *self._line_of.values()])
        if lines != list(range(self.num_lines)):
            problems.append(f"lines of snapshots are {lines}, there are {self.num_lines}")
        aged = sorted([*self._lru, *self._low_priority])
        if aged != sorted(self._line_of):
            problems.append(f"{len(aged)} snapshots have an age, {len(self._line_of)} are found")
        return problems

    def _next_line(self, *, low_priority: bool) -> int | None:
        if self._free:
            return self._free.pop()
        if self._low_priority:
            digest, _ = self._low_priority.popitem(last=False)
        elif self._lru and not low_priority:
            digest, _ = self._lru.popitem(last=False)
        else:
            return None
        return self._line_of.pop(digest)
