"""The table of rows: what is told to a device of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from msgspec import structs

from engine.core import EngineCore
from engine.limits import num_row_lines
from engine.runner.protocol import LaunchedStep
from engine.runner.rows import RowTable
from engine.types import AddedRow, Request, SamplingParams, StepPlan, StepResult
from tests.engine.fakes import FakeRunner, make_config, make_info


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


class _Staged(FakeRunner):
    """Holds the rows of each step until its result is read, as with pipeline stages."""

    def __init__(self, num_lines: int) -> None:
        super().__init__(make_info(64, 4, 32))
        self._lines = RowTable(num_lines, 8, 8, (), torch.device("cpu"))
        self.most_in_flight = self.num_in_flight = 0

    def launch(self, plan: StepPlan) -> LaunchedStep:
        for row_id in plan.removed:
            self._lines.remove(row_id)
        for added in plan.added:
            self._lines.add(added)
        slots = self._lines.slots(plan.rows.ids)
        self._lines.hold(slots)
        self.num_in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.num_in_flight)
        return _StagedStep(super().launch(plan), self, slots)

    def finish(self, slots: list[int]) -> None:
        self.num_in_flight -= 1
        self._lines.release(slots)


@dataclass
class _StagedStep:
    step: LaunchedStep
    runner: _Staged
    slots: list[int]

    def result(self) -> StepResult:
        self.runner.finish(self.slots)
        return self.step.result()


@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_newcomers_find_lines_whatever_the_steps_in_flight_hold(
    num_stages: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All clients hang up, and as many others come, between any two steps."""
    config = structs.replace(make_config(max_num_seqs=8), pipeline_parallel_size=num_stages)
    runner = _Staged(num_row_lines(config, 0))
    core = EngineCore(config, runner)
    live: list[str] = []
    for wave in range(12):
        for request_id in live if wave > num_stages else ():
            core.abort(request_id)
        if not live or wave > num_stages:
            live = [f"{wave}-{number}" for number in range(8)]
            for request_id in live:
                core.add(Request(id=request_id, prompt_token_ids=(1, 2, 3)))
        core.step()
    assert runner.most_in_flight == num_stages
    assert not caplog.records, "a step could not be started"
