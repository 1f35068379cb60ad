"""Which of several engines a request goes to: where its prompt is cached, unless that one is busy.

The rule. Each engine ``e`` that may be given requests has a load ``L(e)``, the tokens of all
sequences in its hands, waiting and running, and of this prompt it has ``h(e)`` tokens cached, as
far as is known here. The request goes to the engine where

    L(e) - W * h(e)          W = 4

is least; equals are told apart by load, and then by who knows fewer prefixes. So

- among engines that have as much of the prompt, the least busy one gets it (join the shortest
  queue; Winston 1977), also where none has any of it;
- an engine that has ``h`` tokens of it gets it as long as it holds at most ``W * h`` tokens more
  than the least busy one: a prefix of one block draws nobody into a crowd, one of thousands of
  tokens may. No choice is ever more than ``W`` times its prompt's length busier than the least
  busy engine.

That is the kind of cost that NVIDIA Dynamo's KV router has, which weighs blocks to be computed
against active ones, in place of the two thresholds of SGLang's cache-aware router
(``cache_threshold``, ``balance_abs_threshold``), with the same aim. ``W`` is above 1 since a token
in the cache of a running sequence costs a step far less than one that must be computed.

What an engine has cached is not asked, but remembered from what it was sent: the newest blocks of
prompts, as many as its cache has room for. A wrong guess costs some computation and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

CACHED_WEIGHT = 4  # tokens more that an engine may hold for each token of the prompt it has cached


class Router:
    """Chooses engines. Belongs to one thread; knows nothing of engines but their numbers.

    Args:
        num_engines: they are numbered from 0.
        block_tokens: tokens that a digest stands for.
        max_blocks: that are remembered of each engine.
    """

    def __init__(self, num_engines: int, block_tokens: int, max_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        # Digests, the one used longest ago first. Those of a prefix are used from its end to its
        # beginning, so it is forgotten from its end, and who knows a block knows all before it.
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]

    def route(self, digests: Sequence[bytes], loads: Mapping[int, int]) -> int:
        """The engine for a prompt, which is taken to have it cached from now on.

        Args:
            digests: of the prompt's full blocks, each standing for all of the prompt up to its
                block's end.
            loads: tokens held by each engine that may be chosen; at least one.
        """

        def cost(engine: int) -> tuple[int, int, int, int]:
            load = loads[engine]
            cached = self.num_cached(engine, digests)
            return load - CACHED_WEIGHT * cached, load, len(self._known[engine]), engine

        chosen = min(loads, key=cost)
        self.note(chosen, digests)
        return chosen

    def num_cached(self, engine: int, digests: Sequence[bytes]) -> int:
        """Tokens at a prompt's beginning that ``engine`` has, as far as is known."""
        known = self._known[engine]
        count = 0
        for digest in digests:
            if digest not in known:
                break
            count += 1
        return count * self._block_tokens

    def note(self, engine: int, digests: Sequence[bytes]) -> None:
        """A prompt was sent to ``engine``."""
        known = self._known[engine]
        for digest in reversed(digests[: self._max_blocks]):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """``engine`` has lost what it had cached."""
        self._known[engine].clear()
