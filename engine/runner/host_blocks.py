"""Exchange KV blocks with host memory, in the model, its draft model and all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kv_cache.host_store import HostStore
from engine.kv_cache.storage import KVCache
from engine.speculation.draft_model import DraftModel
from engine.types import StepPlan

if TYPE_CHECKING:
    from engine.parallel.leader import Team


class HostBlocks:
    """Carries out the offloads and loads of plans.

    Args:
        cache: the blocks on the device.
        num_slots: block-sized slots in host memory.
        draft: the draft model, whose blocks have the same ids and are copied too; None: there is
            none.
        team: the ranks with the other shards of each block; None: there are none.

    Raises:
        ModelLoadError: the host does not have enough memory.
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
        """Offload blocks to the host before the step overwrites them, then load others from it.

        Raises EngineDead when a rank is gone.
        """
        offloads, loads = plan.offloads, plan.loads
        if not offloads and not loads:
            return
        if self._team is not None:
            self._team.swap_blocks(offloads, loads)
        self._store.exchange(offloads, loads)
        if self._draft is not None:
            self._draft.exchange(offloads, loads)
