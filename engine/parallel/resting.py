"""A sharded model at rest: all ranks rest and wake together."""

from __future__ import annotations

from engine.errors import EngineDead
from engine.parallel.leader import Team
from engine.runner.protocol import Resting, Runner


class RestingTeam:
    """See ``engine.runner.protocol.Resting``.

    Args:
        own: rank 0's part. On waking it wakes the team; on reading weights it has the team read.
        team: the other ranks.
        level: how much of the model is freed; see ``Runner.rest``.
    """

    def __init__(self, own: Resting, team: Team, level: int) -> None:
        self._own = own
        self._team = team
        self._level = level

    def release(self) -> None:
        """See ``Resting.release``. Raises EngineDead."""
        self._own.release()
        self._team.rest(self._level)

    def wake(self) -> Runner:
        """See ``Resting.wake``. If one rank cannot, all rest again. Raises EngineDead too."""
        try:
            return self._own.wake()
        except EngineDead:
            raise
        except Exception:
            self._team.rest(self._level)
            raise

    def exchanged(self, model: str) -> Resting:
        """See ``Resting.exchanged``. Raises EngineDead too."""
        return RestingTeam(self._own.exchanged(model), self._team, level=0)
