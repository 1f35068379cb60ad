"""Drafts from texts: what followed before, longest match first, from no other client's prompt."""

from __future__ import annotations

import random

import pytest

from engine.config import SpeculationConfig
from engine.speculation.ngram import NgramProposer
from engine.speculation.proposer import make_proposer
from engine.speculation.suffix import SuffixProposer, SuffixStore
from engine.types import DRAFT_TOKEN, Adapter, Request

LENGTHS = range(3, 0, -1)


def request(prompt=(1,), salt: str = "", adapter: str = "") -> Request:
    named = Adapter(adapter, adapter, "") if adapter else None
    return Request(id="r", prompt_token_ids=tuple(prompt), cache_salt=salt, adapter=named)


def brute_force(text: list[int], most: int) -> tuple[int, ...]:
    """The expected proposal of an n-gram proposer, by exhaustive search."""
    for length in LENGTHS:
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                period = len(text) - end
                return tuple(text[end + index % period] for index in range(most))
    return ()


def test_ngrams_are_found_as_by_looking_everywhere():
    rng = random.Random(3)
    for _ in range(60):
        drafter = NgramProposer(LENGTHS).begin(request())
        text: list[int] = []
        for _ in range(40):
            text += [rng.randrange(5) for _ in range(rng.randint(1, 4))]
            most = rng.randint(1, 5)
            assert drafter.propose(text, most) == brute_force(text, most)


def test_a_cycle_goes_on_beyond_the_end_of_the_text():
    drafter = NgramProposer(range(2, 0, -1)).begin(request())
    assert drafter.propose([9, 1, 2, 3, 1, 2, 3, 1], 6) == (2, 3, 1, 2, 3, 1)


def test_nothing_is_guessed_where_nothing_repeats():
    assert NgramProposer(LENGTHS).begin(request()).propose([1, 2, 3, 4], 4) == ()


def test_outputs_of_others_are_continued():
    proposer = SuffixProposer(LENGTHS)
    proposer.finish(request([1, 2]), [1, 2, 10, 11, 12, 13, 14])
    assert proposer.begin(request([50])).propose([50, 10, 11], 4) == (12, 13, 14)
    # A prompt is private to its client.
    assert proposer.begin(request([50])).propose([50, 1], 4) == ()


def test_the_longest_run_wins_wherever_it_is():
    proposer = SuffixProposer(LENGTHS)
    proposer.finish(request([1]), [1, 20, 21, 22, 23])
    drafter = proposer.begin(request([22, 7, 7]))
    assert drafter.propose([22, 7, 7, 20, 21, 22], 1) == (23,)
    assert drafter.propose([22, 7, 7, 20, 21, 22, 30, 22], 1) == (30,)


@pytest.mark.parametrize("other", [{"salt": "s"}, {"adapter": "a"}])
def test_texts_are_kept_apart_by_salt_and_adapter(other):
    proposer = SuffixProposer(LENGTHS)
    proposer.finish(request(**other), [1, 10, 11, 12])
    assert proposer.begin(request()).propose([10, 11], 4) == ()
    assert proposer.begin(request(**other)).propose([10, 11], 4) == (12,)


def test_the_oldest_outputs_are_forgotten():
    """The total size of outputs is bounded, and so is their index."""
    proposer = SuffixProposer(LENGTHS, max_tokens=30)
    rng = random.Random(1)
    for number in range(200):
        salt = rng.choice(("a", "b"))
        text = [100, *rng.sample(range(1000 * number, 1000 * number + 99), rng.randint(2, 40))]
        proposer.finish(request([100], salt), text)
        stores = [proposer.store((salt, "")) for salt in ("a", "b")]
        kept = [store for store in stores if store is not None]
        assert sum(store.num_tokens for store in kept) <= 30
        for store in kept:
            store.update_index()
        assert sum(len(store._places) for store in kept) <= 30 * len(LENGTHS)
        if len(text) <= 31:
            assert proposer.begin(request([5], salt)).propose(text[1:-1], 1) == (text[-1],)
    assert proposer.begin(request([5], "a")).propose([10, 11], 1) == ()


def test_an_emptied_store_leads_nowhere():
    store = SuffixStore(LENGTHS)
    store.add((1, 2, 3, 1, 2, 3))
    store.add((1, 2, 3))
    store.update_index()
    store.evict_oldest()
    store.update_index()
    assert store.find((1, 2), 4) == (3,)
    store.evict_oldest()
    store.update_index()
    assert (store.num_tokens, store._places) == (0, {})


def test_outputs_are_indexed_when_somebody_guesses_the_newest_first():
    """All outputs that accumulated in between: ending a text does no indexing."""
    proposer, rng = SuffixProposer(LENGTHS), random.Random(2)
    texts = [[1, *(rng.randrange(2, 40) for _ in range(60))] for _ in range(50)]
    for text in texts:
        proposer.finish(request(), text)
    store = proposer.store(("", ""))
    assert store is not None
    assert not store._places
    drafter = proposer.begin(request([5]))
    assert drafter.propose(texts[-1][10:14], 3) == tuple(texts[-1][14:17])
    assert drafter.lookup_cost_s(0) > proposer.begin(request([5], "other")).lookup_cost_s(0)
    while not store.is_index_current:
        drafter.propose([5, 6], 3)
    # The last continuation of each match, as if texts had been indexed when they ended.
    led: dict[tuple[int, ...], tuple[int, ...]] = {}
    for text in texts:
        for end in range(4, len(text)):
            led[tuple(text[end - 3 : end])] = tuple(text[end : end + 3])
    assert all(store.find(run, 3) == after for run, after in led.items())


def test_the_draft_model_is_the_runners():
    proposer = make_proposer(SpeculationConfig(method="draft", draft_model="somewhere"))
    assert proposer.begin(request()).propose([1], 3) == (DRAFT_TOKEN,) * 3
