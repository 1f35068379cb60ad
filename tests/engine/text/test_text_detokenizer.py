from itertools import chain, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.tokenizer import Tokenizer

CORPUS = [
    "👩‍👩‍👧‍👦 family, 👍🏽 thumbs, 🇫🇷 flag, 🏴󠁧󠁢󠁳󠁣󠁴󠁿",
    "你好，世界。日本語のテキスト、한국어 텍스트",
    "e\u0301 vs é, \u0928\u092e\u0938\u094d\u0924\u0947, \u200d\ufeff\u2028",
    "  hello the  end ",
]


def pieces(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(min(cut, len(ids)) for cut in cuts), len(ids)]
    return [ids[start:end] for start, end in pairwise(edges)]


def token_ids(tokenizer: Tokenizer) -> st.SearchStrategy[list[int]]:
    """Real text, cut anywhere, and noise: broken UTF-8, special tokens, ids without an entry."""
    noise = st.lists(st.integers(0, tokenizer.vocab_size + 2), max_size=20)
    texts = st.sampled_from(CORPUS) | st.text(st.characters(exclude_categories=["Cs"]))
    real = texts.map(tokenizer.encode)
    place = st.integers(0, 9)
    cut = st.builds(lambda ids, start, size: ids[start : start + size], real, place, place)
    return st.lists(real | noise | cut, max_size=4).map(lambda parts: list(chain(*parts)))


@given(data=st.data(), skip=st.booleans(), continuation=st.booleans())
def test_deltas_joined_are_the_whole_text_at_any_split(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool, continuation: bool
) -> None:
    ids = data.draw(token_ids(tokenizer))
    cuts = data.draw(st.lists(st.integers(0, len(ids)), max_size=len(ids)))
    detokenizer = IncrementalDetokenizer(
        tokenizer, skip_special_tokens=skip, continuation=continuation
    )
    deltas = [detokenizer.push(piece) for piece in pieces(ids, cuts)]
    whole = tokenizer.decode(ids, skip_special_tokens=skip, continuation=continuation)
    assert "".join(deltas) + detokenizer.flush() == whole
    assert detokenizer.num_pending_chars == 0


@pytest.mark.parametrize("text", CORPUS)
def test_characters_are_never_split_and_never_late(tokenizer: Tokenizer, text: str) -> None:
    detokenizer = IncrementalDetokenizer(tokenizer)
    ids = tokenizer.encode(text)
    for count in range(1, len(ids) + 1):
        detokenizer.push(ids[count - 1 : count])
        data = b"".join(map(tokenizer.token_bytes, ids[:count]))
        complete = data.decode("utf-8", "ignore")
        assert detokenizer.num_pending_chars == (len(data) > len(complete.encode()))
    assert detokenizer.flush() == ""
