"""Block allocation: which blocks of the KV cache are in use, and which hold a reusable prefix.

A block is *held* (referenced by at least one table) or *free*. A free block may still be *cached*:
it holds a full block of some prefix, and any sequence with that prefix can reuse it until it is
allocated for something else.

                 allocate                    release (last reference)
    free, empty ──────────► held ─────────────────────────────────────► free, empty
         ▲                   │ ▲                                              (front of the queue)
         │                   │ │ share
         │           publish │ │      release (last reference)
         │                   ▼ │ ────────────────────────────────────► free, cached
         └──────────────── evicted by allocate ◄─────────────────────────────┘ (back of the queue)

With a host tier, evicted blocks are copied to host memory and found there by the same digest
(``engine/kv_cache/host_tier.py``).

Empty blocks are allocated first, then the least recently freed. A table is released tail first, so
that a prefix is evicted from its end and what remains can still be matched. Every operation costs
O(1) per block.

On a CPU a block takes no memory until it is first written. To limit memory use there, at most
``max_idle`` idle prefixes are kept while new blocks remain; beyond that the oldest is evicted
instead. The memory used then follows what runs at once, not everything that ever ran.

No torch: blocks are just numbers here; ``engine/kv_cache/storage.py`` owns their memory.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.prefix import PrefixChain
from engine.kv_cache.snapshots import SnapshotPool
from engine.media import Media
from engine.stats import BlockStats
from engine.types import BlockCopy


class BlockTable:
    """The blocks of one sequence, in the order of its tokens. Append-only until released.

    If every layer has a sliding window, the first blocks are freed as the sequence grows. Their ids
    stay in the list, so that a token's block is still found by its position, but other sequences
    may own them by now.
    """

    __slots__ = ("block_ids", "capacity", "num_freed")

    def __init__(self) -> None:
        self.block_ids: list[int] = []  # written only by the BlockPool
        self.capacity = 0  # token slots: len(block_ids) * block_size
        self.num_freed = 0  # leading blocks that have been freed

    @property
    def num_held(self) -> int:
        """The number of blocks that it references."""
        return len(self.block_ids) - self.num_freed


class Prefix(NamedTuple):
    """Blocks that hold the beginning of a text, or that part of it which later tokens attend to."""

    num_skipped: int  # blocks before these, which are not needed
    block_ids: Sequence[int]  # a negative number ~s: host slot s has the contents

    @property
    def num_on_host(self) -> int:
        """The number of blocks to be loaded from the host."""
        return sum(block < 0 for block in self.block_ids)


class BlockPool:
    """Reference counts, free queue and prefix index of ``num_blocks`` blocks.

    Args:
        num_blocks: number of blocks; ids start at 0.
        block_size: tokens per block.
        enable_prefix_caching: if false, nothing is published or matched.
        hash_key: key of the prefix digests, 16 to 64 bytes; None: random.
        max_idle: free blocks that keep their prefix while never-used blocks remain; None: all.
        tier: where evicted blocks are copied; None: nowhere.
        snapshots: snapshots of recurrent states, without which a recurrent model cannot continue
            from cached blocks; None: the model is not recurrent, or has none.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        enable_prefix_caching: bool = True,
        hash_key: bytes | None = None,
        max_idle: int | None = None,
        tier: HostTier | None = None,
        snapshots: SnapshotPool | None = None,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"a pool of {num_blocks} blocks of {block_size} tokens holds nothing")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.tier = tier
        self.snapshots = snapshots
        self._caching = enable_prefix_caching
        self._hash_key = secrets.token_bytes(32) if hash_key is None else hash_key
        self._references = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # empty
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and cached, oldest first
        self._max_idle = num_blocks if max_idle is None else max_idle
        self._num_used = 0  # blocks ever allocated: those with lower ids
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._num_shared = 0  # blocks with more than one reference

    @property
    def num_free(self) -> int:
        """The number of blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ held blocks

    def extend(self, table: BlockTable, count: int) -> list[int]:
        """Append ``count`` blocks with unspecified contents to ``table``; returns their ids.

        The caller has checked that ``num_free`` is at least ``count``.
        """
        taken = [self._take_free() for _ in range(count)]
        self._append(table, taken)
        return taken

    def adopt(self, table: BlockTable, prefix: Prefix) -> list[BlockCopy]:
        """Start an empty table with a prefix; returns the loads from the host that it needs.

        The caller has checked that ``num_free_blocks_needed`` blocks are free. Other sequences can
        match the loaded blocks at once, since steps that read them run after the loads. The slots
        are held until the caller lets the tier release them.
        """
        table.block_ids = [0] * prefix.num_skipped
        table.num_freed = prefix.num_skipped
        slots = [~block for block in prefix.block_ids if block < 0]
        if not slots or self.tier is None:
            self.share(table, prefix.block_ids)
            return []
        # Hold all blocks before allocating any, since allocation evicts.
        self.tier.hold(slots)
        self._hold(block for block in prefix.block_ids if block >= 0)
        block_ids = [self._take_free() if block < 0 else block for block in prefix.block_ids]
        self._append(table, block_ids)
        loads: list[BlockCopy] = []
        for found, block in zip(prefix.block_ids, block_ids, strict=True):
            if found < 0:
                digest = self.tier.digest_of(~found)
                self._digest_of[block], self._block_of[digest] = digest, block
                loads.append(BlockCopy(~found, block))
        return loads

    def share(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        """Append blocks that are cached or held by others, adding a reference to each."""
        self._hold(block_ids)
        self._append(table, block_ids)

    def fork(self, table: BlockTable, num_tokens: int) -> tuple[BlockTable, BlockCopy | None]:
        """Make a table that continues the first ``num_tokens`` tokens of ``table`` independently.

        Full blocks are shared. A partly filled last block will be written by both sides, so the
        fork gets a fresh block in its place; the returned copy into it must be made before either
        side writes (copy-on-write at a write that is certain). The caller has checked that a block
        is free if one is needed. Blocks that ``table`` has freed are missing in the fork too.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        fork = BlockTable()
        fork.num_freed = table.num_freed
        fork.block_ids = table.block_ids[: fork.num_freed]
        self.share(fork, table.block_ids[fork.num_freed : num_full])
        if not rest:
            return fork, None
        (target,) = self.extend(fork, 1)
        return fork, BlockCopy(table.block_ids[num_full], target)

    def release(self, table: BlockTable) -> None:
        """Drop all references of ``table``, which is empty afterwards."""
        self._release_blocks(table.block_ids[table.num_freed :])
        table.block_ids = []
        table.capacity = table.num_freed = 0

    def free_leading_blocks(self, table: BlockTable, num_tokens: int) -> None:
        """Free the blocks of ``table`` that hold only its first ``num_tokens`` tokens.

        No token reads these any more.
        """
        passed = num_tokens // self.block_size
        if passed > table.num_freed:
            self._release_blocks(table.block_ids[table.num_freed : passed])
            table.num_freed = passed

    # ------------------------------------------------------------ cached prefixes

    def chain(self, salt: str, adapter: str = "", media: Sequence[Media] = ()) -> PrefixChain:
        """Make an empty chain of digests for one sequence with these images or audio."""
        return PrefixChain(self._hash_key, salt, self.block_size, adapter, media)

    def match(
        self, chain: PrefixChain, token_ids: Sequence[int], window: int | None = None
    ) -> Prefix:
        """The longest cached prefix of ``token_ids``; ``adopt`` it to hold it.

        It never covers all tokens, since the last one must be computed for its logits. If tokens
        attend to a ``window`` of positions, their own included, only the blocks within the window
        of the next token have to be present.
        """
        if not self._caching:
            return Prefix(0, ())
        size, find = self.block_size, self._block_of.get if self.tier is None else self._find
        limit = (len(token_ids) - 1) // size
        digests = chain.digests(token_ids, limit)
        blocks: list[int] = []
        if window is None:
            for digest in digests[:limit]:
                block = find(digest)
                if block is None:
                    break
                blocks.append(block)
            return Prefix(0, blocks)
        # From the end: a missing block shortens the prefix to what comes before it.
        index = end = limit
        while index > max(0, (end * size - window + 1) // size):
            index -= 1
            block = find(digests[index])
            if block is None:
                end = index
                blocks = []
            else:
                blocks.append(block)
        return Prefix(index, blocks[::-1])

    def is_next_block_pending(
        self, chain: PrefixChain, token_ids: Sequence[int], prefix: Prefix
    ) -> bool:
        """Whether a matched prefix may soon be longer: its next block is being offloaded."""
        if self.tier is None:
            return False
        digest = self.next_digest(chain, token_ids, prefix)
        return digest is not None and self.tier.is_pending(digest)

    def next_digest(
        self, chain: PrefixChain, token_ids: Sequence[int], prefix: Prefix
    ) -> bytes | None:
        """The digest of the block that a matched prefix lacks first; None: it lacks none."""
        end = prefix.num_skipped + len(prefix.block_ids)
        if not self._caching or end >= (len(token_ids) - 1) // self.block_size:
            return None
        return chain.digests(token_ids, end + 1)[end]

    def is_cached(self, digest: bytes) -> bool:
        """Whether a block with this digest can be matched, on the device or on the host."""
        return self._find(digest) is not None

    def touch(self, prefix: Prefix) -> None:
        """Make the free blocks of a prefix that will be adopted soon the last to be evicted."""
        for block in reversed(prefix.block_ids):
            if block in self._idle:
                self._idle.move_to_end(block)

    def num_free_blocks_needed(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks would come out of ``num_free`` if they were adopted.

        Those are the ones that are free now, and those to be loaded from the host.
        """
        references = self._references
        return sum(block < 0 or not references[block] for block in block_ids)

    def publish(
        self, chain: PrefixChain, token_ids: Sequence[int], table: BlockTable, start: int, end: int
    ) -> None:
        """Make the blocks of ``table`` that end at a token in ``(start, end]`` findable.

        Their contents have been computed. If two sequences computed the same contents in parallel,
        the first block published is found; the other is empty once its sequence frees it.
        """
        if not self._caching:
            return
        first, last = max(start // self.block_size, table.num_freed), end // self.block_size
        digests = chain.digests(token_ids, last)
        for index in range(first, last):
            digest, block = digests[index], table.block_ids[index]
            if self._digest_of[block] is None and digest not in self._block_of:
                self._digest_of[block] = digest
                self._block_of[digest] = block

    def reset_prefix_cache(self) -> None:
        """Drop all cached contents. Called only while no block is held."""
        self._free.update(self._idle)
        self._idle.clear()
        self._free = OrderedDict.fromkeys(sorted(self._free))
        self._num_used = 0
        self._digest_of = [None] * self.num_blocks
        self._block_of.clear()
        if self.tier is not None:
            self.tier.clear()
        if self.snapshots is not None:
            self.snapshots.clear()

    # ------------------------------------------------------------ statistics and checks

    def stats(self, num_wasted_slots: int = 0) -> BlockStats:
        """A snapshot, in O(1). The scheduler passes in how many held slots hold no token."""
        free = self.num_free
        return BlockStats(
            total=self.num_blocks,
            held=self.num_blocks - free,
            shared=self._num_shared,
            cached=len(self._block_of),
            free=free,
            wasted_slots=num_wasted_slots,
            block_size=self.block_size,
            snapshots=0 if self.snapshots is None else self.snapshots.num_usable,
        )

    def usage_snapshot(self) -> tuple[list[int], list[int]]:
        """Reference counts, and the free blocks that hold a prefix. Copies, in O(num_blocks)."""
        return list(self._references), list(self._idle)

    def check(self, tables: Iterable[BlockTable]) -> list[str]:
        """Check the bookkeeping against all tables in use; returns the problems found.

        Costs O(num_blocks): for tests, and for the engine when idle.
        """
        problems = [] if self.tier is None else self.tier.check()
        problems += [] if self.snapshots is None else self.snapshots.check()
        holders: Counter[int] = Counter()
        for table in tables:
            holders.update(table.block_ids[table.num_freed :])
            if table.capacity != len(table.block_ids) * self.block_size:
                problems.append(f"a table of {len(table.block_ids)} blocks says {table.capacity}")
        for block, references in enumerate(self._references):
            if references != holders[block]:
                problems.append(f"block {block}: {references} references, {holders[block]} holders")
            is_free = block in self._free or block in self._idle
            if (references == 0) != is_free:
                where = "is free" if is_free else "is not free"
                problems.append(f"block {block}: {references} references, and it {where}")
            digest = self._digest_of[block]
            if digest is not None and self._block_of.get(digest) != block:
                problems.append(f"block {block}: its digest does not lead back to it")
        num_published = sum(digest is not None for digest in self._digest_of)
        if num_published != len(self._block_of):
            problems.append(f"{len(self._block_of)} digests lead to {num_published} blocks")
        num_shared = sum(references > 1 for references in self._references)
        if num_shared != self._num_shared:
            problems.append(f"{num_shared} blocks are shared, {self._num_shared} counted")
        return problems

    # ------------------------------------------------------------ helpers

    def _take_free(self) -> int:
        block = self._next_free()
        digest = self._digest_of[block]
        if digest is not None:  # evicted: its contents are about to be overwritten
            self._digest_of[block] = None
            del self._block_of[digest]
            if self.tier is not None:
                self.tier.offload(digest, block)
        self._references[block] = 1
        return block

    def _next_free(self) -> int:
        """Dequeue an empty block, or that of the longest-idle prefix."""
        block = next(iter(self._free), None)
        if block is None or (block >= self._num_used and len(self._idle) > self._max_idle):
            block, _ = self._idle.popitem(last=False)
            return block
        del self._free[block]
        self._num_used = max(self._num_used, block + 1)
        return block

    def _release_blocks(self, block_ids: Sequence[int]) -> None:
        references, free = self._references, self._free
        for block in reversed(block_ids):
            references[block] -= 1
            if references[block] == 1:
                self._num_shared -= 1
            elif references[block] == 0:
                if self._digest_of[block] is not None:
                    self._idle[block] = None
                else:
                    free[block] = None
                    free.move_to_end(block, last=False)  # ahead of those never used

    def _find(self, digest: bytes) -> int | None:
        """Where the block of a digest is, encoded as in ``Prefix.block_ids``; None: nowhere."""
        block = self._block_of.get(digest)
        if block is None and self.tier is not None:
            slot = self.tier.find(digest)
            return None if slot is None else ~slot
        return block

    def _hold(self, block_ids: Iterable[int]) -> None:
        references = self._references
        for block in block_ids:
            if references[block] == 0:
                del self._idle[block]
            elif references[block] == 1:
                self._num_shared += 1
            references[block] += 1

    def _append(self, table: BlockTable, block_ids: Sequence[int]) -> None:
        table.block_ids.extend(block_ids)
        table.capacity = len(table.block_ids) * self.block_size
