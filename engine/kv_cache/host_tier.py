"""The host tier: which slots of host memory hold which evicted KV blocks.

             offload              complete_offloads              hold
      free ───────────► pending ─────────────────────► evictable ─────► held
       ▲                   │                             │  ▲            │
       │  cancel_offloads  │                             │  └──release───┘
       └───────────────────┘     offload another block ──┘
                                 (the one used longest ago becomes pending)

A block with a reusable prefix is *offloaded* when it is evicted from the device, and *loaded* into
a fresh block when a sequence needs that prefix. Slots are identified by the same digests as blocks
(``engine/kv_cache/prefix.py``), so prefixes that are separate on the device are separate here.

A slot can be matched once the step that fills it has landed. If that step fails, the contents of
the slot are undefined. A slot read by a step in flight is held until the step has landed, as it may
have to be read again. Loaded contents stay in their slot, so that a block evicted a second time is
not copied again.

No torch: slots are just numbers here; ``engine/kv_cache/host_store.py`` owns their memory.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.stats import TierStats
from engine.types import BlockCopy


class HostTier:
    """The bookkeeping of ``num_slots`` slots of one block each. O(1) per slot and operation."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a tier of {num_slots} slots holds nothing")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._pending: dict[bytes, int] = {}
        self._slot_of: dict[bytes, int] = {}  # of all slots with a block, also while steps read it
        self._evictable: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._num_holds = [0] * num_slots  # for each slot, the steps in flight that read it
        self._digest_of: list[bytes | None] = [None] * num_slots
        self._offloads: list[BlockCopy] = []  # of the step being planned
        self._num_offloaded = 0
        self._num_loaded = 0

    def find(self, digest: bytes) -> int | None:
        """The slot that holds the block with this digest, or None."""
        return self._slot_of.get(digest)

    def is_pending(self, digest: bytes) -> bool:
        """Whether a step in flight copies the block with this digest to the host."""
        return digest in self._pending

    def digest_of(self, slot: int) -> bytes:
        """The digest of the block in a slot."""
        digest = self._digest_of[slot]
        assert digest is not None
        return digest

    # ------------------------------------------------------------ from the device

    def offload(self, digest: bytes, block: int) -> None:
        """Offload ``block``, which the step being planned is about to overwrite.

        Does nothing if the block with this digest is already here, or if no slot is available.
        """
        slot = self._slot_of.get(digest)
        if slot is not None:
            if not self._num_holds[slot]:
                self._evictable.move_to_end(slot)
            return
        if digest in self._pending:
            return
        if self._free:
            slot = self._free.pop()
        elif self._evictable:
            slot = self._evict_oldest()
        else:
            return
        self._pending[digest] = slot
        self._digest_of[slot] = digest
        self._offloads.append(BlockCopy(block, slot))

    def take_offloads(self) -> tuple[BlockCopy, ...]:
        """The offloads of the plan just finished; report them later by ``complete_offloads`` or
        ``cancel_offloads``."""
        if not self._offloads:
            return ()
        offloads, self._offloads = tuple(self._offloads), []
        return offloads

    def complete_offloads(self, offloads: Iterable[BlockCopy]) -> None:
        """Note that the step with these offloads has landed; their slots can now be matched."""
        for _, slot in offloads:
            digest = self.digest_of(slot)
            self._slot_of[digest] = self._pending.pop(digest)
            self._evictable[slot] = None
            self._num_offloaded += 1

    def cancel_offloads(self, offloads: Iterable[BlockCopy]) -> None:
        """Note that the step with these offloads has failed; free their slots."""
        for _, slot in offloads:
            del self._pending[self.digest_of(slot)]
            self._digest_of[slot] = None
            self._free.append(slot)

    # ------------------------------------------------------------ to the device

    def hold(self, slots: Iterable[int]) -> None:
        """Hold slots that a step in flight reads."""
        for slot in slots:
            if not self._num_holds[slot]:
                del self._evictable[slot]
            self._num_holds[slot] += 1

    def release(self, slots: Iterable[int], *, loaded: bool = True) -> None:
        """Release slots once that step has landed, or if it does not load them after all."""
        for slot in slots:
            self._num_holds[slot] -= 1
            if not self._num_holds[slot]:
                self._evictable[slot] = None
            self._num_loaded += loaded

    def clear(self) -> None:
        """Drop all contents. Called only while no step is in flight."""
        for slot in self._evictable:
            self._digest_of[slot] = None
        self._free += self._evictable
        self._evictable.clear()
        self._slot_of.clear()

    # ------------------------------------------------------------ statistics and checks

    def stats(self, num_queries: int, num_hits: int) -> TierStats:
        """A snapshot, in O(1). The scheduler passes in the tokens looked up here, and found."""
        return TierStats(
            total=self.num_slots,
            used=self.num_slots - len(self._free),
            num_offloaded=self._num_offloaded,
            num_loaded=self._num_loaded,
            num_queries=num_queries,
            num_hits=num_hits,
        )

    def check(self) -> list[str]:
        """Check the bookkeeping; returns the problems found. Costs O(num_slots)."""
        problems: list[str] = []
        held = [slot for slot, holds in enumerate(self._num_holds) if holds]
        places = [*self._free, *self._evictable, *held, *self._pending.values()]
        if sorted(places) != list(range(self.num_slots)):
            problems.append(f"{len(places)} places for {self.num_slots} slots of the host")
        for digests in (self._slot_of, self._pending):
            for digest, slot in digests.items():
                if self._digest_of[slot] != digest:
                    problems.append(f"slot {slot} of the host: its digest is another one")
        num_named = len(self._slot_of) + len(self._pending)
        if num_named != self.num_slots - len(self._free):
            problems.append(f"{num_named} digests lead to slots of the host")
        return problems

    def _evict_oldest(self) -> int:
        slot, _ = self._evictable.popitem(last=False)
        del self._slot_of[self.digest_of(slot)]
        return slot
