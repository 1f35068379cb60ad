"""Fake runners of models that keep a state of each sequence: no row may go on from another's."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan_rows import ScheduledRow
from engine.types import StepPlan, StepResult
from tests.engine.fakes import FakeRunner, FaultyRunner, _Row
from tests.engine.scheduler.whims import Lazy

State = tuple[str, int]  # a digest of all tokens that went into it, and their salt


class _Stateful(FakeRunner):
    """A row's state stands for its tokens so far. One that begins at its first token begins with
    none, and one that does not, with that of the tokens before, which lies there or in a line of
    snapshots. Of a row's drafts its state has those that were kept."""

    def _keep(self) -> dict[str, State]:
        if not hasattr(self, "states"):
            self.states: dict[str, State] = {}
            self.snapshots: dict[int, State] = {}
        return self.states

    def is_again(self, row: _Row, position: int) -> bool:
        return self.slots.get(self._slot(row, position)) == row.digest(position)

    def _run(self, plan: StepPlan) -> StepResult:
        for request_id in plan.removed:
            self._keep().pop(request_id, None)
        result = super()._run(plan)
        drafted = {row.id for row in plan.rows if row.num_drafts}
        for row_id, line in plan.saves:
            assert 0 <= line < self._info.memory.num_snapshots, "no such line"
            assert row_id not in drafted, "where its state will be is not known"
            self.snapshots[line] = self.states[row_id]
        return result

    def _write(self, plan: StepPlan) -> None:
        states = self._keep()
        for row_id, line in plan.restores:
            states[row_id] = self.snapshots[line]
        for planned in plan.rows:
            row = self.rows[planned.id]
            if planned.start:
                before = row.digest(planned.start - 1)
                assert states.get(planned.id) == before, f"{planned.id} has another's state"
            states[planned.id] = row.digest(planned.start + len(planned.token_ids) - 1)
        super()._write(plan)

    def _choose(self, row: _Row, position: int) -> list[int]:
        chosen = super()._choose(row, position)
        self._keep()[row.request.id] = row.digest(len(row.tokens) - 1)
        return chosen

    def _go_on(self, planned: ScheduledRow, newest: Sequence[int]) -> list[int]:
        chosen = super()._go_on(planned, list(newest))
        row = self.rows[planned.id]
        self._keep()[planned.id] = row.digest(planned.start + len(chosen))
        return chosen


class StatefulLazy(_Stateful, Lazy):
    """Does not always make all passes."""


class StatefulFaulty(_Stateful, FaultyRunner):
    """Fails as told; no snapshot of a failed step is what it should be."""

    def _damage(self, plan: StepPlan) -> None:
        super()._damage(plan)
        for _, line in plan.saves:
            self.snapshots[line] = ("damaged", 0)
