"""Guessing by looking up where the last tokens of a text occurred in it before.

Prompt lookup (Saxena 2023): texts repeat themselves, and answers repeat their prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from engine.speculation.proposer import Drafter
from engine.types import Request

_LOOK_S = 1e-5  # of the host, to look a text's last tokens up
_INDEX_S = 4e-7  # to index a run


class NgramIndex:
    """Where each run of tokens last occurred in one text that grows: O(1) a token and length.

    Args:
        lengths: of the runs that are indexed.
    """

    __slots__ = ("_ends", "_lengths", "_num_indexed")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._ends: dict[tuple[int, ...], int] = {}  # run -> where its last occurrence ends
        self._num_indexed = 0  # tokens of which all runs that end there are in the index

    def extend(self, token_ids: Sequence[int], end: int) -> None:
        """Index the runs that end at or before ``end``; a later one replaces an earlier."""
        ends = self._ends
        for stop in range(self._num_indexed + 1, end + 1):
            for length in self._lengths:
                if length <= stop:
                    ends[tuple(token_ids[stop - length : stop])] = stop
        self._num_indexed = max(self._num_indexed, end)

    def find(self, run: tuple[int, ...]) -> int | None:
        """Where a run last ended in what is indexed."""
        return self._ends.get(run)


class NgramDrafter:
    """Guesses for one text from the text itself."""

    __slots__ = ("_index", "_lengths")

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths
        self._index = NgramIndex(lengths)

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """What followed the last time; see ``Drafter``."""
        index = self._index
        index.extend(token_ids, len(token_ids) - 1)
        # Where the shortest run is not, no longer one is: most looks are in vain, and end here.
        if index.find(tuple(token_ids[-self._lengths[-1] :])) is None:
            return ()
        for run in last_runs(token_ids, self._lengths):
            end = index.find(run)
            if end is not None:
                return continuation(token_ids, end, most)
        return ()

    def look_s(self, num_unseen: int) -> float:
        """What has come since is indexed first."""
        return look_s(num_unseen, self._lengths)


class NgramProposer:
    """A drafter of its own for each text.

    Args:
        lengths: of the runs that are looked up, the longest first.
    """

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = lengths

    def begin(self, request: Request) -> Drafter:
        """An empty index: it is filled when the first guess is asked for."""
        return NgramDrafter(self._lengths)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Nothing outlives its text."""


def look_s(num_tokens: int, lengths: Sequence[int]) -> float:
    """About the seconds of a look before which the runs of so many tokens are indexed."""
    return _LOOK_S + num_tokens * len(lengths) * _INDEX_S


def last_runs(token_ids: Sequence[int], lengths: Iterable[int]) -> Iterator[tuple[int, ...]]:
    """The last tokens of a text, as many as each length says."""
    for length in lengths:
        if length <= len(token_ids):
            yield tuple(token_ids[-length:])


def continuation(token_ids: Sequence[int], start: int, count: int) -> tuple[int, ...]:
    """``count`` tokens from ``start`` on; where the text ends, it goes on as it did since there."""
    period = len(token_ids) - start
    return tuple(token_ids[start + index % period] for index in range(count))
