"""Holds requests until their grammars are compiled, outside the scheduler's queue."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from typing import NamedTuple

from engine.errors import Failure
from engine.grammar.backend import CompiledGrammar
from engine.grammar.compiler import GrammarCompiler
from engine.types import Request


class ReadyRequest(NamedTuple):
    """A request whose wait is over."""

    request: Request
    compiled: CompiledGrammar | None  # None: there is a failure
    failure: Failure | None = None


class GrammarWaitQueue:
    """Holds requests until their grammars are compiled. Used only by the engine's thread."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._held: dict[str, tuple[Request, Future[CompiledGrammar]]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._held

    def submit(self, request: Request) -> CompiledGrammar | None:
        """The grammar of a request, if it is already compiled; otherwise the request is held.

        Raises:
            InvalidParameter: the grammar cannot be compiled.
        """
        grammar = request.sampling.grammar
        assert grammar is not None
        compiled = self._compiler.compile(grammar)
        if compiled.done() and not self._held:  # keep the order of arrival
            return compiled.result()
        self._held[request.id] = request, compiled
        return None

    def requests(self) -> Iterator[Request]:
        """The held requests, the longest-waiting first."""
        return (request for request, _ in self._held.values())

    @property
    def has_ready(self) -> bool:
        """Whether any held request can continue."""
        return any(compiled.done() for _, compiled in self._held.values())

    def take_ready(self) -> Iterator[ReadyRequest]:
        """Release the requests whose grammars are compiled by now."""
        for request, compiled in list(self._held.values()):
            if compiled.done():
                del self._held[request.id]
                error = compiled.exception()
                if error is None:
                    yield ReadyRequest(request, compiled.result())
                else:
                    yield ReadyRequest(request, None, Failure.of(error))

    def discard(self, request_id: str) -> bool:
        """Drop a request that has been aborted; false if it is not held."""
        return self._held.pop(request_id, None) is not None

    def clear(self) -> list[str]:
        """Drop all requests and return their ids."""
        ids = list(self._held)
        self._held.clear()
        return ids
