"""A sharded model asleep: all ranks sleep and wake together."""

from __future__ import annotations

from engine.errors import EngineDead
from engine.parallel.leader import Team
from engine.runner.protocol import Runner, SleepingRunner


class SleepingTeam:
    """See ``engine.runner.protocol.SleepingRunner``.

    Args:
        own: rank 0's part. On waking it wakes the team; on reading weights it has the team read.
        team: the other ranks.
        level: how much of the model is freed; see ``Runner.sleep``.
    """

    def __init__(self, own: SleepingRunner, team: Team, level: int) -> None:
        self._own = own
        self._team = team
        self._level = level

    def release(self) -> None:
        """See ``SleepingRunner.release``. Raises EngineDead."""
        self._own.release()
        self._team.sleep(self._level)

    def wake(self) -> Runner:
        """See ``SleepingRunner.wake``. If one rank cannot, all sleep again. Raises EngineDead
        too."""
        try:
            return self._own.wake()
        except EngineDead:
            raise
        except Exception:
            self._team.sleep(self._level)
            raise

    def with_weights(self, model: str) -> SleepingRunner:
        """See ``SleepingRunner.with_weights``. Raises EngineDead too."""
        return SleepingTeam(self._own.with_weights(model), self._team, level=0)
