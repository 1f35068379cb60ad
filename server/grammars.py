"""Validation of requests' grammars before a response begins."""

from __future__ import annotations

from engine.grammar.check import GrammarChecker
from engine.types import Grammar
from server.errors import bad_field, shorten


class GrammarValidator:
    """The endpoints' access to the grammar checker. Belongs to one event loop."""

    def __init__(self) -> None:
        self._checker: GrammarChecker | None = None  # made, with its processes, when first needed

    async def check(self, grammar: Grammar, *, param: str) -> None:
        """Reject a grammar that cannot be enforced.

        Raises:
            ApiError: 400 that names ``param``; code ``grammar_timeout`` if the grammar is well
                formed but takes too much time or memory.
        """
        if self._checker is None:
            self._checker = GrammarChecker()
        refusal = await self._checker.check(grammar)
        if refusal is not None:
            raise bad_field(
                param, f"cannot be used: {shorten(refusal.message, 400)}", code=refusal.code
            )

    def close(self) -> None:
        """Stop the checker's processes. Idempotent."""
        if self._checker is not None:
            self._checker.close()
            self._checker = None
