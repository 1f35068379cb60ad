"""Compiles grammars on a thread, and caches the most recently used."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from engine.grammar.backend import CompiledGrammar, GrammarBackend
from engine.types import Grammar

_MAX_CACHED_BYTES = 64 * 2**20
_Compiled = Future[CompiledGrammar]


class GrammarCompiler:
    """Compiles and caches grammars by digest. All calls must come from one thread.

    The cache is bounded by size. Evicting a grammar does not affect those that still use it.

    Args:
        load: makes the backend, on the compiling thread, for the first grammar.
        max_cached_bytes: limit of the cache.
    """

    def __init__(
        self, load: Callable[[], GrammarBackend], *, max_cached_bytes: int = _MAX_CACHED_BYTES
    ) -> None:
        self._load = load
        self._max_bytes = max_cached_bytes
        self._backend: GrammarBackend | None = None  # written only by the compiling thread
        self._executor: ThreadPoolExecutor | None = None
        self._compiling: dict[bytes, _Compiled] = {}
        self._cached: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # oldest first
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """The approximate size of the cache."""
        return self._num_bytes

    def __len__(self) -> int:
        """The number of cached grammars."""
        return len(self._cached)

    def compile(self, grammar: Grammar) -> _Compiled:
        """The compiled grammar, as a future that raises as ``GrammarBackend.compile`` does.

        Grammars that cannot be compiled are not cached.
        """
        self._collect()
        key = hashlib.sha256(f"{grammar.kind}\0{grammar.text}".encode("utf-8", "replace")).digest()
        found = self._cached.get(key)
        if found is not None:
            self._cached.move_to_end(key)
            done: _Compiled = Future()
            done.set_result(found)
            return done
        if key not in self._compiling:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, thread_name_prefix="grammar")
            self._compiling[key] = self._executor.submit(self._compile, grammar)
        return self._compiling[key]

    def close(self) -> None:
        """End the thread after its current work. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._backend is None:
            self._backend = self._load()
        return self._backend.compile(grammar)

    def _collect(self) -> None:
        """Move finished grammars into the cache, and evict the oldest if it is full."""
        for key in [key for key, compiled in self._compiling.items() if compiled.done()]:
            compiled = self._compiling.pop(key)
            if not compiled.cancelled() and compiled.exception() is None:
                self._cached[key] = compiled.result()
                self._num_bytes += compiled.result().num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._cached.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
