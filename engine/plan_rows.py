"""The rows of a step's plan, held as columns.

Of a busy step nearly every row is one more token of a sequence that decodes. As columns such a row
is an entry in three lists, and whoever builds the step's tensors or counts its tokens finds them as
lists; what only few rows have (new blocks, drafts, a prompt that goes on) is kept by place beside
them. To everybody else they are a sequence of :class:`ScheduledRow`, made when looked at.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Self, TypeVar, overload

import msgspec

_ValueT = TypeVar("_ValueT")


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """One sequence's share of a step: tokens at positions [start, start + len(token_ids)).

    The last ``num_drafts`` of them are guesses that the step verifies: each is kept while it is
    what the logits before it choose. They are known, or all ``DRAFT_TOKEN``.
    """

    id: str
    start: int
    token_ids: tuple[int, ...]  # the last may be PENDING_TOKEN
    new_block_ids: tuple[int, ...]  # appended to the row's block table since its last plan
    samples: bool  # whether the last position's logits choose the next token
    num_drafts: int = 0  # behind one known token; only in a row that samples
    # Of a row with drafts: all that is known of its text. The scheduler's own list, as it is when
    # the plan is launched; not to be kept.
    text: Sequence[int] = ()
    # Above 1, of a row of one token that samples: the token that is chosen is computed too, and so
    # on, until so many have been computed.
    num_passes: int = 1


class PlanRows(Sequence[ScheduledRow]):
    """The rows of one plan. Written by whoever makes the plan, until it is made.

    A row of one token that samples, has no new blocks and no drafts may be added by appending to
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
        # By place among the rows; see the fields of ScheduledRow.
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.num_drafts: dict[int, int] = {}
        self.texts: dict[int, Sequence[int]] = {}
        self.num_passes: dict[int, int] = {}  # of those that have several
        self.silent: set[int] = set()  # those that do not sample

    @classmethod
    def of(cls, rows: Iterable[ScheduledRow]) -> Self:
        """The columns of these rows."""
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
        """Lay drafts behind a row of this text, with the blocks that they need."""
        self.token_ids[place] += drafts
        self.num_drafts[place] = len(drafts)
        self.texts[place] = text
        if new_block_ids:
            self.new_blocks[place] = self.new_blocks.get(place, ()) + new_block_ids

    def remove(self, place: int) -> ScheduledRow:
        """Take a row out; those behind it move up."""
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
        """Computed, of all rows."""
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
