"""The bookkeeping of host blocks; their contents are also checked by the lives."""

from __future__ import annotations

import pytest

from engine.kv_cache.host_tier import HostTier
from engine.kv_cache.pool import BlockPool, BlockTable, Prefix
from engine.types import BlockCopy

SIZE = 2
TEXTS = [[text * 10 + at for at in range(4)] for text in range(9)]  # two blocks each


def leave(tier: HostTier, *digests: bytes, lands: bool = True) -> tuple[BlockCopy, ...]:
    """Evict the blocks with these digests in one step."""
    for block, digest in enumerate(digests):
        tier.offload(digest, block)
    offloads = tier.take_offloads()
    if lands:
        tier.complete_offloads(offloads)
    assert tier.check() == []
    return offloads


def kept(tier: HostTier, *digests: bytes) -> list[bytes]:
    return [digest for digest in digests if tier.find(digest) is not None]


def test_what_was_used_longest_ago_makes_room() -> None:
    tier = HostTier(3)
    leave(tier, b"a", b"b", b"c")
    assert leave(tier, b"a") == (), "it is here already"
    (offload,) = leave(tier, b"d")
    assert kept(tier, b"a", b"b", b"c", b"d") == [b"a", b"c", b"d"]
    assert tier.find(b"d") == offload.target
    slot = tier.find(b"c")
    assert slot is not None
    tier.hold([slot])
    tier.release([slot])
    leave(tier, b"e")
    assert kept(tier, b"a", b"c", b"d", b"e") == [b"c", b"d", b"e"]
    stats = tier.stats(7, 4)
    assert (stats.total, stats.used, stats.num_offloaded, stats.num_loaded) == (3, 3, 5, 1)
    assert (stats.num_queries, stats.num_hits) == (7, 4)


def test_what_a_step_under_way_reads_is_not_given_to_others() -> None:
    tier = HostTier(2)
    leave(tier, b"a", b"b")
    slots = [slot for slot in map(tier.find, (b"a", b"b")) if slot is not None]
    tier.hold(slots)
    tier.hold(slots[:1])  # by two steps
    assert leave(tier, b"c") == ()
    tier.release(slots)
    assert leave(tier, b"c") == (BlockCopy(0, slots[1]),)
    assert kept(tier, b"a", b"b", b"c") == [b"a", b"c"]


def test_what_leaves_is_found_when_the_step_has_landed_and_not_at_all_when_it_failed() -> None:
    tier = HostTier(2)
    first = leave(tier, b"a", lands=False)
    assert tier.find(b"a") is None
    assert leave(tier, b"a", lands=False) == (), "it is on its way"
    second = leave(tier, b"b", lands=False)
    assert leave(tier, b"c", lands=False) == (), "both slots are being written"
    tier.cancel_offloads(first)
    tier.complete_offloads(second)
    assert kept(tier, b"a", b"b") == [b"b"]
    assert tier.check() == []
    leave(tier, b"a")
    assert kept(tier, b"a", b"b") == [b"a", b"b"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda tier: tier._free.pop(),
        lambda tier: tier._evictable.clear(),
        lambda tier: tier._num_holds.__setitem__(0, 1),
        lambda tier: tier._digest_of.__setitem__(tier.find(b"a"), b"x"),
        lambda tier: tier._slot_of.pop(b"a"),
    ],
)
def test_the_check_finds_damage(damage) -> None:
    tier = HostTier(3)
    leave(tier, b"a", b"b")
    pool = BlockPool(4, SIZE, tier=tier)
    assert pool.check([]) == []
    damage(tier)
    assert pool.check([])


class Filled:
    """A pool for two texts, in which four have been computed, one after the other."""

    def __init__(self, num_slots: int = 20, window: int | None = None) -> None:
        self.tier = HostTier(num_slots)
        self.pool = BlockPool(4, SIZE, tier=self.tier)
        self.window = window
        self.where: dict[tuple[str, int], tuple[int, ...]] = {}  # the location of each text
        for token_ids in TEXTS[:4]:
            self.compute(token_ids)

    def compute(self, token_ids: list[int]) -> None:
        table, chain = BlockTable(), self.pool.chain("")
        for index, block in enumerate(self.pool.extend(table, 2)):
            self.land()
            self.where["block", block] = tuple(token_ids[: (index + 1) * SIZE])
        self.pool.publish(chain, token_ids, table, 0, 4)
        self.pool.release(table)

    def land(self) -> None:
        offloads = self.tier.take_offloads()
        for block, slot in offloads:
            self.where["slot", slot] = self.where["block", block]
        self.tier.complete_offloads(offloads)

    def find(self, token_ids: list[int]) -> Prefix:
        return self.pool.match(self.pool.chain(""), [*token_ids, 0], self.window)


def test_a_prefix_goes_on_in_the_hosts_memory_where_it_ends_on_the_device() -> None:
    filled = Filled()
    table = BlockTable()
    filled.pool.extend(table, 1)  # evicts the end of the third text, too
    filled.land()
    found = filled.find(TEXTS[2])
    assert [block >= 0 for block in found.block_ids] == [True, False]
    assert found.num_on_host == 1
    assert filled.pool.num_free_blocks_needed(found.block_ids) == 2
    mine = BlockTable()
    (load,) = filled.pool.adopt(mine, found)
    assert load.target == mine.block_ids[1] not in table.block_ids
    assert filled.where["slot", load.source] == tuple(TEXTS[2])
    assert filled.where["block", mine.block_ids[0]] == tuple(TEXTS[2][:SIZE])
    assert filled.pool.check([table, mine]) == []
    # Another sequence with the same prefix shares the blocks that the first one loads.
    shared = filled.find(TEXTS[2])
    assert shared.block_ids == mine.block_ids
    assert filled.pool.adopt(BlockTable(), shared) == []


def test_blocks_that_a_prefix_has_are_held_before_others_make_room_for_it() -> None:
    filled = Filled()
    table = BlockTable()
    filled.pool.extend(table, 1)
    filled.land()
    mine = BlockTable()
    filled.pool.adopt(mine, filled.find(TEXTS[2]))
    # Only the fourth text was left to evict, not the beginning of this one.
    assert filled.pool.num_free == 1
    assert filled.find(TEXTS[2]) == (0, mine.block_ids)


def test_a_prefix_on_its_way_to_the_host_is_waited_for() -> None:
    filled = Filled()
    table, pool = BlockTable(), filled.pool
    chain, text = pool.chain(""), [*TEXTS[2], 0]
    pool.extend(table, 1)  # the end of the third text
    found = pool.match(chain, text)
    assert len(found.block_ids) == 1
    assert pool.is_next_block_pending(chain, text, found)
    pool.touch(found)
    filled.land()
    found = pool.match(chain, text)
    assert not pool.is_next_block_pending(chain, text, found)
    assert len(found.block_ids) == 2
    pool.extend(table, 2)  # evicts the fourth text, which was looked up less recently
    filled.land()
    assert pool.match(chain, text).block_ids[0] >= 0
    assert not pool.is_next_block_pending(chain, [9, 9, 9], pool.match(pool.chain(""), [9, 9, 9]))


def test_with_a_window_too_blocks_of_the_host_are_blocks() -> None:
    filled = Filled(window=2)
    found = filled.find(TEXTS[0])
    assert (found.num_skipped, found.num_on_host, len(found.block_ids)) == (1, 1, 1)
    table = BlockTable()
    (load,) = filled.pool.adopt(table, found)
    assert filled.where["slot", load.source] == tuple(TEXTS[0])
    assert table.capacity == 4
    assert table.num_held == 1


def test_salts_keep_prefixes_apart_on_the_host() -> None:
    filled = Filled()
    assert filled.find(TEXTS[0]).num_on_host == 2
    pool = filled.pool
    assert pool.match(pool.chain("another"), [*TEXTS[0], 0]).block_ids == []
    assert pool.match(pool.chain("", "adapter"), [*TEXTS[0], 0]).block_ids == []
