"""The block pool, compared with a simple model of it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    rule,
)

from engine.kv_cache.pool import BlockPool, BlockTable
from engine.kv_cache.prefix import PrefixChain

NUM_BLOCKS, SIZE = 8, 2
tokens_of_few_kinds = st.lists(st.integers(0, 1), min_size=1, max_size=12)


class _Holder:
    """A sequence, as far as a pool sees one."""

    def __init__(self, pool: BlockPool, salt: str, token_ids: list[int]) -> None:
        self.salt, self.token_ids = salt, token_ids
        self.chain: PrefixChain = pool.chain(salt)
        self.table = BlockTable()
        self.num_computed = 0


class PoolMachine(RuleBasedStateMachine):
    """Sequences with few kinds of tokens arrive, grow, fork and leave.

    The model is what each block must contain: the prefix that its last writer computed.
    """

    holders = Bundle("holders")
    max_idle = NUM_BLOCKS

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, SIZE, max_idle=self.max_idle)
        self.ever_held: set[int] = set()
        self.most_held = 0
        self.live: list[_Holder] = []
        self.contents: dict[int, tuple[str, tuple[int, ...]]] = {}

    @rule(target=holders, salt=st.sampled_from(["", "a"]), token_ids=tokens_of_few_kinds)
    def arrive(self, salt: str, token_ids: list[int]) -> _Holder:
        holder = _Holder(self.pool, salt, token_ids)
        found = self.pool.match(holder.chain, token_ids)
        shared = found.block_ids
        assert len(shared) * SIZE < len(token_ids), "a match must leave a token to compute"
        for index, block in enumerate(shared):
            prefix = tuple(token_ids[: (index + 1) * SIZE])
            assert self.contents[block] == (salt, prefix), "matched another prefix"
        self.pool.adopt(holder.table, found)
        holder.num_computed = holder.table.capacity
        self.live.append(holder)
        return holder

    @rule(holder=holders, count=st.integers(1, 5))
    def compute(self, holder: _Holder, count: int) -> None:
        start = holder.num_computed
        end = min(start + count, len(holder.token_ids))
        missing = self.pool.blocks_for(end) - len(holder.table.block_ids)
        if missing > self.pool.num_free:
            return
        self.pool.extend(holder.table, missing)
        for position in range(start, end):
            block = holder.table.block_ids[position // SIZE]
            owners = [other for other in self.live if block in other.table.block_ids]
            assert owners == [holder], "a shared block is written"
            self.contents[block] = (holder.salt, tuple(holder.token_ids[: position + 1]))
        holder.num_computed = end
        self.pool.publish(holder.chain, holder.token_ids, holder.table, start, end)

    @rule(target=holders, holder=holders, data=st.data())
    def fork(self, holder: _Holder, data: st.DataObject) -> _Holder:
        num_tokens = data.draw(st.integers(0, holder.num_computed))
        fork = _Holder(self.pool, holder.salt, list(holder.token_ids))
        if num_tokens % SIZE == 0 or self.pool.num_free:
            fork.table, copy = self.pool.fork(holder.table, num_tokens)
            fork.num_computed = num_tokens
            assert (copy is not None) == (num_tokens % SIZE > 0)
            if copy is not None:
                assert copy.source in holder.table.block_ids
                assert copy.target == fork.table.block_ids[-1]
                self.contents[copy.target] = self.contents[copy.source]
        self.live.append(fork)
        return fork

    @rule(holder=consumes(holders))
    def leave(self, holder: _Holder) -> None:
        self.pool.release(holder.table)
        assert holder.table.block_ids == []
        self.live.remove(holder)

    @invariant()
    def the_books_are_whole(self) -> None:
        assert self.pool.check([holder.table for holder in self.live]) == []

    @invariant()
    def everybody_still_has_what_it_computed(self) -> None:
        for holder in self.live:
            for index in range(holder.num_computed // SIZE):
                wanted = (holder.salt, tuple(holder.token_ids[: (index + 1) * SIZE]))
                assert self.contents[holder.table.block_ids[index]] == wanted

    @invariant()
    def the_figures_add_up(self) -> None:
        stats = self.pool.stats()
        held = {block for holder in self.live for block in holder.table.block_ids}
        assert (stats.total, stats.held, stats.free) == (
            NUM_BLOCKS,
            len(held),
            NUM_BLOCKS - len(held),
        )
        assert stats.cached <= NUM_BLOCKS

    @invariant()
    def idle_prefixes_take_no_more_memory_than_they_may(self) -> None:
        held = {block for holder in self.live for block in holder.table.block_ids}
        self.ever_held |= held
        self.most_held = max(self.most_held, len(held))
        assert len(self.ever_held) <= self.most_held + self.max_idle


class SparingPoolMachine(PoolMachine):
    """The same if memory is only taken by blocks that have been written."""

    max_idle = 2


for _machine in (PoolMachine, SparingPoolMachine):
    _machine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_pool_machine = PoolMachine.TestCase
test_sparing_pool_machine = SparingPoolMachine.TestCase


def test_prefixes_idle_for_longest_make_room_before_new_blocks_are_used() -> None:
    pool = BlockPool(64, 2, max_idle=4)
    texts = [[n, n, n + 1, n + 1] for n in range(0, 40, 2)]
    for token_ids in texts:
        pool.release(_computed(pool, token_ids).table)
    assert [_num_cached(pool, token_ids) for token_ids in texts[-3:]] == [2, 2, 2]
    assert not any(_num_cached(pool, token_ids) for token_ids in texts[:-3])
    table = BlockTable()
    assert len(set(pool.extend(table, 64))) == 64, "who runs may have them all"


def _computed(pool: BlockPool, token_ids: list[int], salt: str = "") -> _Holder:
    holder = _Holder(pool, salt, token_ids)
    pool.extend(holder.table, pool.blocks_for(len(token_ids)))
    pool.publish(holder.chain, token_ids, holder.table, 0, len(token_ids))
    return holder


def _num_cached(pool: BlockPool, token_ids: list[int], salt: str = "") -> int:
    return len(pool.match(pool.chain(salt), [*token_ids, 0]).block_ids)


def test_the_least_recently_freed_goes_first_and_of_a_chain_its_end() -> None:
    pool = BlockPool(8, 2)
    old, new = [1, 1, 2, 2, 3, 3], [4, 4, 5, 5]
    for token_ids in (old, new):
        holder = _computed(pool, token_ids)
        pool.release(holder.table)
    other = BlockTable()
    pool.extend(other, 3)  # the empty ones: nothing is evicted for them
    assert (_num_cached(pool, old), _num_cached(pool, new)) == (3, 2)
    pool.extend(other, 1)
    assert (_num_cached(pool, old), _num_cached(pool, new)) == (2, 2)
    pool.extend(other, 2)
    assert (_num_cached(pool, old), _num_cached(pool, new)) == (0, 2)
    pool.extend(other, 1)
    assert (_num_cached(pool, old), _num_cached(pool, new)) == (0, 1)


def test_of_two_twins_computed_side_by_side_one_is_found_and_the_other_is_empty_when_freed() -> (
    None
):
    pool = BlockPool(4, 2)
    first, twin = _computed(pool, [1, 2, 3, 4]), _computed(pool, [1, 2, 3, 4])
    assert pool.match(pool.chain(""), [1, 2, 3, 4, 5]) == (0, first.table.block_ids)
    assert pool.stats().cached == 2
    twin_blocks = set(twin.table.block_ids)
    pool.release(first.table)
    pool.release(twin.table)
    table = BlockTable()
    assert set(pool.extend(table, 2)) == twin_blocks
    assert _num_cached(pool, [1, 2, 3, 4]) == 2


def test_salts_and_keys_keep_prefixes_apart_and_caching_can_be_off() -> None:
    pool = BlockPool(8, 2)
    _computed(pool, [1, 2, 3, 4], salt="tenant")
    assert _num_cached(pool, [1, 2, 3, 4], "tenant") == 2
    assert _num_cached(pool, [1, 2, 3, 4], "another") == _num_cached(pool, [1, 2, 3, 4]) == 0
    digests = [BlockPool(8, 2).chain("tenant").digests([1, 2], 1)[0] for _ in range(2)]
    assert digests[0] != digests[1], "the hash is not keyed"
    off = BlockPool(8, 2, enable_prefix_caching=False)
    _computed(off, [1, 2, 3, 4])
    assert _num_cached(off, [1, 2, 3, 4]) == 0
    assert off.stats().cached == 0


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda pool, table: pool._free.pop(7), "is not free"),
        (lambda pool, table: pool._references.__setitem__(table.block_ids[0], 2), "2 references"),
        (lambda pool, table: table.block_ids.append(6), "1 holders"),
        (lambda pool, table: pool._block_of.clear(), "does not lead back"),
        (lambda pool, table: setattr(pool, "_num_shared", 1), "1 counted"),
    ],
)
def test_the_check_finds_damage(damage, complaint: str) -> None:
    pool = BlockPool(8, 2)
    holder = _computed(pool, [1, 2, 3, 4])
    assert pool.check([holder.table]) == []
    damage(pool, holder.table)
    assert complaint in "; ".join(pool.check([holder.table]))


@given(
    cached=st.lists(st.booleans(), max_size=12),
    window=st.integers(1, 14),
    rest=st.integers(1, SIZE),
)
def test_with_a_window_the_longest_prefix_is_found_of_which_enough_is_there(
    cached: list[bool], window: int, rest: int
) -> None:
    """By the definition: all blocks with a token that the first computed one will see."""
    count = len(cached)
    pool = BlockPool(count + 1, SIZE)
    token_ids = list(range(count * SIZE + rest))
    holder = _computed(pool, token_ids)
    for index, block in enumerate(holder.table.block_ids[:count]):
        if not cached[index]:
            digest = pool._digest_of[block]
            assert digest is not None
            pool._digest_of[block] = None
            del pool._block_of[digest]
    limit = (len(token_ids) - 1) // SIZE
    for end in range(limit, -1, -1):
        seen = range(max(0, end * SIZE - window + 1), end * SIZE)
        needed = sorted({position // SIZE for position in seen})
        if all(cached[index] for index in needed):
            break
    found = pool.match(pool.chain(""), token_ids, window)
    assert found.num_skipped + len(found.block_ids) == end
    assert list(found.block_ids) == [holder.table.block_ids[index] for index in needed]
    table = BlockTable()
    pool.adopt(table, found)
    assert (table.capacity, table.num_held) == (end * SIZE, len(needed))
    assert not pool.check([holder.table, table])
