"""Compiles grammars on a thread, and keeps those that were used last."""

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
    """Grammars by digest, in a cache bounded by bytes. All calls from one thread.

    Who holds a compiled grammar keeps it, whatever the cache does.

    Args:
        load: makes the backend, on the thread, when the first grammar comes.
        max_cached_bytes: of what is kept for later requests.
    """

    def __init__(
        self, load: Callable[[], GrammarBackend], *, max_cached_bytes: int = _MAX_CACHED_BYTES
    ) -> None:
        self._load = load
        self._max_bytes = max_cached_bytes
        self._backend: GrammarBackend | None = None  # written by the thread alone
        self._executor: ThreadPoolExecutor | None = None
        self._compiling: dict[bytes, _Compiled] = {}
        self._cached: OrderedDict[bytes, CompiledGrammar] = OrderedDict()  # oldest first
        self._num_bytes = 0

    @property
    def num_bytes(self) -> int:
        """What the cache holds, roughly."""
        return self._num_bytes

    def __len__(self) -> int:
        """Grammars in the cache."""
        return len(self._cached)

    def compile(self, grammar: Grammar) -> _Compiled:
        """The compiled grammar, at once or later; the future raises as ``GrammarBackend.compile``
        does. Grammars that cannot be compiled are not remembered.
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
        """End the thread once it has done what it is at. Idempotent."""
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None

    def _compile(self, grammar: Grammar) -> CompiledGrammar:
        if self._backend is None:
            self._backend = self._load()
        return self._backend.compile(grammar)

    def _collect(self) -> None:
        """Take what is compiled by now into the cache, and let the oldest go."""
        for key in [key for key, compiled in self._compiling.items() if compiled.done()]:
            compiled = self._compiling.pop(key)
            if not compiled.cancelled() and compiled.exception() is None:
                self._cached[key] = compiled.result()
                self._num_bytes += compiled.result().num_bytes
        while self._num_bytes > self._max_bytes:
            _, oldest = self._cached.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
