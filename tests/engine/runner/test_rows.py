"""The table of rows: what is told to a device of them."""

from __future__ import annotations

import numpy as np
import torch

from engine.runner.rows import RowTable
from engine.types import AddedRow, Request, SamplingParams


def test_slots_that_went_to_other_rows_are_told_once() -> None:
    """A step failed before it was sent, and its rows came back in other slots. A device writes
    contradictory entries in any order."""
    table = RowTable(2, 4, 8, (), torch.device("meta"))
    blocks = {"a": (1, 2), "b": (3,)}
    for _ in range(2):
        for name in blocks:
            table.remove(name)
        for name in blocks:
            request = Request(id=name, prompt_token_ids=(0,), sampling=SamplingParams())
            table.add(AddedRow(request, ()))
        slots = table.slots(blocks)
        table.extend(slots, blocks.values())
    assert slots == [1, 0], "exchanged"
    changes = table.changes()
    assert len(set(changes.table_places.tolist())) == changes.table_places.size
    told = np.zeros_like(table.host_tables)
    told.reshape(-1)[changes.table_places] = changes.table_blocks
    assert told[1, :2].tolist() == [1, 2]
    assert told[0, 0] == 3


def test_parameters_that_could_not_be_written_are_told_again() -> None:
    table = RowTable(2, 4, 8, (), torch.device("meta"))
    first, again = (set(table.changes().sampling_slots.tolist()) for _ in range(2))
    assert first == again == {0, 1, 2}
