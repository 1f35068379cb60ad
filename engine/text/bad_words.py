"""Words that a text must not hold, as the token sequences that would write them."""

from __future__ import annotations

import msgspec

from engine.text.tokenizer import Tokenizer
from engine.types import SamplingParams


def with_bad_token_ids(sampling: SamplingParams, tokenizer: Tokenizer) -> SamplingParams:
    """``sampling`` with its bad words as token ids, those it already has included.

    Each word is spelled as it is and as it goes on after a space. A text may still hold it in
    another spelling (in pieces that the tokenizer would not choose, or as a part of a longer word).
    """
    if not sampling.bad_words:
        return sampling
    found = dict.fromkeys(sampling.bad_token_ids)
    for word in sampling.bad_words:
        bare = word.lstrip(" ")
        for text in (word, bare, f" {bare}"):
            ids = tokenizer.encode(text, add_special_tokens=False) if text else []
            if ids:
                found[tuple(ids)] = None
    return msgspec.structs.replace(sampling, bad_token_ids=tuple(found))
