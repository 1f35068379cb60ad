"""Which slots of the host's memory hold which blocks that the KV cache had no room for.

                 leave                    landed                 hold
      free ────────────────► coming ──────────────► kept ◄────────────────► held
       ▲                       │                     │         let go
       └───────────────────────┴─────────────────────┘
                 void               makes room (the one used longest ago)

A block with a prefix worth keeping is *offloaded* when its place on the device is taken, and
*loaded* into a fresh block when somebody has that prefix. A slot is named as its block was, by the
digest of the whole text up to the block's end (``engine/kv_cache/prefix.py``), so what keeps
prefixes apart on the device keeps them apart here.

A slot is found once the step that fills it has landed: had that step failed, nothing would be known
of what it copied. One that a step under way reads is held until that step has landed, as it may
have to be read again. What is loaded stays here too, so that a block that is evicted for the second
time is not copied for the second time.

No torch: slots are numbers here, and ``engine/kv_cache/host_store.py`` owns the memory they name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from engine.types import BlockCopy, TierStats


class HostTier:
    """The books of ``num_slots`` slots, each of which has room for a block. Every operation costs
    O(1) a slot."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 1:
            raise ValueError(f"a tier of {num_slots} slots holds nothing")
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._coming: dict[bytes, int] = {}
        self._slot_of: dict[bytes, int] = {}  # of what is kept or held
        self._kept: OrderedDict[int, None] = OrderedDict()  # used longest ago first
        self._holds = [0] * num_slots  # steps under way that read each
        self._digest_of: list[bytes | None] = [None] * num_slots
        self._offloads: list[BlockCopy] = []  # of the step that is being planned
        self._num_offloaded = 0
        self._num_loaded = 0

    def find(self, digest: bytes) -> int | None:
        """The slot that holds a block of this digest; None: none does."""
        return self._slot_of.get(digest)

    def is_coming(self, digest: bytes) -> bool:
        """Whether a step under way copies a block of this digest to the host."""
        return digest in self._coming

    def digest_of(self, slot: int) -> bytes:
        """Of the block that a slot holds."""
        digest = self._digest_of[slot]
        assert digest is not None
        return digest

    # ------------------------------------------------------------ from the device

    def leave(self, digest: bytes, block: int) -> None:
        """``block`` is about to be written to by the step that is being planned, and holds the
        block of this digest. That is copied first, if it is not here and there is a slot for it."""
        slot = self._slot_of.get(digest)
        if slot is not None:
            if not self._holds[slot]:
                self._kept.move_to_end(slot)
            return
        if digest in self._coming:
            return
        if self._free:
            slot = self._free.pop()
        elif self._kept:
            slot = self._forget_oldest()
        else:
            return
        self._coming[digest] = slot
        self._digest_of[slot] = digest
        self._offloads.append(BlockCopy(block, slot))

    def take_offloads(self) -> tuple[BlockCopy, ...]:
        """Copies from blocks to slots for the plan that is finished now, to be told of later."""
        if not self._offloads:
            return ()
        offloads, self._offloads = tuple(self._offloads), []
        return offloads

    def landed(self, offloads: Iterable[BlockCopy]) -> None:
        """The step with these offloads has landed: they can be found."""
        for _, slot in offloads:
            digest = self.digest_of(slot)
            self._slot_of[digest] = self._coming.pop(digest)
            self._kept[slot] = None
            self._num_offloaded += 1

    def void(self, offloads: Iterable[BlockCopy]) -> None:
        """The step with these offloads has failed: nothing is known of what lies there."""
        for _, slot in offloads:
            del self._coming[self.digest_of(slot)]
            self._digest_of[slot] = None
            self._free.append(slot)

    # ------------------------------------------------------------ to the device

    def hold(self, slots: Iterable[int]) -> None:
        """A step under way reads these slots."""
        for slot in slots:
            if not self._holds[slot]:
                del self._kept[slot]
            self._holds[slot] += 1

    def let_go(self, slots: Iterable[int], *, loaded: bool = True) -> None:
        """That step has landed; or it does not load them, after all."""
        for slot in slots:
            self._holds[slot] -= 1
            if not self._holds[slot]:
                self._kept[slot] = None
            self._num_loaded += loaded

    def forget(self) -> None:
        """No slot holds anything any more; called while no step is under way."""
        for slot in self._kept:
            self._digest_of[slot] = None
        self._free += self._kept
        self._kept.clear()
        self._slot_of.clear()

    # ------------------------------------------------------------ what can be said of it

    def stats(self, num_queries: int, num_hits: int) -> TierStats:
        """A snapshot, in O(1). Only the scheduler knows how many tokens were looked for here, and
        how many were found."""
        return TierStats(
            total=self.num_slots,
            used=self.num_slots - len(self._free),
            num_offloaded=self._num_offloaded,
            num_loaded=self._num_loaded,
            num_queries=num_queries,
            num_hits=num_hits,
        )

    def check(self) -> list[str]:
        """What is wrong with the books; nothing if they are whole. Costs O(num_slots)."""
        problems: list[str] = []
        held = [slot for slot, holds in enumerate(self._holds) if holds]
        places = [*self._free, *self._kept, *held, *self._coming.values()]
        if sorted(places) != list(range(self.num_slots)):
            problems.append(f"{len(places)} places for {self.num_slots} slots of the host")
        for digests in (self._slot_of, self._coming):
            for digest, slot in digests.items():
                if self._digest_of[slot] != digest:
                    problems.append(f"slot {slot} of the host: its digest is another one")
        num_named = len(self._slot_of) + len(self._coming)
        if num_named != self.num_slots - len(self._free):
            problems.append(f"{num_named} digests lead to slots of the host")
        return problems

    def _forget_oldest(self) -> int:
        slot, _ = self._kept.popitem(last=False)
        del self._slot_of[self.digest_of(slot)]
        return slot
