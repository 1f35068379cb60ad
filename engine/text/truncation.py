"""Encodes texts within a token limit: texts are truncated, but not the special tokens around them.

A tokenizer puts special tokens such as ``[CLS]`` and ``[SEP]`` around a text. They are found by
encoding the text without them, and kept when it is truncated.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from engine.text.tokenizer import Tokenizer


class EncodedPair(NamedTuple):
    """Two texts as one prompt."""

    token_ids: list[int]
    second_start: int | None  # where tokens of the second type begin; None: there is only one type


def encode_texts(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    limit: int | None = None,
    *,
    add_special_tokens: bool = True,
) -> list[list[int]]:
    """The token ids of each text, at most ``limit`` tokens; with the tokenizer's ``text_end_id``.

    Raises:
        InvalidParameter: a text cannot be encoded.
    """
    encoded = tokenizer.encode_batch(texts, add_special_tokens=add_special_tokens)
    end = tokenizer.text_end_id if add_special_tokens else None
    if end is not None:
        encoded = [ids if ids[-1:] == [end] else [*ids, end] for ids in encoded]
    for index, ids in enumerate(encoded):
        if limit is None or len(ids) <= limit:
            continue
        bare = tokenizer.encode(texts[index], add_special_tokens=False)
        begin = _find(ids, bare, 0)
        head, tail = ids[:begin], ids[begin + len(bare) :]
        kept = max(0, limit - len(head) - len(tail))
        encoded[index] = (head + bare[:kept] + tail)[:limit]
    return encoded


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: int | None = None
) -> list[EncodedPair]:
    """Both texts of each pair as one prompt of at most ``limit`` tokens.

    The second text is truncated first, and the first one only once nothing of the second is left.

    Raises:
        InvalidParameter: a text cannot be encoded.
    """
    whole = [EncodedPair(*pair) for pair in tokenizer.encode_pairs(pairs)]
    return [
        pair
        if limit is None or len(pair.token_ids) <= limit
        else _truncate_pair(tokenizer, *texts, pair, limit)
        for texts, pair in zip(pairs, whole, strict=True)
    ]


def _truncate_pair(
    tokenizer: Tokenizer, first: str, second: str, pair: EncodedPair, limit: int
) -> EncodedPair:
    ids = pair.token_ids
    a = tokenizer.encode(first, add_special_tokens=False)
    b = tokenizer.encode(second, add_special_tokens=False)
    begin_a = _find(ids, a, 0)
    begin_b = _find(ids, b, begin_a + len(a))
    too_many = len(ids) - limit
    cut_b = min(too_many, len(b))
    cut_a = min(too_many - cut_b, len(a))
    end_a, end_b = begin_a + len(a), begin_b + len(b)
    kept = ids[: end_a - cut_a] + ids[end_a : end_b - cut_b] + ids[end_b:]
    second_from = None if pair.second_start is None else pair.second_start - cut_a
    return EncodedPair(kept[:limit], second_from)


def _find(ids: list[int], part: list[int], start: int) -> int:
    """The index of ``part`` in ``ids``, from ``start`` on; ``start`` if it is not found."""
    for begin in range(start, len(ids) - len(part) + 1):
        if ids[begin : begin + len(part)] == part:
            return begin
    return start
