"""Guessing by looking up where the last tokens of a text occurred in it before.

Prompt lookup (Saxena 2023): texts repeat themselves, and answers repeat their prompts.

A text is kept as a string with a character for each token, and searched from its end by the
interpreter's own ``rfind``. To index its runs of tokens instead would make a look's time
independent of the text's length, but takes a dozen times as long for each token as to keep it so,
in one go for a whole prompt, and some hundred bytes where this takes two or four.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine.speculation.proposer import Drafter
from engine.types import Request

_LOOK_S = 1e-5  # of the host, to look a text's last tokens up
_KEEP_S = 7e-8  # to take a token of a text in
_PASS_S = 2e-9  # to pass one by in the search


class SearchedText:
    """A text that grows, searched for earlier occurrences of its last tokens."""

    __slots__ = ("_text",)

    def __init__(self) -> None:
        self._text = ""

    def __len__(self) -> int:
        return len(self._text)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Take in what is new of the whole text."""
        self._text += "".join(map(chr, token_ids[len(self._text) :]))

    def find(self, length: int) -> int | None:
        """Where so many last tokens last ended before; None: they never did."""
        text = self._text
        start = text.rfind(text[-length:], 0, len(text) - 1)
        return None if start < 0 else start + length

    def look_s(self, num_unseen: int) -> float:
        """About the seconds of a look before which so many tokens are taken in."""
        return _LOOK_S + num_unseen * _KEEP_S + (len(self) + num_unseen) * _PASS_S


class NgramDrafter:
    """Guesses for one text from the text itself."""

    __slots__ = ("_lengths", "_text")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._text = SearchedText()

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What followed the last time; see ``Drafter``."""
        text = self._text
        text.extend(token_ids)
        # Where the shortest run is not, no longer one is: most looks are in vain, and end here.
        if text.find(self._lengths[-1]) is None:
            return ()
        for length in self._lengths:
            end = text.find(length)
            if end is not None:
                return continuation(token_ids, end, most)
        return ()

    def look_s(self, num_unseen: int) -> float:
        """See ``Drafter``."""
        return self._text.look_s(num_unseen)


class NgramProposer:
    """A drafter of its own for each text.

    Args:
        lengths: of the runs that are looked up, the longest first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def begin(self, request: Request) -> Drafter:
        """One who takes the text in when the first guess is asked for."""
        return NgramDrafter(self._lengths)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Nothing outlives its text."""


def continuation(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on; where the text ends, it goes on as it did since there."""
    period = len(token_ids) - start
    return tuple(token_ids[start + index % period] for index in range(count))
