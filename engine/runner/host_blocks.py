"""The exchange of blocks with the host's memory, by all who have a part in them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv_cache.host_store import HostStore
from engine.kv_cache.storage import KVCache
from engine.speculation.draft_model import DraftModel
from engine.types import StepPlan

if TYPE_CHECKING:
    from engine.parallel.leader import Team


class HostBlocks:
    """Does what plans say of the host.

    Args:
        cache: where blocks lie.
        num_slots: of the host, each for a block.
        draft: has blocks of the same numbers, which go along; None: there is none.
        team: ranks that have the rest of each block; None: there are none.

    Raises:
        ModelLoadError: the host does not have so much memory.
    """

    def __init__(
        self,
        cache: KVCache,
        num_slots: int,
        draft: DraftModel | None = None,
        team: Team | None = None,
    ) -> None:
        drafts = [] if draft is None else draft.tensors()
        self._store = HostStore([*cache.tensors(), *drafts], num_slots)
        self._draft = draft
        self._team = team

    def exchange(self, plan: StepPlan) -> None:
        """Copy blocks to the host before the step writes to them, and then from there. Raises
        EngineDead when a rank is gone."""
        offloads, loads = plan.offloads, plan.loads
        if not offloads and not loads:
            return
        if self._team is not None:
            self._team.exchange(offloads, loads)
        self._store.exchange(offloads, loads)
        if self._draft is not None:
            self._draft.exchange(offloads, loads)
