"""Guessing from texts that other requests have ended with (suffix decoding, Oliaro et al. 2024).

Agents, batches and retries write nearly the same text again and again. The newest outputs are
kept, up to a number of tokens, and indexed by their runs of tokens. The longest run of last tokens
that is found wins: in the text's own past first, then in the newest output that has it.

Texts are kept apart by cache salt and adapter, as cached prefixes are.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from engine.speculation.ngram import NgramIndex, continuation, last_runs
from engine.speculation.proposer import Drafter
from engine.types import Request

_MAX_TOKENS = 100_000  # of all outputs that are kept; each takes some hundred bytes in the index
_Place = tuple[tuple[int, ...], int]  # an output, and where in it a run ends


class SuffixStore:
    """Outputs of requests that may see each other's, the oldest forgotten first."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._outputs: deque[tuple[int, ...]] = deque()
        self._places: dict[tuple[int, ...], _Place] = {}
        self.num_tokens = 0

    def add(self, output: tuple[int, ...]) -> None:
        """Keep an output. What follows a run in it is preferred to what followed it before."""
        self._outputs.append(output)
        self.num_tokens += len(output)
        places = self._places
        for end in range(1, len(output)):  # behind the last token there is nothing to guess
            for length in self._lengths:
                if length <= end:
                    places[output[end - length : end]] = output, end

    def forget_oldest(self) -> None:
        """Let go of the oldest output and of the runs that lead to it."""
        output = self._outputs.popleft()
        self.num_tokens -= len(output)
        places = self._places
        for end in range(1, len(output)):
            for length in self._lengths:
                run = output[max(0, end - length) : end]
                place = places.get(run)
                if place is not None and place[0] is output:
                    del places[run]

    def find(self, run: tuple[int, ...], most: int) -> tuple[int, ...]:
        """What followed a run in the newest output that has it."""
        place = self._places.get(run)
        if place is None:
            return ()
        output, end = place
        return output[end : end + most]


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

    __slots__ = ("_index", "_kind", "_lengths", "_proposer")

    def __init__(
        self, proposer: SuffixProposer, kind: tuple[str, str], lengths: Sequence[int]
    ) -> None:
        self._proposer = proposer
        self._kind = kind
        self._lengths = lengths
        self._index = NgramIndex(lengths)

    def propose(self, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        """See ``Drafter``."""
        self._index.extend(token_ids, len(token_ids) - 1)
        store = self._proposer.store(self._kind)
        for run in last_runs(token_ids, self._lengths):
            end = self._index.find(run)
            if end is not None:
                return continuation(token_ids, end, most)
            found = () if store is None else store.find(run, most)
            if found:
                return found
        return ()


def _kind(request: Request) -> tuple[str, str]:
    return request.cache_salt, "" if request.adapter is None else request.adapter.id
