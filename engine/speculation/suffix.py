"""Guessing from texts that other requests have ended with (suffix decoding, Oliaro et al. 2024).

Agents, batches and retries write nearly the same text again and again. The newest outputs are
kept, up to a number of tokens, and indexed by their runs of tokens. The longest run of last tokens
that is found wins: in the text's own past first, then in the newest output that has it.

Texts are kept apart by cache salt and adapter, as cached prefixes are.

To keep a text costs next to nothing: it is indexed, the newest first, and taken out of the index
when it has been forgotten, a piece at each guess. Where nobody guesses, neither is done.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from engine.speculation.ngram import SearchedText, continuation
from engine.speculation.proposer import Drafter
from engine.types import Request

_MAX_TOKENS = 100_000  # of all outputs that are kept; each takes some hundred bytes in the index
_MAX_TIDIED = 64  # tokens that are indexed at a guess, and as many that are taken out
_INDEX_S = 8e-7  # of the host, to index a run, or to take one out


class _Output:
    """A text that has ended."""

    __slots__ = ("num_indexed", "order", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], order: int) -> None:
        self.token_ids = token_ids
        self.order = order  # of the ends of all
        self.num_indexed = 0  # tokens of which all runs that end there are in the index


class SuffixStore:
    """Outputs of requests that may see each other's, the oldest forgotten first."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._outputs: deque[_Output] = deque()
        self._unindexed: deque[_Output] = deque()  # of these, the last of them the newest
        self._stale: deque[_Output] = deque()  # forgotten, with runs in the index
        self._places: dict[tuple[int, ...], tuple[_Output, int]] = {}  # run -> where it ends
        self._num_added = 0
        self.num_tokens = 0

    @property
    def is_tidy(self) -> bool:
        """Whether the index holds what is kept, and no more."""
        return not self._unindexed and not self._stale

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Keep an output. What follows a run in it is preferred to what followed it before."""
        self._num_added += 1
        output = _Output(token_ids, self._num_added)
        self._outputs.append(output)
        self._unindexed.append(output)
        self.num_tokens += len(token_ids)

    def forget_oldest(self) -> None:
        """Let go of the oldest output."""
        output = self._outputs.popleft()
        self.num_tokens -= len(output.token_ids)
        if self._unindexed and self._unindexed[0] is output:
            self._unindexed.popleft()
        if output.num_indexed:
            self._stale.append(output)

    def find(self, run: tuple[int, ...], most: int) -> tuple[int, ...]:
        """What followed a run in the newest output that has it, of those in the index."""
        place = self._places.get(run)
        if place is None:
            return ()
        output, end = place
        return output.token_ids[end : end + most]

    def tidy(self, num_tokens: int = _MAX_TIDIED) -> None:
        """Take up to so many tokens that were forgotten out of the index, and as many new ones
        in."""
        left = num_tokens
        while self._stale and left:
            output = self._stale[0]
            begin = max(0, output.num_indexed - left)
            self._take_out(output, begin)
            left -= output.num_indexed - begin
            output.num_indexed = begin
            if not begin:
                self._stale.popleft()
        left = num_tokens
        while self._unindexed and left:
            output = self._unindexed[-1]
            # Behind the last token there is nothing to guess.
            end = min(len(output.token_ids) - 1, output.num_indexed + left)
            self._take_in(output, end)
            left -= end - output.num_indexed
            output.num_indexed = end
            if end == len(output.token_ids) - 1:
                self._unindexed.pop()

    def _take_in(self, output: _Output, last: int) -> None:
        places, token_ids = self._places, output.token_ids
        for end in range(output.num_indexed + 1, last + 1):
            for length in self._lengths:
                if length <= end:
                    run = token_ids[end - length : end]
                    place = places.get(run)
                    if place is None or place[0].order <= output.order:
                        places[run] = output, end

    def _take_out(self, output: _Output, first: int) -> None:
        places, token_ids = self._places, output.token_ids
        for end in range(first + 1, output.num_indexed + 1):
            for length in self._lengths:
                run = token_ids[max(0, end - length) : end]
                place = places.get(run)
                if place is not None and place[0] is output:
                    del places[run]


class SuffixProposer:
    """Indexes of the texts that run, and a store for each salt and adapter.

    Args:
        lengths: of the runs that are looked up, the longest first.
        max_tokens: kept over all stores.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int = _MAX_TOKENS) -> None:
        self._lengths = lengths
        self._max_tokens = max_tokens
        # The one that was added to last comes last.
        self._stores: OrderedDict[tuple[str, str], SuffixStore] = OrderedDict()
        self._num_tokens = 0

    def begin(self, request: Request) -> Drafter:
        """A drafter that reads the store of its own kind."""
        return _SuffixDrafter(self, _kind(request), self._lengths)

    def store(self, kind: tuple[str, str]) -> SuffixStore | None:
        """The outputs of this salt and adapter, if there are any."""
        return self._stores.get(kind)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Keep the output, and make room for it."""
        output = tuple(token_ids[len(request.prompt_token_ids) :])[: self._max_tokens]
        if len(output) < 2:
            return
        kind = _kind(request)
        store = self._stores.setdefault(kind, SuffixStore(self._lengths))
        self._stores.move_to_end(kind)
        store.add(output)
        self._num_tokens += len(output)
        while self._num_tokens > self._max_tokens:
            oldest_kind, oldest = next(iter(self._stores.items()))
            self._num_tokens -= oldest.num_tokens
            oldest.forget_oldest()
            self._num_tokens += oldest.num_tokens
            if not oldest.num_tokens:
                del self._stores[oldest_kind]


class _SuffixDrafter:
    """Guesses for one text from itself and from the store of its kind."""

    __slots__ = ("_kind", "_lengths", "_proposer", "_text")

    def __init__(
        self, proposer: SuffixProposer, kind: tuple[str, str], lengths: Sequence[int]
    ) -> None:
        self._proposer = proposer
        self._kind = kind
        self._lengths = lengths
        self._text = SearchedText()

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """See ``Drafter``."""
        text = self._text
        text.extend(token_ids)
        store = self._proposer.store(self._kind)
        if store is not None:
            store.tidy()
        repeats = text.find(self._lengths[-1]) is not None  # else no longer run does
        for length in self._lengths:
            end = text.find(length) if repeats else None
            if end is not None:
                return continuation(token_ids, end, most)
            found = () if store is None else store.find(tuple(token_ids[-length:]), most)
            if found:
                return found
        return ()

    def look_s(self, num_unseen: int) -> float:
        """See ``Drafter``."""
        store = self._proposer.store(self._kind)
        num_behind = 0 if store is None or store.is_tidy else _MAX_TIDIED
        return self._text.look_s(num_unseen) + num_behind * len(self._lengths) * _INDEX_S


def _kind(request: Request) -> tuple[str, str]:
    return request.cache_salt, "" if request.adapter is None else request.adapter.id
