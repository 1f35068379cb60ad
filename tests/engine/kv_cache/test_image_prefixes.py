"""Prompts with equal tokens but different images share only what precedes the images."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.images.types import Image
from engine.kv_cache.prefix import PrefixChain

BLOCK = 4
TOKENS = [7] * 40  # text and images have the same tokens, so that only the images differ


def image(start: int, count: int, digest: bytes) -> Image:
    return Image(start=start, num_tokens=count, height=8, width=8, pixels=b"", digest=digest)


def digests(*images: Image) -> list[bytes]:
    chain = PrefixChain(b"key", "salt", BLOCK, media=images)
    return list(chain.digests(TOKENS, len(TOKENS) // BLOCK))


def num_shared(one: list[bytes], other: list[bytes]) -> int:
    same = [a == b for a, b in zip(one, other, strict=True)]
    count = same.index(False) if False in same else len(same)
    assert not any(same[count:])  # chains that have diverged stay apart
    return count


@given(st.integers(0, 30), st.integers(1, 10))
def test_another_image_parts_them_in_its_first_block(start, count):
    assert num_shared(digests(image(start, count, b"a")), digests(image(start, count, b"a"))) == 10
    found = num_shared(digests(image(start, count, b"a")), digests(image(start, count, b"b")))
    assert found == start // BLOCK
    assert num_shared(digests(image(start, count, b"a")), digests()) == start // BLOCK


@given(st.integers(0, 20), st.integers(1, 8), st.integers(1, 8))
def test_the_same_image_elsewhere_is_another_prompt(start, shift, count):
    first, second = image(start, count, b"a"), image(start + shift, count, b"a")
    assert num_shared(digests(first), digests(second)) == start // BLOCK


@given(st.integers(0, 10), st.integers(1, 6), st.integers(0, 6), st.integers(1, 6))
def test_of_two_images_the_second_alone_may_differ(start, count, gap, second):
    begin = start + count + gap
    ours = digests(image(start, count, b"a"), image(begin, second, b"b"))
    theirs = digests(image(start, count, b"a"), image(begin, second, b"c"))
    assert num_shared(ours, theirs) == begin // BLOCK


def test_text_behind_an_image_is_found_however_long_the_chain_was_before():
    """Digests are extended as a text grows."""
    images = (image(2, 9, b"a"),)
    grown = PrefixChain(b"key", "salt", BLOCK, media=images)
    for count in range(11):
        found = grown.digests(TOKENS[: count * BLOCK], count)
    assert list(found) == digests(*images)
