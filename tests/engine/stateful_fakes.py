"""Fake runners of models that keep a state per sequence: no row may use another's state."""

from __future__ import annotations

from collections.abc import Sequence

from engine.plan_rows import ScheduledRow
from engine.types import StepPlan, StepResult
from tests.engine.fakes import FakeRunner, FaultyRunner, _Row
from tests.engine.scheduler.whims import Lazy

State = tuple[str, int]  # a digest of all tokens included, and their salt


class _Stateful(FakeRunner):
    """Checks the state of each row, which stands for its tokens so far.

    A row that starts at its first token starts without a state. Any other starts with the state of
    the preceding tokens, which is in its own line or in a snapshot. Of a row's drafts, the state
    includes the accepted ones.
    """

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
    """A stateful runner that does not always make all passes."""


class StatefulFaulty(_Stateful, FaultyRunner):
    """A stateful runner that fails on demand; the snapshots of a failed step are corrupt."""

    def _damage(self, plan: StepPlan) -> None:
        super()._damage(plan)
        for _, line in plan.saves:
            self.snapshots[line] = ("damaged", 0)
