"""Checks grammars in a confined process (``engine/sandbox``).

Each frame ``{"kind": ..., "text": ...}`` is answered by ``{"ok": true}``, or by ``{"message": ...,
"code": ...}`` if the grammar cannot be used. The grammar is compiled and followed for some bytes,
with a tokenizer whose tokens are the bytes. A model's vocabulary does not affect whether a grammar
is supported, and hardly what it costs.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import llguidance
import msgspec
import numpy as np

from engine.errors import InvalidParameter
from engine.grammar.llguidance_backend import parser_limits
from engine.grammar.translate import compile_error, to_llguidance
from engine.types import Grammar

_STEPS = 48  # bytes for which a grammar is followed


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return the function that answers a frame."""
    tokenizer = llguidance.LLTokenizer("byte")

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        try:
            _check(msgspec.convert(request, Grammar), tokenizer)
        except InvalidParameter as error:
            return {"message": error.message, "code": error.code}
        return {"ok": True}

    answer({"kind": "json_object", "text": ""})  # use what is loaded lazily
    return answer


def exhausted() -> dict[str, Any]:
    """The answer when a grammar has used too much memory."""
    return {"message": "the grammar takes too much memory", "code": "grammar_timeout"}


def _check(grammar: Grammar, tokenizer: llguidance.LLTokenizer) -> None:
    matcher = llguidance.LLMatcher(
        tokenizer, to_llguidance(grammar), log_level=0, limits=parser_limits()
    )
    chance = random.Random(0)
    for _ in range(_STEPS):
        if matcher.is_stopped():
            break
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(bits, bitorder="little")[:256])
        if not allowed.size:
            break
        matcher.consume_token(int(allowed[chance.randrange(allowed.size)]))
    if matcher.is_error():
        raise compile_error(matcher.get_error())
