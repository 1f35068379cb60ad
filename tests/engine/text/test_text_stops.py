from hypothesis import example, given
from hypothesis import strategies as st

from engine.text.stops import StopMatcher

small_text = st.text("ab", max_size=40)  # two letters: overlaps and near misses everywhere
stop_strings = st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=4)


def naive(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The stop string that completes first, the longest of those; and the text up to it."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            match = max(ending, key=len)
            return text[: end if include else end - len(match)], match
    return text, None


@given(text=small_text, stops=stop_strings, include=st.booleans(), data=st.data())
@example(text="aab", stops=["ab", "b"], include=False, data=None)
@example(text="abaabab", stops=["abab", "aba" * 2], include=False, data=None)
def test_every_split_finds_what_a_search_of_the_whole_text_finds(
    text: str, stops: list[str], include: bool, data: st.DataObject | None
) -> None:
    cuts = (
        list(range(len(text)))
        if data is None
        else sorted(data.draw(st.lists(st.integers(0, len(text)))))
    )
    matcher = StopMatcher(stops, include_stop=include)
    out = ""
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        out += matcher.push(text[start:end])
        if matcher.matched is None and not include:
            seen = text[:end]
            hopeful = [
                n
                for n in range(len(seen) + 1)
                if any(stop.startswith(seen[len(seen) - n :]) for stop in stops)
            ]
            assert out == seen[: len(seen) - max(hopeful)]  # nothing is held back for long
    out += matcher.flush()
    assert (out, matcher.matched) == naive(text, stops, include)


def test_nothing_comes_after_a_match() -> None:
    matcher = StopMatcher(["\n\n"])
    assert matcher.push("one\n") == "one"
    assert matcher.push("\ntwo") == ""
    assert matcher.matched == "\n\n"
    assert matcher.push("three") + matcher.flush() == ""
