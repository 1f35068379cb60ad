"""Converts bad words to the token sequences that would write them."""

from __future__ import annotations

import msgspec

from engine.text.tokenizer import Tokenizer
from engine.types import SamplingParams


def with_bad_token_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``sampling`` with its bad words as token ids, in addition to those it already has.

    Each word is encoded as given, and with and without a leading space. A text may still contain it
    in other tokens than the tokenizer would choose, or as a part of a longer word.
    """
    if not sampling.bad_words:
        return sampling
    texts: dict[str, None] = {}  # each once
    for word in sampling.bad_words:
        bare = word.lstrip(" ")
        texts |= dict.fromkeys(text for text in (word, bare, f" {bare}") if text)
    found = dict.fromkeys(sampling.bad_token_ids)
    for ids in tokenizer.encode_batch([*texts], add_special_tokens=False):
        if ids:
            found[tuple(ids)] = None
    return msgspec.structs.replace(sampling, bad_token_ids=tuple(found))
