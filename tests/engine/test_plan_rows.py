"""Columns that read as rows: after any operation they equal a plain list of rows."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from engine.plan_rows import PlanRows, ScheduledRow

_IDS = st.text("abc", min_size=1, max_size=3)
_NUMBERS = st.lists(st.integers(0, 99), max_size=3).map(tuple)


@st.composite
def _rows(draw: st.DrawFn) -> ScheduledRow:
    token_ids = draw(_NUMBERS.filter(bool))
    num_drafts = draw(st.integers(0, len(token_ids) - 1))
    samples = bool(num_drafts) or draw(st.booleans())
    new_block_ids = draw(_NUMBERS)
    text = draw(_NUMBERS) if num_drafts else ()
    start, num_passes = draw(st.integers(0, 9)), draw(st.integers(1, 3))
    return ScheduledRow(
        draw(_IDS), start, token_ids, new_block_ids, samples, num_drafts, text, num_passes
    )


@given(st.lists(_rows(), max_size=6), st.data())
def test_columns_are_the_rows_that_were_added(
    rows: list[ScheduledRow], data: st.DataObject
) -> None:
    columns = PlanRows.of(rows)
    for _ in range(data.draw(st.integers(0, 4))):
        _change(columns, rows, data.draw)
        assert list(columns) == rows
        assert [columns[place] for place in range(-len(rows), len(rows))] == rows + rows
        middle = data.draw(st.integers(0, len(rows)))
        assert columns[:middle] + columns[middle:] == rows
        assert len(columns) == len(rows)
        assert columns.num_tokens == sum(len(row.token_ids) + row.num_passes - 1 for row in rows)


def _change(columns: PlanRows, rows: list[ScheduledRow], draw: Any) -> None:
    """Apply one change to both: add any row, a decoding row, or drafts; or remove a row."""
    kind = draw(st.sampled_from(["row", "decode", "drafts", "remove"])) if rows else "row"
    if kind == "row":
        rows.append(draw(_rows()))
        columns.append(rows[-1])
        return
    if kind == "decode":
        rows.append(ScheduledRow("z", 3, (7,), (), is_sampled=True))
        columns.ids.append("z")
        columns.starts.append(3)
        columns.token_ids.append((7,))
        return
    place = draw(st.integers(0, len(rows) - 1))
    row = rows[place]
    if kind == "remove":
        assert columns.remove(place) == row
        del rows[place]
    elif row.is_sampled and not row.num_drafts:
        drafts, blocks, text = draw(_NUMBERS.filter(bool)), draw(_NUMBERS), draw(_NUMBERS)
        columns.append_drafts(place, drafts, blocks, text)
        rows[place] = msgspec.structs.replace(
            row,
            token_ids=row.token_ids + drafts,
            new_block_ids=row.new_block_ids + blocks,
            num_drafts=len(drafts),
            known_token_ids=text,
        )
