"""The rows of a step plan, stored as columns.

In a busy step nearly every row is one more token of a decoding sequence. Stored as columns, such a
row is an entry in three lists. Code that builds the step's tensors or counts its tokens reads those
lists directly. What only few rows have (new blocks, drafts, prompt chunks) is kept beside them by
row index. Everything else can treat the plan as a sequence of :class:`ScheduledRow`, which are made
on access.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, TypeVar, overload

import msgspec

_ValueT = TypeVar("_ValueT")


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's part of a step: tokens at positions [start, start + len(token_ids)).

    The last ``num_drafts`` of them are drafts to be verified: each is accepted while it matches the
    token chosen from the logits before it. Drafts are either all known or all ``DRAFT_TOKEN``.
    """

    id: str
    start: int
    token_ids: tuple[int, ...]  # the last may be PENDING_TOKEN
    new_block_ids: tuple[int, ...]  # new in the row's block table since its last plan
    samples: bool  # whether the last position's logits are sampled
    num_drafts: int = 0  # these follow one known token; only in a row that samples
    # For a row with drafts: the known tokens of its text. This is the scheduler's own list, valid
    # while the plan is launched; do not keep it.
    text: Sequence[int] = ()
    # Above 1, for a row with one token that samples: each sampled token is computed in turn, until
    # this many tokens have been computed.
    num_passes: int = 1


class PlanRows(Sequence[ScheduledRow]):
    """The rows of one plan. Written only by the plan's maker while it is being made.

    A row with one token that samples and has no new blocks or drafts may be added by appending to
    ``ids``, ``starts`` and ``token_ids`` alone.
    """

    __slots__ = (
        "ids",
        "new_blocks",
        "num_drafts",
        "num_passes",
        "silent",
        "starts",
        "texts",
        "token_ids",
    )

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.starts: list[int] = []
        self.token_ids: list[tuple[int, ...]] = []
        # By row index; see the fields of ScheduledRow.
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.num_drafts: dict[int, int] = {}
        self.texts: dict[int, Sequence[int]] = {}
        self.num_passes: dict[int, int] = {}  # rows with more than one pass
        self.silent: set[int] = set()  # rows that do not sample

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow]) -> Self:
        """Build the columns of the given rows."""
        columns = cls()
        for row in rows:
            columns.append(row)
        return columns

    def append(self, row: ScheduledRow) -> None:
        """Add a row of any kind."""
        place = len(self.ids)
        self.ids.append(row.id)
        self.starts.append(row.start)
        self.token_ids.append(row.token_ids)
        if row.new_block_ids:
            self.new_blocks[place] = row.new_block_ids
        if row.num_drafts:
            self.num_drafts[place] = row.num_drafts
            self.texts[place] = row.text
        if row.num_passes > 1:
            self.num_passes[place] = row.num_passes
        if not row.samples:
            self.silent.add(place)

    def extend_row(
        self,
        place: int,
        drafts: tuple[int, ...],
        new_block_ids: tuple[int, ...],
        text: Sequence[int] = (),
    ) -> None:
        """Append drafts to a row, with the blocks they need; ``text`` is the row's known text."""
        self.token_ids[place] += drafts
        self.num_drafts[place] = len(drafts)
        self.texts[place] = text
        if new_block_ids:
            self.new_blocks[place] = self.new_blocks.get(place, ()) + new_block_ids

    def remove(self, place: int) -> ScheduledRow:
        """Remove a row; later rows move up by one."""
        row = self[place]
        del self.ids[place], self.starts[place], self.token_ids[place]
        self.new_blocks = _moved_up(self.new_blocks, place)
        self.num_drafts = _moved_up(self.num_drafts, place)
        self.texts = _moved_up(self.texts, place)
        self.num_passes = _moved_up(self.num_passes, place)
        self.silent = {at - (at > place) for at in self.silent if at != place}
        return row

    @property
    def num_tokens(self) -> int:
        """Tokens computed over all rows."""
        return sum(map(len, self.token_ids)) + sum(self.num_passes.values()) - len(self.num_passes)

    def __len__(self) -> int:
        return len(self.ids)

    @overload
    def __getitem__(self, place: int) -> ScheduledRow: ...
    @overload
    def __getitem__(self, place: slice) -> list[ScheduledRow]: ...
    def __getitem__(self, place: int | slice) -> ScheduledRow | list[ScheduledRow]:
        if isinstance(place, slice):
            return [self._row(at) for at in range(*place.indices(len(self)))]
        return self._row(range(len(self))[place])

    def __iter__(self) -> Iterator[ScheduledRow]:
        return map(self._row, range(len(self)))

    def _row(self, place: int) -> ScheduledRow:
        return ScheduledRow(
            self.ids[place],
            self.starts[place],
            self.token_ids[place],
            self.new_blocks.get(place, ()),
            place not in self.silent,
            self.num_drafts.get(place, 0),
            self.texts.get(place, ()),
            self.num_passes.get(place, 1),
        )


def _moved_up(column: dict[int, _ValueT], place: int) -> dict[int, _ValueT]:
    return {at - (at > place): value for at, value in column.items() if at != place}
