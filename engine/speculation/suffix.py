"""Suffix decoding: drafts from earlier outputs of other requests (Oliaro et al. 2024).

Agents, batches and retries generate nearly the same text again and again. The most recent outputs
are kept, up to a total number of tokens, and indexed by their runs of tokens. The longest match of
a text's last tokens wins: in the text itself first, then in the most recent output.

Outputs are separated by cache salt and adapter, like cached prefixes.

Keeping an output costs almost nothing. The index is updated in small pieces, at each draft: new
outputs are added, the newest first, and forgotten ones are removed. Without drafting, neither
happens.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from engine.speculation.ngram import SearchedText, continuation
from engine.speculation.proposer import Drafter
from engine.types import Request

_MAX_TOKENS = 100_000  # over all outputs kept; each takes some hundred bytes in the index
_MAX_INDEX_UPDATE = 64  # tokens added to the index at each draft, and as many removed
_INDEX_S = 8e-7  # host time to add or remove a run


class _Output:
    """The output of a finished request."""

    __slots__ = ("num_indexed", "order", "token_ids")

    def __init__(self, token_ids: tuple[int, ...], order: int) -> None:
        self.token_ids = token_ids
        self.order = order  # of finishing, over all outputs
        self.num_indexed = 0  # tokens up to which all runs are in the index


class SuffixStore:
    """Outputs of requests that may see each other's; the oldest is forgotten first."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self._lengths = tuple(lengths)
        self._outputs: deque[_Output] = deque()
        self._unindexed: deque[_Output] = deque()  # of these, the newest last
        self._stale: deque[_Output] = deque()  # forgotten, but with runs still in the index
        self._places: dict[tuple[int, ...], tuple[_Output, int]] = {}  # run -> its newest end
        self._num_added = 0
        self.num_tokens = 0

    @property
    def is_index_current(self) -> bool:
        """Whether the index matches the outputs that are kept."""
        return not self._unindexed and not self._stale

    def add(self, token_ids: tuple[int, ...]) -> None:
        """Keep an output. Its continuation of a run takes precedence over earlier ones."""
        self._num_added += 1
        output = _Output(token_ids, self._num_added)
        self._outputs.append(output)
        self._unindexed.append(output)
        self.num_tokens += len(token_ids)

    def evict_oldest(self) -> None:
        """Drop the oldest output."""
        output = self._outputs.popleft()
        self.num_tokens -= len(output.token_ids)
        if self._unindexed and self._unindexed[0] is output:
            self._unindexed.popleft()
        if output.num_indexed:
            self._stale.append(output)

    def find(self, run: tuple[int, ...], most: int) -> tuple[int, ...]:
        """What followed a run in the newest indexed output that has it."""
        place = self._places.get(run)
        if place is None:
            return ()
        output, end = place
        return output.token_ids[end : end + most]

    def update_index(self) -> None:
        """Remove some forgotten tokens from the index, and add as many new ones."""
        left = _MAX_INDEX_UPDATE
        while self._stale and left:
            output = self._stale[0]
            begin = max(0, output.num_indexed - left)
            self._unindex_runs(output, begin)
            left -= output.num_indexed - begin
            output.num_indexed = begin
            if not begin:
                self._stale.popleft()
        left = _MAX_INDEX_UPDATE
        while self._unindexed and left:
            output = self._unindexed[-1]
            # Nothing follows the last token.
            end = min(len(output.token_ids) - 1, output.num_indexed + left)
            self._index_runs(output, end)
            left -= end - output.num_indexed
            output.num_indexed = end
            if end == len(output.token_ids) - 1:
                self._unindexed.pop()

    def _index_runs(self, output: _Output, last: int) -> None:
        places, token_ids = self._places, output.token_ids
        for end in range(output.num_indexed + 1, last + 1):
            for length in self._lengths:
                if length <= end:
                    run = token_ids[end - length : end]
                    place = places.get(run)
                    if place is None or place[0].order <= output.order:
                        places[run] = output, end

    def _unindex_runs(self, output: _Output, first: int) -> None:
        places, token_ids = self._places, output.token_ids
        for end in range(first + 1, output.num_indexed + 1):
            for length in self._lengths:
                run = token_ids[max(0, end - length) : end]
                place = places.get(run)
                if place is not None and place[0] is output:
                    del places[run]


class SuffixProposer:
    """Indexes the running texts, and keeps a store for each salt and adapter.

    Args:
        lengths: of the runs that are looked up, longest first.
        max_tokens: limit over all stores.
    """

    def __init__(self, lengths: Sequence[int], max_tokens: int = _MAX_TOKENS) -> None:
        self._lengths = lengths
        self._max_tokens = max_tokens
        # The most recently extended store comes last.
        self._stores: OrderedDict[tuple[str, str], SuffixStore] = OrderedDict()
        self._num_tokens = 0

    def begin(self, request: Request) -> Drafter:
        """A drafter that uses the store for the request's salt and adapter."""
        return _SuffixDrafter(self, _kind(request), self._lengths)

    def store(self, kind: tuple[str, str]) -> SuffixStore | None:
        """The store for this salt and adapter, if there is one."""
        return self._stores.get(kind)

    def finish(self, request: Request, token_ids: Sequence[int]) -> None:
        """Keep the output, forgetting the oldest ones to make room."""
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
            oldest.evict_oldest()
            self._num_tokens += oldest.num_tokens
            if not oldest.num_tokens:
                del self._stores[oldest_kind]


class _SuffixDrafter:
    """Drafts for one text from itself and from the matching store."""

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
            store.update_index()
        repeats = text.find(self._lengths[-1]) is not None  # else no longer run does either
        for length in self._lengths:
            end = text.find(length) if repeats else None
            if end is not None:
                return continuation(token_ids, end, most)
            found = () if store is None else store.find(tuple(token_ids[-length:]), most)
            if found:
                return found
        return ()

    def lookup_cost_s(self, num_unseen: int) -> float:
        """See ``Drafter``."""
        store = self._proposer.store(self._kind)
        num_behind = 0 if store is None or store.is_index_current else _MAX_INDEX_UPDATE
        return self._text.lookup_cost_s(num_unseen) + num_behind * len(self._lengths) * _INDEX_S


def _kind(request: Request) -> tuple[str, str]:
    return request.cache_salt, "" if request.adapter is None else request.adapter.id
