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
    is_sampled: bool  # whether the last position's logits are sampled
    num_drafts: int = 0  # these follow one known token; only in a row that samples
    # For a row with drafts: the known tokens of its text. This is the scheduler's own list, valid
    # while the plan is launched; do not keep it.
    known_token_ids: Sequence[int] = ()
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
        "known_token_ids",
        "new_blocks",
        "num_drafts",
        "num_passes",
        "starts",
        "token_ids",
        "unsampled",
    )

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.starts: list[int] = []
        self.token_ids: list[tuple[int, ...]] = []
        # By row index; see the fields of ScheduledRow.
        self.new_blocks: dict[int, tuple[int, ...]] = {}
        self.num_drafts: dict[int, int] = {}
        self.known_token_ids: dict[int, Sequence[int]] = {}
        self.num_passes: dict[int, int] = {}  # rows with more than one pass
        self.unsampled: set[int] = set()  # rows that do not sample

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
            self.known_token_ids[place] = row.known_token_ids
        if row.num_passes > 1:
            self.num_passes[place] = row.num_passes
        if not row.is_sampled:
            self.unsampled.add(place)

    def append_drafts(
        self,
        place: int,
        drafts: tuple[int, ...],
        new_block_ids: tuple[int, ...],
        known_token_ids: Sequence[int] = (),
    ) -> None:
        """Append drafts to a row, with the blocks they need; ``known_token_ids`` is the row's known
        text."""
        self.token_ids[place] += drafts
        self.num_drafts[place] = len(drafts)
        self.known_token_ids[place] = known_token_ids
        if new_block_ids:
            self.new_blocks[place] = self.new_blocks.get(place, ()) + new_block_ids

    def remove(self, place: int) -> ScheduledRow:
        """Remove a row; later rows move up by one."""
        row = self[place]
        del self.ids[place], self.starts[place], self.token_ids[place]
        self.new_blocks = _without_index(self.new_blocks, place)
        self.num_drafts = _without_index(self.num_drafts, place)
        self.known_token_ids = _without_index(self.known_token_ids, place)
        self.num_passes = _without_index(self.num_passes, place)
        self.unsampled = {at - (at > place) for at in self.unsampled if at != place}
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
            place not in self.unsampled,
            self.num_drafts.get(place, 0),
            self.known_token_ids.get(place, ()),
            self.num_passes.get(place, 1),
        )


def _without_index(column: dict[int, _ValueT], place: int) -> dict[int, _ValueT]:
    return {at - (at > place): value for at, value in column.items() if at != place}
