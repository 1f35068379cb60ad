"""Bookkeeping of snapshots of recurrent states, from which sequences with a common prefix continue.

Attention can start in the middle of a text, because its keys and values are stored token by token.
A recurrent layer can start only where its state was copied. A snapshot is a copy of the states of
all layers at the end of a full block, identified by that block's digest in the prefix cache. So the
part of a prefix that can be reused is a run of cached blocks with a snapshot at its end.

                take                    landed
    free ──────────────► coming ───────────────────► found ──┐ taken for another: the oldest first,
      ▲                    │ void                      │     │ those in passing before all others
      └────────────────────┴───────────────────────────┴─────┘

The runner copies states in plan order: restores before a step, saves after it. A line may therefore
be taken for a new snapshot while a step that restores from it is still in flight.

Snapshots *in passing* are made at the ends of a prompt's chunks. They only help a sequence that
recomputes the same prompt, as after preemption. They are evicted before all others, and never evict
one of those, until a sequence has continued from them.

No torch: lines are just numbers here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Coming(NamedTuple):
    digest: bytes
    in_passing: bool


class SnapshotPool:
    """Digests and ages of ``num_lines`` snapshots.

    Args:
        num_lines: number of lines, numbered from 0.
    """

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self._free = list(range(num_lines - 1, -1, -1))
        self._coming: dict[int, _Coming] = {}  # by line, for steps that have not landed
        self._line_of: dict[bytes, int] = {}  # snapshots that can be used
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # of these, oldest first
        self._passing: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_found(self) -> int:
        """The number of snapshots that sequences could continue from."""
        return len(self._line_of)

    def longest(self, digests: Sequence[bytes], num_blocks: int) -> int:
        """How many of a text's first ``num_blocks`` blocks come before its last snapshot."""
        for count in range(num_blocks, 0, -1):
            if digests[count - 1] in self._line_of:
                return count
        return 0

    def use(self, digest: bytes) -> int:
        """The line of a snapshot found by ``longest``, which a sequence now continues from."""
        self._passing.pop(digest, None)
        self._kept[digest] = None
        self._kept.move_to_end(digest)
        return self._line_of[digest]

    def take(self, digest: bytes, *, in_passing: bool) -> int | None:
        """Take a line for a snapshot that a step will make.

        None if the snapshot exists or is already being made, or if there is no line for it.
        """
        if digest in self._line_of:
            return None
        if any(coming.digest == digest for coming in self._coming.values()):
            return None
        line = self._next_line(in_passing=in_passing)
        if line is not None:
            self._coming[line] = _Coming(digest, in_passing)
        return line

    def land(self, lines: Iterable[int]) -> None:
        """Note that the steps that make these snapshots have landed."""
        for line in lines:
            digest, in_passing = self._coming.pop(line)
            self._line_of[digest] = line
            (self._passing if in_passing else self._kept)[digest] = None

    def void(self, lines: Iterable[int]) -> None:
        """Free the lines of snapshots that will not be made."""
        for line in lines:
            del self._coming[line]
            self._free.append(line)

    def forget(self) -> None:
        """Drop all snapshots. Called only while no step is in flight."""
        self._free = list(range(self.num_lines - 1, -1, -1))
        self._line_of.clear()
        self._kept.clear()
        self._passing.clear()

    def check(self) -> list[str]:
        """Check the bookkeeping; returns the problems found."""
        problems: list[str] = []
        lines = sorted([*self._free, *self._coming, *self._line_of.values()])
        if lines != list(range(self.num_lines)):
            problems.append(f"lines of snapshots are {lines}, there are {self.num_lines}")
        aged = sorted([*self._kept, *self._passing])
        if aged != sorted(self._line_of):
            problems.append(f"{len(aged)} snapshots have an age, {len(self._line_of)} are found")
        return problems

    def _next_line(self, *, in_passing: bool) -> int | None:
        if self._free:
            return self._free.pop()
        if self._passing:
            digest, _ = self._passing.popitem(last=False)
        elif self._kept and not in_passing:
            digest, _ = self._kept.popitem(last=False)
        else:
            return None
        return self._line_of.pop(digest)
