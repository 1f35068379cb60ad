"""Who holds which block of the KV cache, and which blocks hold a prefix worth keeping.

A block is *held* (referenced by at least one table) or *free*; a free block may still be *cached*:
it holds a full block of some prefix and can be taken back by whoever has that prefix, until it is
handed out for something else.

                 allocate                    release (last reference)
    free, empty ──────────► held ─────────────────────────────────────► free, empty
         ▲                   │ ▲                                              (front of the queue)
         │                   │ │ share
         │           publish │ │      release (last reference)
         │                   ▼ │ ────────────────────────────────────► free, cached
         └──────────────── evicted by allocate ◄─────────────────────────────┘ (back of the queue)

What is evicted goes to the host's memory where there is a tier there, and is found there by the
same digest (``engine/kv_cache/host_tier.py``).

Blocks that hold nothing are handed out first, then the least recently freed. A table is released
tail first, so that a prefix loses its end before its beginning and what is left can still be
matched. Every operation costs O(1) a block.

On a CPU a block costs no memory before it is first written. There only so many idle prefixes are
kept by writing to new blocks; beyond that the oldest makes room, so that the memory taken follows
what runs at once and not all that has ever run.

No torch: blocks are numbers here, and ``engine/kv_cache/storage.py`` owns the memory they name.
"""

from __future__ import annotations

import secrets
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from engine.images.nouns import Image
from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.prefix import PrefixChain
from engine.kv_cache.snapshots import SnapshotPool
from engine.types import BlockCopy, BlockStats


class BlockTable:
    """The blocks of one sequence, in the order of its tokens. Append-only until released.

    In a model that looks back a window's length, the first ones are given back as the sequence
    grows. Their ids keep their places, so that a token's block is still found by its position, but
    they may be anybody's.
    """

    __slots__ = ("block_ids", "capacity", "num_passed")

    def __init__(self) -> None:
        self.block_ids: list[int] = []  # written by the BlockPool alone
        self.capacity = 0  # token slots: len(block_ids) * block_size
        self.num_passed = 0  # of the first blocks, which are given back

    @property
    def num_held(self) -> int:
        """Blocks that it references."""
        return len(self.block_ids) - self.num_passed


class Prefix(NamedTuple):
    """Blocks that hold the beginning of a text, or of it what those who go on will see."""

    num_passed: int  # blocks before these, which nobody needs
    block_ids: Sequence[int]  # ~s, a negative number: slot s of the host has it, and no block

    @property
    def num_on_host(self) -> int:
        """Blocks that are to be loaded."""
        return sum(block < 0 for block in self.block_ids)


class BlockPool:
    """Reference counts, free queue and prefix index over ``num_blocks`` blocks.

    Args:
        num_blocks: blocks there are, numbered from 0.
        block_size: tokens a block.
        enable_prefix_caching: off, nothing is ever published or matched.
        hash_key: key of the prefix digests, 16 to 64 bytes; None draws one.
        max_idle: free blocks that keep their prefix while there are blocks never used before;
            None: all of them.
        tier: where blocks go that are evicted; None: nowhere.
        snapshots: of states, without which blocks of the model that has them are not gone on from;
            None: it has none.
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
        self._idle: OrderedDict[int, None] = OrderedDict()  # free and cached, the oldest first
        self._max_idle = num_blocks if max_idle is None else max_idle
        self._num_used = 0  # blocks that have ever been handed out: those of lower numbers
        self._digest_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._num_shared = 0  # blocks with more than one reference

    @property
    def num_free(self) -> int:
        """Blocks that can be allocated now, cached ones included."""
        return len(self._free) + len(self._idle)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------ held blocks

    def extend(self, table: BlockTable, count: int) -> list[int]:
        """Append ``count`` blocks of unspecified contents to ``table``; returns their ids.

        The caller has seen that ``num_free`` is at least ``count``.
        """
        taken = [self._take_free() for _ in range(count)]
        self._append(table, taken)
        return taken

    def adopt(self, table: BlockTable, prefix: Prefix) -> list[BlockCopy]:
        """Begin an empty table with a prefix; returns what must be loaded into blocks of it.

        The caller has seen that there are as many free blocks as ``num_unheld`` tells. Others find
        the loaded blocks at once: no step that reads them is computed before they are loaded. The
        slots are held until the caller tells the tier to let them go.
        """
        table.block_ids = [0] * prefix.num_passed
        table.num_passed = prefix.num_passed
        slots = [~block for block in prefix.block_ids if block < 0]
        if not slots or self.tier is None:
            self.share(table, prefix.block_ids)
            return []
        # All is held before a block is taken: what is taken is forgotten.
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
        """Append blocks that are cached or held by others, and hold them once more."""
        self._hold(block_ids)
        self._append(table, block_ids)

    def fork(self, table: BlockTable, num_tokens: int) -> tuple[BlockTable, BlockCopy | None]:
        """A table that continues the first ``num_tokens`` tokens of ``table`` on its own.

        Full blocks are shared. A block that those tokens fill only in part is one that both
        sides go on to write, so the fork has a fresh block in its place, to which the returned
        copy must be made before either writes (copy-on-write, at the write that is certain to
        come). The caller has seen that a block is free if one is needed for that.
        What ``table`` has given back the fork does not have either.
        """
        num_full, rest = divmod(num_tokens, self.block_size)
        fork = BlockTable()
        fork.num_passed = table.num_passed
        fork.block_ids = table.block_ids[: fork.num_passed]
        self.share(fork, table.block_ids[fork.num_passed : num_full])
        if not rest:
            return fork, None
        (target,) = self.extend(fork, 1)
        return fork, BlockCopy(table.block_ids[num_full], target)

    def release(self, table: BlockTable) -> None:
        """Give all of ``table``'s references up; it is empty afterwards."""
        self._give_up(table.block_ids[table.num_passed :])
        table.block_ids = []
        table.capacity = table.num_passed = 0

    def pass_by(self, table: BlockTable, num_tokens: int) -> None:
        """Give the blocks of ``table`` up that hold none but its first ``num_tokens`` tokens, which
        nobody reads any more."""
        passed = num_tokens // self.block_size
        if passed > table.num_passed:
            self._give_up(table.block_ids[table.num_passed : passed])
            table.num_passed = passed

    # ------------------------------------------------------------ cached prefixes

    def chain(self, salt: str, adapter: str = "", images: Sequence[Image] = ()) -> PrefixChain:
        """An empty chain of digests for one sequence, whose prompt holds these images."""
        return PrefixChain(self._hash_key, salt, self.block_size, adapter, images)

    def match(
        self, chain: PrefixChain, token_ids: Sequence[int], window: int | None = None
    ) -> Prefix:
        """The longest cached prefix of ``token_ids``; ``adopt`` it to hold it.

        Never the whole of it: at least the last token must be computed, for its logits. Where a
        token sees a ``window`` of positions, its own included, blocks that lie before those that
        the next token sees need not be there.
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
        # From the end: a block that is missing ends the prefix before it.
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

    def awaits(self, chain: PrefixChain, token_ids: Sequence[int], prefix: Prefix) -> bool:
        """Whether a prefix that was found may be longer in a moment: the block behind it is on its
        way to the host."""
        end = prefix.num_passed + len(prefix.block_ids)
        if self.tier is None or end >= (len(token_ids) - 1) // self.block_size:
            return False
        return self.tier.is_coming(chain.digests(token_ids, end + 1)[end])

    def touch(self, prefix: Prefix) -> None:
        """Somebody is about to hold these blocks: those that are free make room last."""
        for block in reversed(prefix.block_ids):
            if block in self._idle:
                self._idle.move_to_end(block)

    def num_unheld(self, block_ids: Iterable[int]) -> int:
        """How many of these are free now, or to be loaded into blocks that are: a prefix of them
        takes that many from ``num_free``."""
        references = self._references
        return sum(block < 0 or not references[block] for block in block_ids)

    def publish(
        self, chain: PrefixChain, token_ids: Sequence[int], table: BlockTable, start: int, end: int
    ) -> None:
        """Make the blocks of ``table`` that end at a token in ``(start, end]`` findable.

        Their contents are computed. Of two blocks with the same contents, computed side by side,
        the first published is found; the other serves its own sequence and then is empty.
        """
        if not self._caching:
            return
        first, last = max(start // self.block_size, table.num_passed), end // self.block_size
        digests = chain.digests(token_ids, last)
        for index in range(first, last):
            digest, block = digests[index], table.block_ids[index]
            if self._digest_of[block] is None and digest not in self._block_of:
                self._digest_of[block] = digest
                self._block_of[digest] = block

    def forget(self) -> None:
        """No block holds anything any more; called while none is held."""
        self._free.update(self._idle)
        self._idle.clear()
        self._free = OrderedDict.fromkeys(sorted(self._free))
        self._num_used = 0
        self._digest_of = [None] * self.num_blocks
        self._block_of.clear()
        if self.tier is not None:
            self.tier.forget()
        if self.snapshots is not None:
            self.snapshots.forget()

    # ------------------------------------------------------------ what can be said of it

    def stats(self, num_wasted_slots: int = 0) -> BlockStats:
        """A snapshot, in O(1). Only the scheduler knows how many held slots hold no token."""
        free = self.num_free
        return BlockStats(
            total=self.num_blocks,
            held=self.num_blocks - free,
            shared=self._num_shared,
            cached=len(self._block_of),
            free=free,
            wasted_slots=num_wasted_slots,
            block_size=self.block_size,
            snapshots=0 if self.snapshots is None else self.snapshots.num_found,
        )

    def survey(self) -> tuple[list[int], list[int]]:
        """References by block, and the free blocks that hold a prefix. Copies, in O(num_blocks)."""
        return list(self._references), list(self._idle)

    def check(self, tables: Iterable[BlockTable]) -> list[str]:
        """What is wrong with the pool, given all tables there are; nothing if it is whole.

        Costs O(num_blocks): for tests, and for the engine when it has nothing else to do.
        """
        problems = [] if self.tier is None else self.tier.check()
        problems += [] if self.snapshots is None else self.snapshots.check()
        holders: Counter[int] = Counter()
        for table in tables:
            holders.update(table.block_ids[table.num_passed :])
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
        if digest is not None:  # evicted: what it held is about to be overwritten
            self._digest_of[block] = None
            del self._block_of[digest]
            if self.tier is not None:
                self.tier.leave(digest, block)
        self._references[block] = 1
        return block

    def _next_free(self) -> int:
        """Off its queue: a block that holds nothing, or that of the prefix idle for longest."""
        block = next(iter(self._free), None)
        if block is None or (block >= self._num_used and len(self._idle) > self._max_idle):
            block, _ = self._idle.popitem(last=False)
            return block
        del self._free[block]
        self._num_used = max(self._num_used, block + 1)
        return block

    def _give_up(self, block_ids: Sequence[int]) -> None:
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
                    free.move_to_end(block, last=False)  # before those never used

    def _find(self, digest: bytes) -> int | None:
        """Where the block of a digest is, as ``Prefix.block_ids`` has it; None: nowhere."""
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
