"""Chooses the engine for a request: one where its prompt is cached, unless that one is too busy.

Each available engine ``e`` has a load ``L(e)``, the number of tokens of all its sequences, waiting
and running. Of the prompt it has ``h(e)`` tokens cached, as far as is known here. The request goes
to the engine with the smallest

    L(e) - W * h(e)          W = 4

Ties are broken by load, then by the number of known prefixes. As a consequence:

- Among engines with equally much of the prompt cached, possibly nothing, the least busy one is
  chosen (join the shortest queue; Winston 1977).
- An engine with ``h`` cached tokens is chosen as long as it holds at most ``W * h`` tokens more
  than the least busy one. A prefix of one block does not attract a request to a busy engine, but
  one of thousands of tokens may. The chosen engine is never busier than the least busy one by more
  than ``W`` times the prompt's length.

The cost resembles that of NVIDIA Dynamo's KV router, which weighs blocks to be computed against
active ones. SGLang's cache-aware router pursues the same aim with two thresholds
(``cache_threshold``, ``balance_abs_threshold``). ``W`` is above 1 because a cached token of a
running sequence costs a step far less than a token that must be computed.

Engines are not asked what they have cached. It is estimated from what was sent to them: the newest
blocks of prompts, as many as fit into the cache. A wrong estimate costs only computation.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence

CACHED_WEIGHT = 4  # tokens of load that one cached token of the prompt outweighs


class Router:
    """Chooses engines, which it knows only by number. Belongs to one thread.

    Args:
        num_engines: number of engines.
        block_tokens: tokens per digest.
        max_blocks: blocks remembered for each engine.
    """

    def __init__(self, num_engines: int, block_tokens: int, max_blocks: int) -> None:
        self._block_tokens = block_tokens
        self._max_blocks = max_blocks
        # Digests, least recently used first. Those of a prompt are touched from its end to its
        # beginning, so prefixes are forgotten from the end, and knowing a block implies knowing all
        # before it.
        self._known: list[OrderedDict[bytes, None]] = [OrderedDict() for _ in range(num_engines)]

    def route(self, digests: Sequence[bytes], loads: Mapping[int, int]) -> int:
        """Choose the engine for a prompt and note it there as cached.

        Args:
            digests: of the prompt's full blocks; each identifies the prompt up to its block's end.
            loads: tokens held by each available engine; at least one entry.
        """

        def cost(engine: int) -> tuple[int, int, int, int]:
            load = loads[engine]
            cached = self.num_cached(engine, digests)
            return load - CACHED_WEIGHT * cached, load, len(self._known[engine]), engine

        chosen = min(loads, key=cost)
        self.record_prompt(chosen, digests)
        return chosen

    def num_cached(self, engine: int, digests: Sequence[bytes]) -> int:
        """How many leading tokens of a prompt ``engine`` is believed to have cached."""
        known = self._known[engine]
        count = 0
        for digest in digests:
            if digest not in known:
                break
            count += 1
        return count * self._block_tokens

    def record_prompt(self, engine: int, digests: Sequence[bytes]) -> None:
        """Note that a prompt was sent to ``engine``."""
        known = self._known[engine]
        for digest in reversed(digests[: self._max_blocks]):
            known[digest] = None
            known.move_to_end(digest)
        while len(known) > self._max_blocks:
            known.popitem(last=False)

    def forget(self, engine: int) -> None:
        """Note that ``engine`` has lost its cache."""
        self._known[engine].clear()
