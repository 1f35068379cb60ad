"""The ladder of sizes that steps are captured for, one at a time."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

from engine.errors import EngineDead
from engine.lora.store import AdapterStore

logger = logging.getLogger(__name__)

_Graph = TypeVar("_Graph")


class StepKind(NamedTuple):
    """The steps that a graph serves."""

    size: int  # the most rows, or tokens
    adapted: bool  # whether any row has an adapter
    on_trial: bool = False  # whether any row verifies drafts, in a recurrent model


class GraphLadder(Generic[_Graph]):
    """The captured sizes; they are captured when the engine has time, the largest first.

    Steps whose rows have adapters have graphs of their own, captured once there are adapters on the
    device, and again if these have moved there.

    Args:
        what: the steps, for the log.
        unit: what sizes are numbers of, for the log.
        sizes: ascending.
        capture: captures the steps of a kind.
        adapters: the store of the rows' adapters; None: steps with adapters are not captured.
        has_trials: steps on trial are captured, too, and last.
    """

    def __init__(
        self,
        what: str,
        unit: str,
        sizes: Sequence[int],
        capture: Callable[[StepKind], _Graph],
        adapters: AdapterStore | None,
        *,
        has_trials: bool = False,
    ) -> None:
        self._what = what
        self._unit = unit
        self._sizes = tuple(sizes)
        self._capture = capture
        self._adapters = adapters
        self._adapted_version = 0  # the store's version at capturing time
        self._graphs: dict[StepKind, _Graph] = {}
        self._stale: list[_Graph] = []  # perhaps being replayed
        self._has_trials = has_trials
        self._to_capture = self._kinds(adapted=False)  # from the end

    def find(
        self, count: int, most: int, *, adapted: bool, on_trial: bool = False
    ) -> _Graph | None:
        """Return the smallest graph that has been captured for ``count`` to ``most``."""
        if adapted:
            self._drop_stale()
        for size in self._sizes:
            graph = self._graphs.get(StepKind(size, adapted, on_trial))
            if graph is not None and count <= size <= most:
                return graph
        return None

    def capture_next(self) -> bool:
        """Capture one more size; return whether more remain.

        If a capture fails, for want of memory for instance, the steps of this size and of the
        smaller ones run without graphs: slower, with the same results. A lost device shows in the
        next step.

        Raises:
            EngineDead: another rank is gone, or this one is out of step.
        """
        if not self._to_capture:
            return False
        kind = self._to_capture.pop()
        try:
            self._graphs[kind] = self._capture(kind)
        except EngineDead:
            raise
        except Exception as error:
            which = self._what
            if kind.adapted or kind.on_trial:
                beside = ["adapters"] * kind.adapted + ["drafts"] * kind.on_trial
                which += " with " + " and ".join(beside)
            what = "%s of %d %s and fewer are not captured: %s"
            logger.warning(what, which, kind.size, self._unit, first_line(error))
            rest = [each for each in self._to_capture if each._replace(size=kind.size) != kind]
            self._to_capture = rest
        else:
            self._stale.clear()  # capturing has waited for the device
        if not self._to_capture:
            logger.info("captured %s of %d sizes", self._what, len(self._graphs))
        return bool(self._to_capture)

    def _drop_stale(self) -> None:
        """Drop the graphs of rows with adapters if the adapters have moved in memory."""
        store = self._adapters
        if store is None or store.version == self._adapted_version:
            return
        self._adapted_version = store.version
        adapted = [kind for kind in self._graphs if kind.adapted]
        self._stale += [self._graphs.pop(kind) for kind in adapted]
        plain = [kind for kind in self._to_capture if not kind.adapted]
        self._to_capture = self._kinds(adapted=True) + plain

    def _kinds(self, *, adapted: bool) -> list[StepKind]:
        """The kinds with or without adapters, the last to be captured first."""
        ways = (True, False) if self._has_trials else (False,)
        return [StepKind(size, adapted, on_trial) for on_trial in ways for size in self._sizes]


def first_line(error: BaseException) -> str:
    """Return the first line of what an error says."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
