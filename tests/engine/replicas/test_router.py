"""Routing: requests go to their prefix, except on overloaded engines; bookkeeping is bounded."""

from __future__ import annotations

import random

import pytest

from engine.kv_cache.prefix import PrefixChain
from engine.replicas.router import CACHED_WEIGHT, Router

BLOCK = 4


def digests_of(tokens: list[int]) -> list[bytes]:
    return PrefixChain(b"key", "", BLOCK).digests(tokens, len(tokens) // BLOCK)


def random_prompt(rng: random.Random) -> list[int]:
    """A prompt from a small tree of prefixes, so that many share a prefix."""
    return [rng.randrange(2) for _ in range(rng.choice((1, 3, 8, 9, 24, 40)))]


@pytest.mark.parametrize("seed", range(40))
def test_no_choice_is_far_busier_than_the_least_busy(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 6)
    router, loads = Router(count, BLOCK, rng.choice((4, 64, 1000))), dict.fromkeys(range(count), 0)
    lives: list[tuple[int, int]] = []
    for _ in range(300):
        prompt = random_prompt(rng)
        allowed = {e: loads[e] for e in rng.sample(range(count), rng.randrange(1, count + 1))}
        known = {e: router.num_cached(e, digests_of(prompt)) for e in allowed}
        chosen = router.route(digests_of(prompt), allowed)
        assert chosen in allowed
        assert allowed[chosen] <= min(allowed.values()) + CACHED_WEIGHT * known[chosen]
        assert known[chosen] <= len(prompt)
        # No engine with as much of the prompt has less load, and none with as little load has more
        # of it.
        for other, load in allowed.items():
            assert not (load < allowed[chosen] and known[other] >= known[chosen])
            assert not (load <= allowed[chosen] and known[other] > known[chosen])
        loads[chosen] += len(prompt)
        lives.append((chosen, len(prompt)))
        while lives and rng.random() < 0.4:
            engine, tokens = lives.pop(rng.randrange(len(lives)))
            loads[engine] -= tokens


def test_strangers_join_the_shortest_queue() -> None:
    """Prompts without common prefixes are distributed as evenly as their lengths allow."""
    rng = random.Random(1)
    router, loads = Router(4, BLOCK, 10_000), dict.fromkeys(range(4), 0)
    for number in range(500):
        prompt = [number + 2, *(rng.randrange(9) for _ in range(rng.randrange(60)))]
        loads[router.route(digests_of(prompt), loads)] += len(prompt)
        assert max(loads.values()) - min(loads.values()) <= 60


def test_conversations_stay_where_their_beginnings_are() -> None:
    """On idle engines, each turn finds the whole conversation so far, and so do concurrent ones."""
    router, idle = Router(3, BLOCK, 10_000), dict.fromkeys(range(3), 0)
    talks = [[number] * 20 for number in range(9)]
    homes = [router.route(digests_of(talk), idle) for talk in talks]
    assert sorted(homes) == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for turn in range(5):
        for number, talk in enumerate(talks):
            talk += [turn] * 10
            digests = digests_of(talk)
            assert router.num_cached(homes[number], digests) >= len(talk) - 10 - 2 * BLOCK
            assert router.route(digests, idle) == homes[number]


def test_a_prefix_in_demand_spreads_to_others() -> None:
    """A system prompt shared by all requests does not leave the other engines idle."""
    router, loads = Router(3, BLOCK, 10_000), dict.fromkeys(range(3), 0)
    for number in range(60):
        prompt = [1] * 40 + [number] * 8
        loads[router.route(digests_of(prompt), loads)] += len(prompt)
    assert max(loads.values()) - min(loads.values()) <= CACHED_WEIGHT * 40 + 48


@pytest.mark.parametrize("seed", range(10))
def test_books_are_bounded_and_a_prefix_is_forgotten_from_its_end(seed: int) -> None:
    rng = random.Random(seed)
    most = rng.randrange(1, 40)
    router = Router(2, BLOCK, most)
    recent: list[list[bytes]] = []
    for _ in range(200):
        digests = digests_of(random_prompt(rng))
        router.record_prompt(0, digests)
        recent.append(digests)
        known = router._known[0]
        assert len(known) <= most
        for earlier in recent:  # an engine that has a block has all the ones before it
            flags = [digest in known for digest in earlier]
            assert flags == sorted(flags, reverse=True)
        assert router.num_cached(0, digests) == min(len(digests), most) * BLOCK
    assert router.num_cached(1, recent[-1]) == 0
    router.forget(0)
    assert all(router.num_cached(0, digests) == 0 for digests in recent)
