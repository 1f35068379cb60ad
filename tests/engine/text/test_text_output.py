from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.text.detokenizer import IncrementalDetokenizer
from engine.text.output import OutputDecoder, TextDelta, TokenLogprob, prompt_entries
from engine.text.stops import StopMatcher
from engine.text.tokenizer import Tokenizer
from engine.types import RequestOutput, SamplingParams, TokenLogprobs
from tests.engine.text.conftest import metaspace

STOPS = ["\n", "lo", "hell", "世", "👍", "\ufffd", " w", "<|im_end|>"]


def told(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1, (token_id, 7), (-0.5, -1.5))


def outputs(
    ids: list[int], cuts: list[int], stop_token_id: int | None, logprobs: bool
) -> list[RequestOutput]:
    """The outputs of an engine when read at ``cuts``."""
    edges = [0, *sorted(cuts), len(ids)]
    parts = [tuple(ids[start:end]) for start, end in pairwise(edges)]
    return [
        RequestOutput(
            id="r",
            token_ids=part,
            logprobs=tuple(map(told, part)) if logprobs else None,
            finish_reason=(stop_token_id is None and "length") or "stop" if last else None,
            stop_token_id=stop_token_id if last else None,
        )
        for part, last in zip(parts, [*[False] * (len(parts) - 1), True], strict=True)
    ]


def run(
    tokenizer: Tokenizer, sampling: SamplingParams, news: list[RequestOutput]
) -> list[TextDelta]:
    decoder = OutputDecoder(tokenizer, sampling)
    deltas = [decoder.push(output) for output in news]
    assert decoder.finished
    assert decoder.num_tokens == sum(len(delta.token_ids) for delta in deltas)
    last = [index for index, delta in enumerate(deltas) if delta.finished]
    assert len(last) == 1
    assert all(delta == TextDelta() for delta in deltas[last[0] + 1 :])
    return deltas[: last[0] + 1]


def token_by_token(
    tokenizer: Tokenizer, sampling: SamplingParams, ids: list[int], silent_end: bool
) -> tuple[str, int, str | None]:
    """The text, the number of tokens and the stop string, by a slow reference."""
    detokenizer = IncrementalDetokenizer(tokenizer)
    matcher = StopMatcher(sampling.stop, include_stop=sampling.include_stop_str_in_output)
    text = ""
    for index, token_id in enumerate(ids):
        if silent_end and index == len(ids) - 1:
            break
        piece = detokenizer.push([token_id])
        text += matcher.push(piece) if index >= sampling.min_tokens else piece
        stop = {tokenizer.special_id(stop): stop for stop in sampling.stop}.get(token_id)
        is_stop = stop is not None and index >= sampling.min_tokens
        if is_stop and matcher.matched is None:
            text += matcher.push(detokenizer.flush()) + matcher.flush()
            if matcher.matched is None:
                return text + stop * sampling.include_stop_str_in_output, index + 1, stop
        if matcher.matched is not None:
            return text, index + 1, matcher.matched
    return text + matcher.push(detokenizer.flush()) + matcher.flush(), len(ids), matcher.matched


@given(data=st.data())
def test_text_and_tokens_do_not_depend_on_the_split(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(
        st.sampled_from(["hello world\nhello 你好，世界 👍🏽👩‍👩‍👧‍👦", "the <|im_end|> hell"])
    )
    ids = tokenizer.encode(text)
    noise = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=6))
    ids = ids[: data.draw(st.integers(0, len(ids)))] + noise
    ends_by_token = data.draw(st.booleans())
    stop_id = tokenizer.eos_token_ids[0] if ends_by_token else None
    ids += [] if stop_id is None else [stop_id]
    sampling = SamplingParams(
        stop=tuple(data.draw(st.lists(st.sampled_from(STOPS), max_size=3))),
        include_stop_str_in_output=data.draw(st.booleans()),
        min_tokens=data.draw(st.sampled_from([0, 0, 3])),
        logprobs=data.draw(st.sampled_from([None, 2])),
    )
    # A token that ends the text comes with the reason.
    cuts = data.draw(st.lists(st.integers(0, len(ids) - ends_by_token), max_size=8))
    wanted = sampling.logprobs is not None
    deltas = run(tokenizer, sampling, outputs(ids, cuts, stop_id, wanted))

    text, count, matched = token_by_token(tokenizer, sampling, ids, ends_by_token)
    assert "".join(delta.text for delta in deltas) == text
    assert [id_ for delta in deltas for id_ in delta.token_ids] == ids[:count]
    assert deltas[-1].stop_reason == matched
    assert deltas[-1].finish_reason == ("stop" if matched or ends_by_token else "length")
    if wanted:
        check_entries(tokenizer, deltas, ids[:count])
        (at_once,) = run(tokenizer, sampling, outputs(ids, [], stop_id, True))
        assert tuple(entry for delta in deltas for entry in delta.logprobs) == at_once.logprobs
    else:
        assert not any(delta.logprobs for delta in deltas)


def check_entries(tokenizer: Tokenizer, deltas: list[TextDelta], ids: list[int]) -> None:
    entries: list[TokenLogprob] = []
    text = ""
    for delta in deltas:
        text += delta.text
        entries += delta.logprobs
        for entry in delta.logprobs:
            if not delta.finished and entry.data.strip():
                assert entry.text_offset < len(text) or not entry.visible
        # No entry precedes its text; tokens cut off by a stop string have none.
        assert all(e.text_offset <= len(text) for e in delta.logprobs if e.visible)
    assert [entry.token_id for entry in entries] == ids
    assert [entry.logprob for entry in entries] == [-0.5] * len(ids)
    for entry in entries:
        assert entry.data == tokenizer.token_bytes(entry.token_id)
        assert [top.token_id for top in entry.top] == [entry.token_id, 7]
        whole, shown = entry.token, text[entry.text_offset :]
        if entry.text_offset == 0:  # the space before the first word may be omitted
            whole, shown = whole.lstrip(" "), shown.lstrip(" ")
        if entry.visible and "\ufffd" not in whole:
            assert shown.startswith(whole) or whole.startswith(shown)  # cut by a stop string


BROKEN = [  # tokens as bytes, their text and their offsets
    ([b"a", b"\xf0", b"b"], "a\ufffdb", [0, 1, 2]),
    ([b"\xf0", b"\x9f", b"b"], "\ufffdb", [0, 0, 1]),
    ([b"\xe4", b"\xe4", b"\xbd", b"\xa0", b"b"], "\ufffd你b", [0, 1, 1, 1, 2]),
    ([b"\xf0", b"\x80", b"b"], "\ufffd\ufffdb", [0, 1, 2]),  # not a continuation of F0
    ([b"\xed", b"\xa0", b"\x80", b"b"], "\ufffd\ufffd\ufffdb", [0, 1, 2, 3]),  # a surrogate
    ([b"\xef", b"\xbf", b"\xbd", b"b"], "\ufffdb", [0, 0, 0, 1]),  # U+FFFD itself
]


@pytest.mark.parametrize(("data", "text", "offsets"), BROKEN)
def test_an_offset_counts_the_replacement_of_bytes_that_became_no_character(
    chatml: Tokenizer, data: list[bytes], text: str, offsets: list[int]
) -> None:
    id_of = {chatml.token_bytes(id_): id_ for id_ in reversed(range(chatml.vocab_size))}
    ids = [id_of[piece] for piece in data]
    (delta,) = run(chatml, SamplingParams(logprobs=0), outputs(ids, [], None, True))
    assert delta.text == text
    assert [entry.text_offset for entry in delta.logprobs] == offsets
    assert [entry.text_offset for entry in prompt_entries(chatml, ids)] == offsets


def test_the_offset_of_a_silent_end_is_the_length_of_the_text(chatml: Tokenizer) -> None:
    (eos,) = chatml.eos_token_ids
    ids = [*chatml.encode("a👍")[:2], eos]
    (delta,) = run(chatml, SamplingParams(logprobs=0), outputs(ids, [], eos, True))
    assert delta.text == "a\ufffd"
    assert [entry.text_offset for entry in delta.logprobs] == [0, 1, 2]


def test_a_stop_string_after_broken_bytes_hides_its_own_token_only(chatml: Tokenizer) -> None:
    ids = [*chatml.encode("a👍")[:2], *chatml.encode("\n")]
    sampling = SamplingParams(stop=("\n",), logprobs=0)
    (delta,) = run(chatml, sampling, outputs(ids, [], None, True))
    assert delta.text == "a\ufffd"
    assert [entry.visible for entry in delta.logprobs] == [True, True, False]


@pytest.mark.parametrize("cuts", [[], [1]])
def test_a_token_without_text_before_a_stop_string_is_visible(cuts: list[int]) -> None:
    """As a space is that a text does not begin with, whenever it is told."""
    backend = metaspace()
    vocabulary = backend.get_vocab()
    ids = [vocabulary[piece] for piece in ("▁", "E")]
    deltas = run(
        Tokenizer(backend), SamplingParams(stop=("E",), logprobs=0), outputs(ids, cuts, None, True)
    )
    assert [delta.text for delta in deltas] == [""] * len(deltas)
    entries = [entry for delta in deltas for entry in delta.logprobs]
    assert [entry.visible for entry in entries] == [True, False]


def test_the_token_that_ends_it_is_silent(chatml: Tokenizer) -> None:
    (eos,) = chatml.eos_token_ids
    (point,) = chatml.encode("!")
    for sampling, stop_id, text, reason in (
        (SamplingParams(logprobs=0), eos, "a", None),
        (SamplingParams(logprobs=0, skip_special_tokens=False), eos, "a", None),
        (SamplingParams(logprobs=0, stop_token_ids=(point,)), point, "a", point),
        (
            SamplingParams(logprobs=0, stop_token_ids=(point,), include_stop_str_in_output=True),
            point,
            "a!",
            point,
        ),
    ):
        (delta,) = run(chatml, sampling, outputs([*chatml.encode("a"), stop_id], [], stop_id, True))
        assert (delta.text, delta.stop_reason, len(delta.token_ids)) == (text, reason, 2)
        assert [entry.visible for entry in delta.logprobs] == [True, text == "a!"]


def test_a_stop_string_may_be_a_token_that_texts_leave_out(chatml: Tokenizer) -> None:
    """Such as <|file_sep|>, with which models of code end what they fill in."""
    mark = chatml.special_id("<|im_end|>")
    assert mark is not None
    ids = [*chatml.encode("say hel"), mark, *chatml.encode(" and more")]
    both = ("<|im_end|>", "hello")  # "hel" is held back until it is certain
    for sampling, text, reason in (
        (SamplingParams(stop=both), "say hel", "<|im_end|>"),
        (SamplingParams(stop=both, include_stop_str_in_output=True), "say hel<|im_end|>", both[0]),
        (SamplingParams(stop=both, skip_special_tokens=False), "say hel", "<|im_end|>"),
        (SamplingParams(stop=both, min_tokens=len(ids)), "say hel and more", None),
        (SamplingParams(stop=("hello",)), "say hel and more", None),
        (SamplingParams(stop=("el", "<|im_end|>")), "say h", "el"),
    ):
        for cuts in ([], list(range(len(ids)))):
            deltas = run(chatml, sampling, outputs(ids, cuts, None, False))
            assert "".join(delta.text for delta in deltas) == text
            assert deltas[-1].stop_reason == reason
            assert deltas[-1].finish_reason == ("length" if reason is None else "stop")
            if reason == "<|im_end|>":
                tokens = [id_ for delta in deltas for id_ in delta.token_ids]
                assert tokens == ids[: ids.index(mark) + 1]


def test_a_stop_string_that_is_the_end_of_text_changes_nothing(chatml: Tokenizer) -> None:
    (eos,) = chatml.eos_token_ids
    ids = [*chatml.encode("a"), eos]
    sampling = SamplingParams(stop=("<|im_end|>",), include_stop_str_in_output=True)
    (delta,) = run(chatml, sampling, outputs(ids, [], eos, False))
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("a", "stop", None)


def test_entries_wait_for_held_back_text_and_no_longer(chatml: Tokenizer) -> None:
    decoder = OutputDecoder(chatml, SamplingParams(stop=("bcd",), logprobs=0))
    seen = []
    for char in "abcxbcde":
        news = outputs(chatml.encode(char), [], None, True)[0]
        delta = decoder.push(
            RequestOutput(id="r", token_ids=news.token_ids, logprobs=news.logprobs)
        )
        entries = [(entry.token, entry.text_offset, entry.visible) for entry in delta.logprobs]
        seen.append((delta.text, entries))
    assert seen == [
        ("a", [("a", 0, True)]),
        ("", []),
        ("", []),
        ("bcx", [("b", 1, True), ("c", 2, True), ("x", 3, True)]),
        ("", []),
        ("", []),
        ("", [("b", 4, False), ("c", 5, False), ("d", 6, False)]),
        ("", []),
    ]


def test_prompt_entries_begin_without_a_value(chatml: Tokenizer) -> None:
    ids = chatml.encode("a👍b")
    entries = prompt_entries(chatml, ids, [told(id_) for id_ in ids[1:]])
    assert [entry.token_id for entry in entries] == ids
    assert [entry.logprob for entry in entries] == [None] + [-0.5] * (len(ids) - 1)
    assert (entries[1].text_offset, entries[-1].text_offset) == (1, 2)
