"""Infilling with vocabularies that put a space before a text's first word."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from engine.text.tokenizer import Tokenizer
from server.text.infill import Infill
from tests.engine.text.conftest import metaspace


@pytest.mark.parametrize("legacy", [False, True])
def test_what_follows_the_middle_begins_no_text(legacy: bool) -> None:
    """Code Llama's order: no space is added to the text after the hole."""
    backend = metaspace(legacy=legacy)
    marks = ["▁<PRE>", "▁<SUF>", "▁<MID>", "▁<EOT>"]
    backend.add_special_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer = Tokenizer(backend, named_tokens={"bos_token": "<s>"}, add_bos_token=True)
    infill = Infill.of(tokenizer)
    assert infill is not None
    prefix, suffix, middle, end = (tokenizer.token_id(mark) for mark in marks)
    ids = infill.encode("hello", "the end")
    bos, ids = ids[0], ids[1:]
    assert bos == tokenizer.bos_token_id
    assert (ids[0], ids[-1]) == (prefix, middle)
    assert suffix is not None
    at = ids.index(suffix)
    assert tokenizer.decode(ids[1:at], continuation=True) == " hello"
    assert tokenizer.decode(ids[at + 1 : -1], continuation=True) == "the end"
    assert infill.stop_token_ids == (end,)
    # Token ids of the prefix are used unchanged.
    assert infill.encode(ids[1:at], "the end") == [bos, *ids]


def test_a_vocabulary_without_the_tokens_has_no_middle() -> None:
    assert Infill.of(Tokenizer(metaspace())) is None
