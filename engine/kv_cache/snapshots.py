"""Which snapshots there are of the states of texts, for those who go on from the same beginning.

A layer that keeps a state cannot be entered in the middle of a text as attention can, whose keys
and values lie there token by token: only where somebody has copied the state. A snapshot is such a
copy, of all layers, at the end of a full block, and has the name that the block has in the prefix
cache. So a prefix that can be gone on from is a run of cached blocks with a snapshot at its end.

                take                    landed
    free ──────────────► coming ───────────────────► found ──┐ taken for another: the oldest first,
      ▲                    │ void                      │     │ those in passing before all others
      └────────────────────┴───────────────────────────┴─────┘

The runner copies states in the order of the steps that it is told of: what a row begins with before
the step, and what is to be kept behind it. So a line may be taken for another snapshot while a step
that begins with it is under way.

*In passing* are those at the ends of chunks of a prompt: of use to nobody but who computes the same
prompt again from there, as one who was preempted does. They make room for others and never displace
one, until somebody has gone on from them.

No torch: lines are numbers here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class _Coming(NamedTuple):
    digest: bytes
    in_passing: bool


class SnapshotPool:
    """Names and ages of ``num_lines`` snapshots.

    Args:
        num_lines: there are, numbered from 0.
    """

    def __init__(self, num_lines: int) -> None:
        self.num_lines = num_lines
        self._free = list(range(num_lines - 1, -1, -1))
        self._coming: dict[int, _Coming] = {}  # by line, of steps that have not landed
        self._line_of: dict[bytes, int] = {}  # those that are found
        self._kept: OrderedDict[bytes, None] = OrderedDict()  # of these, the oldest first
        self._passing: OrderedDict[bytes, None] = OrderedDict()

    @property
    def num_found(self) -> int:
        """Snapshots that somebody could go on from."""
        return len(self._line_of)

    def longest(self, digests: Sequence[bytes], num_blocks: int) -> int:
        """How many of a text's first ``num_blocks`` blocks lie before the last snapshot of it."""
        for count in range(num_blocks, 0, -1):
            if digests[count - 1] in self._line_of:
                return count
        return 0

    def use(self, digest: bytes) -> int:
        """The line of a snapshot that ``longest`` has told of, which somebody goes on from."""
        self._passing.pop(digest, None)
        self._kept[digest] = None
        self._kept.move_to_end(digest)
        return self._line_of[digest]

    def take(self, digest: bytes, *, in_passing: bool) -> int | None:
        """A line for a snapshot that a step is to make; None where it is there or coming already,
        or where there is no line for it."""
        if digest in self._line_of:
            return None
        if any(coming.digest == digest for coming in self._coming.values()):
            return None
        line = self._next_line(in_passing=in_passing)
        if line is not None:
            self._coming[line] = _Coming(digest, in_passing)
        return line

    def land(self, lines: Iterable[int]) -> None:
        """The steps that make these are done."""
        for line in lines:
            digest, in_passing = self._coming.pop(line)
            self._line_of[digest] = line
            (self._passing if in_passing else self._kept)[digest] = None

    def void(self, lines: Iterable[int]) -> None:
        """These have not been made, and will not be."""
        for line in lines:
            del self._coming[line]
            self._free.append(line)

    def forget(self) -> None:
        """No line holds anything any more; called while no step is under way."""
        self._free = list(range(self.num_lines - 1, -1, -1))
        self._line_of.clear()
        self._kept.clear()
        self._passing.clear()

    def check(self) -> list[str]:
        """What is wrong with the books; nothing if they are whole."""
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
